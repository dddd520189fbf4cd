"""Answers prompts with and without a drafter, side by side in a terminal."""

from __future__ import annotations

import statistics
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
from .agreement import FLOAT32_TIE, HALF_PRECISION_TIE, first_difference
from .timing import TimedRun, timed_generate


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str, device: torch.device) -> torch.Tensor:
    """Prompt -> ids [1, S] in the tokenizer's chat template, or as they stand where it has none."""
    if tokenizer.chat_template is None:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    else:
        messages = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]
    return ids.to(device)


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
        self.pairs: list[tuple[TimedRun, TimedRun]] = []

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
        self.pairs.append((runs[0], runs[1]))
        self.console.print(self._agreement(runs[0], runs[1], sampled=bool(options.get("do_sample"))))

    def _agreement(self, plain: TimedRun, drafted: TimedRun, sampled: bool) -> str:
        if sampled:
            return "sampled: two draws from the same law, so the texts differ"
        difference = first_difference(self.judge, plain.prompt_length, plain.ids, drafted.ids)
        if difference is None:
            return "ids equal: yes"
        bound = FLOAT32_TIE if self.target.dtype == torch.float32 else HALF_PRECISION_TIE
        verdict = (
            "a near tie that rounding decides" if difference.relative_gap <= bound else "[bold red]NOT a near tie[/]"
        )
        return (
            f"ids equal: until token {difference.position - plain.prompt_length}, then {verdict} "
            f"(gap {difference.relative_gap:.1e} of the largest logit)"
        )

    @property
    def acceptance(self) -> AcceptanceRecord:
        """Record pooled over all prompts."""
        records = [drafted.acceptance for _, drafted in self.pairs if drafted.acceptance is not None]
        return sum(records[1:], start=records[0])

    def summary(self) -> str:
        """Medians over prompts of both decode speeds and of their ratio, and the pooled acceptance record."""
        plain, drafted, ratio = (
            statistics.median(values)
            for values in zip(
                *[(p.tokens_per_s, d.tokens_per_s, d.tokens_per_s / p.tokens_per_s) for p, d in self.pairs],
                strict=True,
            )
        )
        return (
            f"decode speed, medians over {len(self.pairs)} prompts: {plain:.1f} tokens/s plain, {drafted:.1f} "
            f"tokens/s with the drafter, ratio {ratio:.2f}\n{self.acceptance}"
        )


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
