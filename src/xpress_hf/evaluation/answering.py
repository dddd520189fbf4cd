"""What evaluator and benchmark share: conversations as ids that fit, options of generate(), agreement."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .agreement import first_difference
from .prompts import BenchmarkPrompt, encode_prompt
from .records import Agreement


@dataclass(frozen=True)
class EvaluationSettings:
    """How prompts are answered.

    Args:
        max_new_tokens: longest answer.
        temperatures: 0 = greedy; above 0 the whole law is sampled (no top-k, no top-p).
        seeds: draws per sampled answer; greedy answers are made once.
        chat_template_kwargs: switches of the chat template.
        agreement: whether greedy answers are compared with plain generate, which costs a second run of each.
    """

    max_new_tokens: int = 256
    temperatures: tuple[float, ...] = (0.0,)
    seeds: tuple[int, ...] = (0,)
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    agreement: bool = True

    def __post_init__(self):
        if self.max_new_tokens < 1:
            raise ValueError(f"`max_new_tokens` must be >= 1, got {self.max_new_tokens}.")
        for name in ("temperatures", "seeds"):
            values = getattr(self, name)
            if not values or min(values) < 0 or len(set(values)) < len(values):
                raise ValueError(f"`{name}` must be different numbers >= 0, got {list(values)}.")

    @property
    def draws(self) -> list[tuple[float, int]]:
        """Temperature and seed of every answer to one prompt."""
        return [
            (temperature, seed)
            for temperature in self.temperatures
            for seed in (self.seeds if temperature else self.seeds[:1])
        ]


class Answering:
    """A target that answers prompts.

    Args:
        target, tokenizer: what answers.
        settings: how prompts are answered.
        judge: float32 twin of a half-precision target; tells near ties from faults. Default: the target itself.

    Attributes:
        skipped: turns that were not asked because what was said before left no room, in words.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        settings: EvaluationSettings,
        judge: PreTrainedModel | None = None,
    ):
        self.target, self.tokenizer, self.settings = target, tokenizer, settings
        self.judge = judge or target
        self.skipped: list[str] = []

    @property
    def context_length(self) -> int | None:
        return getattr(self.target.config.get_text_config(), "max_position_embeddings", None)

    def encode(self, messages: list[dict[str, str]]) -> torch.Tensor:
        """A conversation -> ids [1, S]."""
        return encode_prompt(self.tokenizer, messages, self.target.device, self.settings.chat_template_kwargs)

    def fits(self, input_ids: torch.Tensor) -> bool:
        """Whether the target has places for these ids and a whole answer."""
        return self.context_length is None or input_ids.shape[1] + self.settings.max_new_tokens <= self.context_length

    def has_room(self, prompt: BenchmarkPrompt, turn: int, input_ids: torch.Tensor) -> bool:
        """As `fits`, but keeps note of a turn that cannot be asked."""
        if not self.fits(input_ids):
            self.skipped.append(f"{prompt.id}, turn {turn}: {input_ids.shape[1]} tokens of conversation")
            return False
        return True

    def check_lengths(self, prompts: Sequence[BenchmarkPrompt]) -> None:
        """Raises `ValueError` where a first turn does not fit into the target's context."""
        for prompt in prompts:
            input_ids = self.encode([{"role": "user", "content": prompt.turns[0]}])
            if not self.fits(input_ids):
                raise ValueError(
                    f"{prompt.id}: {input_ids.shape[1]} tokens of prompt and `max_new_tokens`="
                    f"{self.settings.max_new_tokens} are more than the {self.context_length} places of the target; "
                    "ask for fewer, or leave the prompt out."
                )

    def options(self, temperature: float) -> dict[str, Any]:
        """Arguments of generate() beside the prompt: greedy, or a draw from the whole law."""
        law: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        if temperature:
            law = {"do_sample": True, "temperature": temperature, "top_p": 1.0, "top_k": 0}
        return {"max_new_tokens": self.settings.max_new_tokens, **law}

    def agreement(self, prompt_length: int, plain_ids: torch.Tensor, ids: torch.Tensor) -> Agreement:
        """A greedy text against that of plain generate, both [S] with the prompt."""
        return Agreement.of(first_difference(self.judge, prompt_length, plain_ids, ids), prompt_length)


def stream_seed(prompt: BenchmarkPrompt, turn: int, seed: int) -> int:
    """Seed of one answer: no two answers of a run share their random numbers."""
    name = f"{seed}/{prompt.benchmark}/{prompt.id}/{turn}"
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")
