"""Answers prompts with and without a drafter, side by side in a terminal."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

import torch
from rich.columns import Columns
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.text import Text
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

from ..decoding.acceptance import AcceptanceRecord
from ..modeling.drafter import XPressDrafter
from .agreement import FLOAT32_TIE, HALF_PRECISION_TIE, Difference, first_difference
from .prompts import encode_prompt
from .timing import TimedRun, timed_generate


class _Pane(TextStreamer):
    """A panel that grows with the stream."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, title: str, width: int):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.text = Text()
        self.panel = Panel(self.text, title=title, width=width)
        self.live: Live | None = None

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.text.append(text)
        if self.live is not None:
            self.live.refresh()

    def finish(self, run: TimedRun) -> None:
        self.panel.subtitle = f"{run.num_new_tokens} tokens, {run.tokens_per_s:.1f} tokens/s"


@dataclass(frozen=True)
class Pair:
    """One prompt, answered plain and with the drafter. difference: `None` where the ids are equal or were sampled."""

    prompt: str
    plain: TimedRun
    drafted: TimedRun
    sampled: bool
    difference: Difference | None

    @property
    def ratio(self) -> float:
        """Decode speed with the drafter over plain decode speed."""
        return self.drafted.tokens_per_s / self.plain.tokens_per_s


class SideBySide:
    """Runs prompts twice and keeps what a summary needs.

    Args:
        target, tokenizer, drafter: the pair under test.
        judge: float32 twin of a half-precision target; tells near ties from faults. Default: the target itself.
        console: where to print.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        drafter: XPressDrafter,
        judge: PreTrainedModel | None = None,
        console: Console | None = None,
    ):
        self.target, self.tokenizer, self.drafter = target, tokenizer, drafter
        self.judge = judge or target
        self.console = console or Console()
        self.pairs: list[Pair] = []

    def warm_up(self) -> None:
        """Runs both ways once, so that the first prompt does not pay for it."""
        ids = torch.arange(1, 9, device=self.target.device)[None]
        for drafter in (None, self.drafter):
            self.target.generate(ids, assistant_model=drafter, max_new_tokens=8, do_sample=False)

    def answer(self, prompt: str, **options: Any) -> None:
        """Streams both answers and prints their agreement. `options` are those of generate()."""
        self.console.rule(Text(prompt if len(prompt) < 100 else prompt[:97] + "..."))
        width = max(self.console.width // 2 - 1, 30)
        panes = [_Pane(self.tokenizer, title, width) for title in ("plain", "with the drafter")]
        ids = encode_prompt(self.tokenizer, prompt, self.target.device)
        runs: list[TimedRun] = []
        with Live(Columns([pane.panel for pane in panes]), console=self.console, auto_refresh=False) as live:
            for pane, drafter in zip(panes, (None, self.drafter), strict=True):
                pane.live = live
                runs.append(timed_generate(self.target, ids, drafter, pane, **options))
                pane.finish(runs[-1])
                live.refresh()
        if not self.console.is_terminal:
            self.console.line()
        plain, drafted = runs
        sampled = bool(options.get("do_sample"))
        difference = None if sampled else first_difference(self.judge, ids.shape[1], plain.ids, drafted.ids)
        self.pairs.append(Pair(prompt, plain, drafted, sampled, difference))
        self.console.print(self._agreement(self.pairs[-1]))

    def is_tie(self, difference: Difference | None) -> bool:
        """Whether rounding in the target's dtype explains a difference; equal texts count."""
        bound = FLOAT32_TIE if self.target.dtype == torch.float32 else HALF_PRECISION_TIE
        return difference is None or difference.relative_gap <= bound

    def _agreement(self, pair: Pair) -> str:
        if pair.sampled:
            return "sampled: two draws from the same law, so the texts differ"
        if pair.difference is None:
            return "ids equal: yes"
        verdict = "a near tie that rounding decides" if self.is_tie(pair.difference) else "[bold red]NOT a near tie[/]"
        return (
            f"ids equal: until token {pair.difference.position - pair.plain.prompt_length}, then {verdict} "
            f"(gap {pair.difference.relative_gap:.1e} of the largest logit)"
        )

    @property
    def acceptance(self) -> AcceptanceRecord:
        """Record pooled over all prompts."""
        records = [pair.drafted.acceptance for pair in self.pairs if pair.drafted.acceptance is not None]
        return sum(records[1:], start=records[0])

    def medians(self) -> dict[str, float]:
        """Medians over prompts: plain tokens/s, tokens/s with the drafter, ratio."""
        return {
            "plain_tokens_per_s": statistics.median(pair.plain.tokens_per_s for pair in self.pairs),
            "tokens_per_s": statistics.median(pair.drafted.tokens_per_s for pair in self.pairs),
            "ratio": statistics.median(pair.ratio for pair in self.pairs),
        }

    def summary(self) -> str:
        """Decode speeds and the pooled acceptance record, for people."""
        figures = self.medians()
        return (
            f"decode speed, medians over {len(self.pairs)} prompts: "
            f"{figures['plain_tokens_per_s']:.1f} tokens/s plain, "
            f"{figures['tokens_per_s']:.1f} tokens/s with the drafter, ratio {figures['ratio']:.2f}\n{self.acceptance}"
        )

    def to_dict(self) -> dict[str, Any]:
        """The same for machines, prompt by prompt."""
        rows = [
            {
                "prompt": pair.prompt,
                "new_tokens": pair.drafted.num_new_tokens,
                "plain_tokens_per_s": pair.plain.tokens_per_s,
                "tokens_per_s": pair.drafted.tokens_per_s,
                "ids_equal": None if pair.sampled else pair.difference is None,
                "relative_gap": pair.difference and pair.difference.relative_gap,
            }
            for pair in self.pairs
        ]
        return {"prompts": rows, "medians": self.medians(), "acceptance": self.acceptance.to_dict()}


def check_exactness(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    drafter: XPressDrafter,
    prompts: list[str],
    max_new_tokens: int,
) -> list[bool]:
    """Whether the greedy ids of a float32 target equal plain generate, prompt by prompt; a first difference with a
    gap of at most 1e-4 of the largest logit is a tie and counts as equal."""
    equal = []
    for prompt in prompts:
        ids = encode_prompt(tokenizer, prompt, target.device)
        options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": False}
        plain, drafted = (timed_generate(target, ids, one, **options) for one in (None, drafter))
        difference = first_difference(target, plain.prompt_length, plain.ids, drafted.ids)
        equal.append(difference is None or difference.relative_gap <= FLOAT32_TIE)
    return equal
