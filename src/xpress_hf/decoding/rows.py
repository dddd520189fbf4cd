"""Rows of a batch that decode at their own pace: ids, processors, draws, and the drafter's context.

Symbols: R rows still running, D drafts, S new context rows, T context columns, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from transformers.generation import LogitsProcessorList

from ..modeling.drafter import XPressDrafter
from .caches import keep_columns, keep_rows
from .candidates import SlotChooser, position_free


@dataclass
class Row:
    """One sequence of the batch that generate() was given.

    ids: committed ids, left padding included; the last one is the anchor and has not been run.
    pads: leading padding. processors: logits processors for this row.
    scores, logits: one [V] per new token, after and before the processors, where asked for.
    """

    index: int
    ids: torch.Tensor
    pads: int
    processors: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    scores: list[torch.Tensor] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Real tokens, the anchor included."""
        return len(self.ids) - self.pads


@dataclass(frozen=True)
class RowProcessors:
    """Logits processors of one row of a batch. Some were built for the whole batch and look a row up by its number, so
    the row's text is shown to them in every place of a batch and its own place is read."""

    processors: LogitsProcessorList
    index: int
    batch: int

    def __call__(self, input_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """[1, S], [1, V] -> [1, V]"""
        rows = self.processors(input_ids.expand(self.batch, -1), logits.expand(self.batch, -1).clone())
        return rows[self.index : self.index + 1]


class RowChoosers:
    """A `SlotChooser` per row; see there. Called with logits [R, D, V]."""

    def __init__(self, rows: list[Row], processors: LogitsProcessorList, do_sample: bool):
        free = position_free(processors)
        self.choosers = [
            SlotChooser(row.ids[None], processors if free else LogitsProcessorList([row.processors]), do_sample, None)
            for row in rows
        ]
        self.plain = not processors and not do_sample

    def __call__(self, logits: torch.Tensor, draft_ids: torch.Tensor | None) -> torch.Tensor:
        if self.plain:
            return logits.argmax(dim=-1)
        previous = [None] * len(logits) if draft_ids is None else draft_ids.split(1)
        chosen = [
            one(*pair) for one, pair in zip(self.choosers, zip(logits.split(1), previous, strict=True), strict=True)
        ]
        return torch.cat(chosen)

    @property
    def laws(self) -> torch.Tensor:
        """Laws the drafts were drawn from, as probabilities. [R, D, V]"""
        return torch.cat([chooser.laws for chooser in self.choosers]).float().softmax(dim=-1).nan_to_num(0.0)

    @property
    def num_usable(self) -> torch.Tensor:
        """Slots before the first without anything to draw. [R]"""
        return torch.tensor([chooser.num_usable for chooser in self.choosers])


class Context:
    """Context rows of the drafter for all running rows: cached ones and the new ones of the last forward.

    `positions` and `valid` [R, T] describe the cached columns, `new`, `new_positions`, `new_valid` the next ones.
    """

    def __init__(self, drafter: XPressDrafter):
        self.cache = drafter.new_cache()
        self.positions: torch.Tensor | None = None
        self.valid: torch.Tensor | None = None

    def set_new(self, states: torch.Tensor, positions: torch.Tensor, valid: torch.Tensor) -> None:
        """Rows for the next draft: [R, S, L * H], [R, S], bool [R, S]."""
        self.new, self.new_positions, self.new_valid = states, positions, valid
        old = self.positions
        self.positions = positions if old is None else torch.cat([old, positions], dim=1)
        self.valid = valid if self.valid is None else torch.cat([self.valid, valid], dim=1)

    def compact(self) -> None:
        """Reclaims the columns that belong to no row, once they are cached."""
        counts = self.valid.sum(dim=1)
        width = int(counts.max())
        if width == self.valid.shape[1]:
            return
        # A stable sort moves what counts to the end and keeps its order.
        columns = self.valid.long().sort(dim=1, stable=True).indices[:, -width:]
        keep_columns(self.cache, columns)
        self.positions, self.valid = self.positions.gather(1, columns), self.valid.gather(1, columns)

    def keep(self, rows: torch.Tensor) -> None:
        keep_rows(self.cache, rows)
        self.positions, self.valid = self.positions[rows], self.valid[rows]
        self.new, self.new_positions, self.new_valid = (
            value[rows] for value in (self.new, self.new_positions, self.new_valid)
        )
