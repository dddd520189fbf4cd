"""Timed runs of several arms, interleaved prompt by prompt, so that a machine that slows down slows all of them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from typing import Any

import psutil
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .agreement import first_difference
from .arms import PLAIN, Arm
from .prompts import BenchmarkPrompt
from .records import Agreement, PromptRecord, RecordFile
from .time_split import DecodeClock, span_cost_s
from .timing import TimedRun, timed_generate

# Long enough for every arm to draft, verify and crop a few times.
WARM_UP_TOKENS = 24


class Benchmark:
    """Answers prompts with every arm and writes one row per answer.

    Of a chat of several turns every arm sees the same one: that of plain generate. Rows of a prompt are written when
    all arms have answered it, so that an interrupted run holds whole prompts; a run that goes on answers the others.

    Args:
        target, tokenizer: what answers.
        arms: as `parse_arms` gives them, `plain` first.
        file: where rows go.
        max_new_tokens: longest answer.
        temperature, seed: 0 = greedy; above it every arm draws its own text from this seed.
        judge: float32 twin of a half-precision target, tells near ties from faults. Default: the target itself.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        arms: list[Arm],
        file: RecordFile,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        seed: int = 0,
        judge: PreTrainedModel | None = None,
    ):
        self.target, self.tokenizer, self.arms, self.file = target, tokenizer, arms, file
        self.temperature, self.seed, self.judge = temperature, seed, judge or target
        self.options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": temperature > 0}
        if temperature > 0:
            self.options["temperature"] = temperature
        self.span_cost_s = 0.0

    def warm_up(self) -> None:
        """Runs every arm once, so that no prompt pays for it and an arm that cannot run says so at once; measures what
        timing costs."""
        ids = torch.arange(3, 40, device=self.target.device)[None]
        for arm in self.arms:
            self._timed(arm, ids, max_new_tokens=WARM_UP_TOKENS)
        self.span_cost_s = span_cost_s(self.target)

    def run(self, prompts: Iterable[BenchmarkPrompt], encode: Callable[[list[dict[str, str]]], torch.Tensor]) -> None:
        """Answers the prompts that the file lacks.

        Args:
            encode: messages of a chat -> ids [1, S].
        """
        for number, prompt in enumerate(prompts):
            turns = range(len(prompt.turns))
            if all(self._key(arm, prompt, turn) in self.file for arm in self.arms for turn in turns):
                continue
            first = number % len(self.arms)
            rows = self._answer(prompt, self.arms[first:] + self.arms[:first], encode)
            for row in rows:
                # An interruption while rows were written leaves some of them.
                if row.key not in self.file:
                    self.file.append(row)

    def _answer(
        self, prompt: BenchmarkPrompt, order: list[Arm], encode: Callable[[list[dict[str, str]]], torch.Tensor]
    ) -> list[PromptRecord]:
        messages: list[dict[str, str]] = []
        rows = []
        for turn, question in enumerate(prompt.turns):
            messages.append({"role": "user", "content": question})
            ids = encode(messages).to(self.target.device)
            runs = {arm.name: self._timed(arm, ids, **self.options) for arm in order}
            plain = runs[PLAIN][0]
            rows += [self._row(arm, prompt, turn, *runs[arm.name], plain) for arm in self.arms]
            answer = self.tokenizer.decode(plain.ids[ids.shape[1] :], skip_special_tokens=True)
            messages.append({"role": "assistant", "content": answer})
        return rows

    def _timed(self, arm: Arm, ids: torch.Tensor, **options: Any) -> tuple[TimedRun, DecodeClock]:
        torch.manual_seed(self.seed)
        with arm.applied(), DecodeClock(self.target, arm.assistant).running() as clock:
            run = timed_generate(self.target, ids, arm.drafter, clock, **{**self.options, **options, **arm.options})
        return run, clock

    def _key(self, arm: Arm, prompt: BenchmarkPrompt, turn: int) -> tuple:
        return (arm.name, prompt.benchmark, prompt.id, turn, self.seed, self.temperature)

    def _row(
        self, arm: Arm, prompt: BenchmarkPrompt, turn: int, run: TimedRun, clock: DecodeClock, plain: TimedRun
    ) -> PromptRecord:
        if run.acceptance is not None:
            longest, accepted, verified = vars(run.acceptance).values()
        else:
            accepted, verified = ([], []) if arm.name == PLAIN else clock.cycles()
            longest = max(verified, default=0)
        return PromptRecord(
            **dict(zip(("arm", "benchmark", "id", "turn", "seed", "temperature"), self._key(arm, prompt, turn))),
            prompt_tokens=run.prompt_length,
            new_tokens=run.num_new_tokens,
            num_draft_tokens=longest,
            accepted=accepted,
            verified=verified,
            agreement=None if self.temperature else self._agreement(plain, run),
            prefill_s=run.prefill_s,
            decode_s=run.decode_s,
            split_s=clock.split(run.decode_s),
            prefill_tokens=clock.first_tokens,
            hooks_s=clock.spans * self.span_cost_s,
        )

    def _agreement(self, plain: TimedRun, run: TimedRun) -> Agreement:
        found = first_difference(self.judge, plain.prompt_length, plain.ids, run.ids)
        if found is None:
            return Agreement(True)
        gap = found.relative_gap if math.isfinite(found.relative_gap) else None
        return Agreement(False, found.position - plain.prompt_length, gap)


def float32_twin(target: PreTrainedModel) -> PreTrainedModel:
    """The same weights in float32, or the target itself where it is in float32 already, where its weights are packed,
    or where the copy would not fit into half of the free memory."""
    device = target.device
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    packed = getattr(target, "is_quantized", False) or not all(one.is_floating_point() for one in target.parameters())
    if target.dtype == torch.float32 or packed or 4 * target.num_parameters() > free / 2:
        return target
    return copy.deepcopy(target).float()
