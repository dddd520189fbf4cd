"""Runs prompts through target and drafter, one record per answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..decoding.acceptance import AcceptanceRecord
from ..decoding.candidates import draft_limit
from ..modeling.drafter import XPressDrafter
from .answering import Answering, EvaluationSettings, stream_seed
from .observer import diagnose, observed
from .prompts import BenchmarkPrompt, PromptSet
from .records import PromptRecord, RecordFile, run_header
from .replay import end_ids


class Evaluator(Answering):
    """Answers prompts with a drafter and notes every cycle.

    Args:
        target, tokenizer, drafter: the pair under test; `drafter.speculation` decides how it is run.
        settings: how prompts are answered.
        judge: float32 twin of a half-precision target; tells near ties from faults. Default: the target itself.
        names: of target and drafter in the records.
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
        super().__init__(target, tokenizer, settings, judge)
        self.drafter = drafter
        self.names = names or (target.name_or_path, drafter.name_or_path)
        self.arm = "refined" if drafter.num_sweeps else "bare"
        self.end_ids = end_ids(target)
        self.draft_limit = draft_limit(drafter, target.generation_config)

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
        self.check_lengths(prompts)
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
            input_ids = self.encode(messages)
            if not self.has_room(prompt, turn, input_ids):
                return
            is_new = keys[turn] not in file
            record, answer = self._answer(prompt, turn, seed, temperature, input_ids, compare=is_new)
            if is_new:
                file.append(record)
                on_answer(1)
            text = self.tokenizer.decode(answer, skip_special_tokens=True)
            messages.append({"role": "assistant", "content": text})

    def _generate(self, input_ids: torch.Tensor, temperature: float, drafter: XPressDrafter | None) -> torch.Tensor:
        options = self.options(temperature)
        if drafter is not None:
            options["assistant_model"] = drafter
        output = self.target.generate(input_ids, attention_mask=torch.ones_like(input_ids), **options)
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
            plain = self._generate(input_ids, 0.0, None)
            fields["agreement"] = self.agreement(length, plain, ids)
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
