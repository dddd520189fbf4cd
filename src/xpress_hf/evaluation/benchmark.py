"""Timed runs of several arms, interleaved prompt by prompt, so that a machine that slows down slows all of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .answering import Answering, EvaluationSettings, stream_seed
from .arms import ASSISTANT, CONTROL, LOOKUP, PLAIN, Arm
from .prompts import BenchmarkPrompt, PromptSet
from .records import Agreement, PromptRecord, RecordFile, describe_model, run_header
from .time_split import DecodeClock, span_cost_s
from .timing import TimedRun, timed_generate

# Long enough for every arm to draft, verify and crop a few times.
WARM_UP_TOKENS = 24


class Benchmark(Answering):
    """Answers prompts with every arm, one row per answer.

    Of a chat of several turns every arm sees the same one: that of plain generate. Rows of a prompt are written when
    all arms have answered it, so an interrupted run holds whole prompts, and a run that goes on answers the others.

    Args:
        target, tokenizer: what answers.
        arms: as `parse_arms` gives them, `plain` first.
        settings: how prompts are answered; greedy answers are always compared with plain generate.
        judge: float32 twin of a half-precision target, tells near ties from faults. Default: the target itself.

    Attributes:
        span_cost_s: seconds that timing one part of a cycle costs.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        arms: Sequence[Arm],
        settings: EvaluationSettings,
        judge: PreTrainedModel | None = None,
    ):
        super().__init__(target, tokenizer, settings, judge)
        self.arms = list(arms)
        self.span_cost_s = 0.0

    def header(self, sets: Sequence[PromptSet], names: dict[str, str]) -> dict[str, Any]:
        """Where the figures of this run come from. names: of `target`, `drafter`, `assistant` and `control`."""
        models = {arm.kind: arm.assistant for arm in self.arms}
        drafter = next(
            (model for kind, model in models.items() if kind not in (PLAIN, LOOKUP, ASSISTANT, CONTROL)), None
        )
        others = {kind: describe_model(models[kind], names[kind]) for kind in (ASSISTANT, CONTROL) if kind in models}
        return run_header(
            self.target,
            names["target"],
            drafter,
            names.get("drafter"),
            [one.describe() for one in sets],
            arms={arm.name: arm.settings() for arm in self.arms},
            judge_dtype=str(self.judge.dtype).removeprefix("torch."),
            **others,
            **asdict(self.settings),
        )

    def warm_up(self) -> None:
        """Runs every arm once, so that no prompt pays for it and an arm that cannot run says so at once; measures what
        timing costs."""
        ids = torch.arange(40, device=self.target.device)[None] % self.target.config.get_text_config().vocab_size
        for arm in self.arms:
            self._timed(arm, ids, 0.0, max_new_tokens=WARM_UP_TOKENS)
        self.span_cost_s = span_cost_s(self.target)

    def run(
        self,
        sets: Sequence[PromptSet],
        header: dict[str, Any],
        path: str | Path | None = None,
        on_answer: Callable[[int], None] = lambda count: None,
    ) -> list[PromptRecord]:
        """Answers all prompts that the file lacks, and returns the rows of all.

        Args:
            path: JSON Lines file of the records; `None` keeps them in memory alone.
            on_answer: called with the number of answers that were added, or found in the file.

        Raises:
            ValueError: a prompt does not fit into the target's context (before any answer), or the file belongs to
                another run.
        """
        prompts = [prompt for one in sets for prompt in one.prompts]
        self.check_lengths(prompts)
        keys: set[tuple] = set()
        with RecordFile(path, header) as file:
            for number, (prompt, draw) in enumerate((p, draw) for p in prompts for draw in self.settings.draws):
                wanted = [
                    self._key(arm, prompt, turn, *draw) for turn in range(len(prompt.turns)) for arm in self.arms
                ]
                keys |= set(wanted)
                if not all(key in file for key in wanted):
                    first = number % len(self.arms)
                    rows = self._converse(prompt, *draw, self.arms[first:] + self.arms[:first])
                    for row in rows:
                        # An interruption while rows were written leaves some of them.
                        if row.key not in file:
                            file.append(row)
                on_answer(len(wanted))
            return [record for key, record in file.records.items() if key in keys]

    def num_answers(self, sets: Sequence[PromptSet]) -> int:
        """Answers that a whole run gives."""
        turns = sum(len(prompt.turns) for one in sets for prompt in one.prompts)
        return turns * len(self.settings.draws) * len(self.arms)

    def _key(self, arm: Arm, prompt: BenchmarkPrompt, turn: int, temperature: float, seed: int) -> tuple:
        return (arm.name, prompt.benchmark, prompt.id, turn, seed, temperature)

    def _converse(
        self, prompt: BenchmarkPrompt, temperature: float, seed: int, order: Sequence[Arm]
    ) -> list[PromptRecord]:
        messages: list[dict[str, str]] = []
        rows: list[PromptRecord] = []
        for turn, question in enumerate(prompt.turns):
            messages.append({"role": "user", "content": question})
            ids = self.encode(messages)
            if not self.has_room(prompt, turn, ids):
                break
            runs = {}
            for arm in order:
                with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
                    torch.manual_seed(stream_seed(prompt, turn, seed))
                    runs[arm.name] = self._timed(arm, ids, temperature)
            plain = runs[PLAIN][0]
            for arm in self.arms:
                run, clock = runs[arm.name]
                compared = arm.name != PLAIN and not temperature
                agreement = self.agreement(ids.shape[1], plain.ids, run.ids) if compared else None
                key = self._key(arm, prompt, turn, temperature, seed)
                rows.append(self._row(key, run, clock, agreement))
            answer = self.tokenizer.decode(plain.ids[ids.shape[1] :], skip_special_tokens=True)
            messages.append({"role": "assistant", "content": answer})
        return rows

    def _timed(self, arm: Arm, ids: torch.Tensor, temperature: float, **options: Any) -> tuple[TimedRun, DecodeClock]:
        options = {**self.options(temperature), **options, **arm.options}
        with arm.applied(), DecodeClock(self.target, arm.assistant).running() as clock:
            return timed_generate(self.target, ids, arm.drafter, clock, **options), clock

    def _row(self, key: tuple, run: TimedRun, clock: DecodeClock, agreement: Agreement | None) -> PromptRecord:
        arm, benchmark, prompt_id, turn, seed, temperature = key
        if run.acceptance is not None:
            longest = run.acceptance.num_draft_tokens
            accepted, verified = run.acceptance.accepted, run.acceptance.verified
        else:
            accepted, verified = ([], []) if arm == PLAIN else clock.cycles()
            longest = max(verified, default=0)
        return PromptRecord(
            arm=arm,
            benchmark=benchmark,
            id=prompt_id,
            turn=turn,
            seed=seed,
            temperature=temperature,
            prompt_tokens=run.prompt_length,
            new_tokens=run.num_new_tokens,
            num_draft_tokens=longest,
            accepted=accepted,
            verified=verified,
            agreement=agreement,
            prefill_s=run.prefill_s,
            decode_s=run.decode_s,
            split_s=clock.split(run.decode_s),
            prefill_tokens=clock.first_tokens,
            hooks_s=clock.spans * self.span_cost_s,
        )


def float32_twin(target: PreTrainedModel) -> PreTrainedModel:
    """The same weights in float32, or the target itself where it is in float32 already, where its weights are packed,
    or where the copy would not fit into half of the free memory."""
    device = target.device
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    packed = getattr(target, "is_quantized", False) or not all(one.is_floating_point() for one in target.parameters())
    if target.dtype == torch.float32 or packed or 4 * target.num_parameters() > free / 2:
        return target
    return copy.deepcopy(target).float()
