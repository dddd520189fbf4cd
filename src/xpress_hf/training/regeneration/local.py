"""The target answers by itself, with `generate()` of transformers and no drafter."""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..chat import ChatTemplate, Message
from .prompts import Answer, Prompt, Sampling

# Rows are sorted by length inside a window of this many batches.
WINDOW = 8


@dataclass
class Dialogue:
    """A prompt on its way: what was said so far, and the last answer."""

    prompt: Prompt
    template: ChatTemplate
    messages: list[Message] = field(default_factory=list)
    response_ids: list[int] = field(default_factory=list)
    finished: bool = True
    num_new_tokens: int = 0

    def answer(self) -> Answer:
        return Answer(self.messages, self.finished, self.num_new_tokens, self.response_ids)


class TargetAnswerer:
    """Batches with padding on the left, sorted by length inside windows of eight batches.

    Which rows share a batch depends on the source alone, not on the rows that are done, and each batch is seeded by
    itself: rounding and sampling are the same wherever a run was killed.

    Args:
        model: the target; its `generation_config` counts, apart from the settings of `Sampling`.
        tokenizer: its tokenizer, with the chat template.
        name: written with the answers.
        batch_size: rows of one call of `generate()`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        name: str | None = None,
        batch_size: int = 16,
    ):
        if batch_size < 1:
            raise ValueError(f"`batch_size` must be >= 1, got {batch_size}.")
        self.model = model
        self.tokenizer = tokenizer
        self.name = name or model.name_or_path
        self.batch_size = batch_size
        self.end_ids = end_ids(model, tokenizer)

    def answer(
        self, prompts: list[Prompt], done: Container[int], sampling: Sampling
    ) -> Iterator[list[tuple[Prompt, Answer]]]:
        size = self.batch_size * WINDOW
        for start in range(0, len(prompts), size):
            window = prompts[start : start + size]
            if all(prompt.row in done for prompt in window):
                continue
            ids = {prompt.row: self._prompt_ids(self._dialogue(prompt), prompt.turns[0]) for prompt in window}
            window = sorted(window, key=lambda prompt: len(ids[prompt.row]))
            for first in range(0, len(window), self.batch_size):
                batch = window[first : first + self.batch_size]
                if not all(prompt.row in done for prompt in batch):
                    answers = self._answer_batch(batch, sampling)
                    yield [(prompt, answer) for prompt, answer in answers if prompt.row not in done]

    def _dialogue(self, prompt: Prompt) -> Dialogue:
        return Dialogue(prompt, ChatTemplate(self.tokenizer, prompt.tools, prompt.chat_template_kwargs))

    def _prompt_ids(self, dialogue: Dialogue, turn: list[Message]) -> list[int]:
        try:
            return dialogue.template.prompt_ids([*dialogue.messages, *turn])
        except ValueError as error:
            raise ValueError(f"{dialogue.prompt.where}: {error}") from error

    def _answer_batch(self, batch: list[Prompt], sampling: Sampling) -> list[tuple[Prompt, Answer]]:
        dialogues = [self._dialogue(prompt) for prompt in batch]
        for turn in range(max(len(prompt.turns) for prompt in batch)):
            # Behind an answer that was cut no conversation goes on.
            active = [one for one in dialogues if one.finished and len(one.prompt.turns) > turn]
            if not active:
                break
            prompts = [self._prompt_ids(one, one.prompt.turns[turn]) for one in active]
            self._check_lengths(active, prompts, sampling)
            # Every batch and turn has its own stream of random numbers; hashes of numbers are the same in all runs.
            seed = hash((sampling.seed, min(prompt.row for prompt in batch), turn)) % 2**63
            for one, response in zip(active, self._generate(prompts, sampling, seed), strict=True):
                self._add(one, turn, response)
        return [
            (one.prompt, Answer(one.messages, one.finished, one.num_new_tokens, one.response_ids)) for one in dialogues
        ]

    def _add(self, dialogue: Dialogue, turn: int, response: list[int]) -> None:
        """Cuts a response behind its first end-of-turn id and appends it to what was said."""
        stop = next((place for place, token in enumerate(response) if token in self.end_ids), None)
        dialogue.finished = stop is not None
        words = response if stop is None else response[:stop]
        dialogue.response_ids = response if stop is None else response[: stop + 1]
        dialogue.num_new_tokens += len(dialogue.response_ids)
        # Special tokens stay: a template may need those of a tool call or of a chain of thought.
        content = self.tokenizer.decode(words, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        dialogue.messages += [*dialogue.prompt.turns[turn], {"role": "assistant", "content": content}]

    def _check_lengths(self, dialogues: list[Dialogue], prompts: list[list[int]], sampling: Sampling) -> None:
        limit = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        for one, ids in zip(dialogues, prompts, strict=True):
            if limit is not None and len(ids) + sampling.max_new_tokens > limit:
                raise ValueError(
                    f"{one.prompt.where}: {len(ids)} tokens of prompt and `max_new_tokens`={sampling.max_new_tokens} "
                    f"are more than the {limit} places of the target; ask for fewer, or leave the row out."
                )

    def _generate(self, prompts: list[list[int]], sampling: Sampling, seed: int) -> list[list[int]]:
        """Responses, each with whatever follows its end."""
        length = max(map(len, prompts))
        input_ids = torch.full((len(prompts), length), self.end_ids[0] if self.end_ids else 0)
        attention_mask = torch.zeros_like(input_ids)
        for row, ids in enumerate(prompts):
            input_ids[row, length - len(ids) :] = torch.tensor(ids)
            attention_mask[row, length - len(ids) :] = 1
        options: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        if sampling.temperature > 0:
            options = {"do_sample": True, "temperature": sampling.temperature}
            options |= {"top_p": sampling.top_p, "top_k": sampling.top_k}
        device = self.model.device
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            torch.manual_seed(seed)
            output = self.model.generate(
                input_ids.to(device),
                attention_mask=attention_mask.to(device),
                max_new_tokens=sampling.max_new_tokens,
                eos_token_id=self.end_ids or None,
                pad_token_id=self.end_ids[0] if self.end_ids else None,
                **options,
            )
        return output[:, length:].tolist()


def end_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids that end an answer: those of the target's generation config and the tokenizer's."""
    configured = model.generation_config.eos_token_id
    found = configured if isinstance(configured, list) else [configured]
    return sorted({token for token in (*found, tokenizer.eos_token_id) if token is not None})
