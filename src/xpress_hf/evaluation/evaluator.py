"""Runs prompts through target and drafter, one record per answer."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..decoding.acceptance import AcceptanceRecord
from ..decoding.candidates import draft_limit
from ..modeling.drafter import XPressDrafter
from .agreement import first_difference
from .observer import diagnose, observed
from .prompts import BenchmarkPrompt, PromptSet, encode_prompt
from .records import Agreement, PromptRecord, RecordFile, run_header
from .replay import end_ids


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


class Evaluator:
    """Answers prompts with a drafter and notes every cycle.

    Args:
        target, tokenizer, drafter: the pair under test; `drafter.speculation` decides how it is run.
        settings: how prompts are answered.
        judge: float32 twin of a half-precision target; tells near ties from faults. Default: the target itself.
        names: of target and drafter in the records.

    Attributes:
        skipped: turns that were not asked because what was said before left no room, in words.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        drafter: XPressDrafter,
        settings: EvaluationSettings,
        judge: PreTrainedModel | None = None,
        names: tuple[str, str] | None = None,
    ):
        self.target, self.tokenizer, self.drafter = target, tokenizer, drafter
        self.settings, self.judge = settings, judge or target
        self.names = names or (target.name_or_path, drafter.name_or_path)
        self.arm = "refined" if drafter.num_sweeps else "bare"
        self.end_ids = end_ids(target)
        self.draft_limit = draft_limit(drafter, target.generation_config)
        self.skipped: list[str] = []

    def header(self, sets: Sequence[PromptSet]) -> dict[str, Any]:
        """Where the figures of this run come from."""
        return run_header(
            self.target,
            self.names[0],
            self.drafter,
            self.names[1],
            [one.describe() for one in sets],
            speculation={**asdict(self.drafter.speculation), "sweeps": self.drafter.num_sweeps},
            **asdict(self.settings),
        )

    def num_answers(self, sets: Sequence[PromptSet]) -> int:
        """Answers that a whole run gives."""
        return sum(len(prompt.turns) for one in sets for prompt in one.prompts) * len(self.settings.draws)

    def run(
        self,
        sets: Sequence[PromptSet],
        path: str | Path | None = None,
        on_answer: Callable[[int], None] = lambda count: None,
    ) -> list[PromptRecord]:
        """Answers all prompts; what `path` holds already is not answered again.

        Args:
            path: JSON Lines file of the records; `None` keeps them in memory alone.
            on_answer: called with the number of answers that were added, or found in the file.

        Raises:
            ValueError: a prompt does not fit into the target's context (before any answer), or the file belongs to
                another run.
        """
        prompts = [prompt for one in sets for prompt in one.prompts]
        self._check_lengths(prompts)
        keys = set()
        with RecordFile(path, self.header(sets)) as file:
            for prompt in prompts:
                for temperature, seed in self.settings.draws:
                    wanted = [self._key(prompt, turn, seed, temperature) for turn in range(len(prompt.turns))]
                    keys |= set(wanted)
                    on_answer(sum(key in file for key in wanted))
                    if not all(key in file for key in wanted):
                        self._converse(prompt, seed, temperature, file, on_answer)
            return [record for key, record in file.records.items() if key in keys]

    def _key(self, prompt: BenchmarkPrompt, turn: int, seed: int, temperature: float) -> tuple:
        return (self.arm, prompt.benchmark, prompt.id, turn, seed, temperature)

    def _encode(self, messages: list[dict[str, str]]) -> torch.Tensor:
        return encode_prompt(self.tokenizer, messages, self.target.device, self.settings.chat_template_kwargs)

    @property
    def context_length(self) -> int | None:
        return getattr(self.target.config.get_text_config(), "max_position_embeddings", None)

    def _fits(self, ids: torch.Tensor) -> bool:
        return self.context_length is None or ids.shape[1] + self.settings.max_new_tokens <= self.context_length

    def _check_lengths(self, prompts: Sequence[BenchmarkPrompt]) -> None:
        for prompt in prompts:
            ids = self._encode([{"role": "user", "content": prompt.turns[0]}])
            if not self._fits(ids):
                raise ValueError(
                    f"{prompt.id}: {ids.shape[1]} tokens of prompt and `max_new_tokens`="
                    f"{self.settings.max_new_tokens} are more than the {self.context_length} places of the target; "
                    "ask for fewer, or leave the prompt out."
                )

    def _converse(
        self,
        prompt: BenchmarkPrompt,
        seed: int,
        temperature: float,
        file: RecordFile,
        on_answer: Callable[[int], None],
    ) -> None:
        """Asks turn by turn; an answer that the file holds is made again where a later turn builds on it."""
        messages: list[dict[str, str]] = []
        keys = [self._key(prompt, turn, seed, temperature) for turn in range(len(prompt.turns))]
        last = max(turn for turn, key in enumerate(keys) if key not in file)
        for turn in range(last + 1):
            messages.append({"role": "user", "content": prompt.turns[turn]})
            input_ids = self._encode(messages)
            if not self._fits(input_ids):
                self.skipped.append(f"{prompt.id}, turn {turn}: {input_ids.shape[1]} tokens of conversation")
                return
            is_new = keys[turn] not in file
            record, answer = self._answer(prompt, turn, seed, temperature, input_ids, compare=is_new)
            if is_new:
                file.append(record)
                on_answer(1)
            text = self.tokenizer.decode(answer, skip_special_tokens=True)
            messages.append({"role": "assistant", "content": text})

    def _generate(self, input_ids: torch.Tensor, temperature: float, drafter: XPressDrafter | None) -> torch.Tensor:
        options: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        if temperature:
            options = {"do_sample": True, "temperature": temperature, "top_p": 1.0, "top_k": 0}
        if drafter is not None:
            options["assistant_model"] = drafter
        output = self.target.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=self.settings.max_new_tokens,
            **options,
        )
        return output[0].cpu()

    def _answer(
        self,
        prompt: BenchmarkPrompt,
        turn: int,
        seed: int,
        temperature: float,
        input_ids: torch.Tensor,
        compare: bool,
    ) -> tuple[PromptRecord, torch.Tensor]:
        """The record of one answer and its ids."""
        length = input_ids.shape[1]
        devices = range(torch.cuda.device_count())
        with torch.random.fork_rng(devices=devices), observed(self.drafter) as blocks:
            # Every answer has its own stream of random numbers, wherever a run was interrupted.
            torch.manual_seed(stream_seed(prompt, turn, seed))
            ids = self._generate(input_ids, temperature, self.drafter)
        acceptance: AcceptanceRecord = self.drafter.last_acceptance
        fields: dict[str, Any] = {}
        if self.drafter.num_sweeps:
            found = diagnose(blocks, acceptance, ids, self.end_ids, self.draft_limit, greedy=not temperature)
            fields = asdict(found)
        if compare and self.settings.agreement and not temperature:
            fields["agreement"] = self._agreement(input_ids, ids)
        record = PromptRecord(
            arm=self.arm,
            benchmark=prompt.benchmark,
            id=prompt.id,
            turn=turn,
            seed=seed,
            temperature=temperature,
            prompt_tokens=length,
            new_tokens=len(ids) - length,
            num_draft_tokens=acceptance.num_draft_tokens,
            accepted=acceptance.accepted,
            verified=acceptance.verified,
            **fields,
        )
        return record, ids[length:]

    def _agreement(self, input_ids: torch.Tensor, ids: torch.Tensor) -> Agreement:
        length = input_ids.shape[1]
        plain = self._generate(input_ids, 0.0, None)
        return Agreement.of(first_difference(self.judge, length, plain, ids), length)


def stream_seed(prompt: BenchmarkPrompt, turn: int, seed: int) -> int:
    """Seed of one answer: no two answers of a run share their random numbers."""
    name = f"{seed}/{prompt.benchmark}/{prompt.id}/{turn}"
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")
