"""Rows of a generate() call that decode at their own pace: ids, records, and the drafter's context.

Symbols: R rows still running, S new context rows, T context columns.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from ..modeling.drafter import XPressDrafter
from .acceptance import AcceptanceRecord
from .caches import keep_columns, keep_rows, on_device
from .static_shapes import StaticShapes


@dataclass
class Row:
    """One sequence of the batch that generate() was given.

    ids: committed ids, left padding included; the last one is the anchor and has not been run.
    pads: leading padding. record: cycles of this row.
    steps: per new token what the caller asked for beside ids, see `outputs`.
    cached: columns of the target's cache, kept when the row ends and the caller wants them.
    """

    index: int
    ids: torch.Tensor
    pads: int
    record: AcceptanceRecord
    steps: dict[str, list[Any]] = field(default_factory=dict)
    cached: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Real tokens, the anchor included."""
        return len(self.ids) - self.pads


@dataclass
class Waiting:
    """Taps [R, S, L * H] of one forward of the target that no draft has read yet. `counts[r]` places of row r count,
    from `firsts[r]` on; `seen[r]` context rows stand before them."""

    states: torch.Tensor
    firsts: list[int]
    counts: list[int]
    seen: list[int]

    def keep(self, rows: list[int]) -> None:
        self.states = self.states[on_device(rows, self.states.device)]
        self.firsts, self.counts, self.seen = (
            [values[row] for row in rows] for values in (self.firsts, self.counts, self.seen)
        )

    def columns(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Position of each place, and whether it counts. [R, S]"""
        device = self.states.device
        firsts, counts, seen = (on_device(one, device)[:, None] for one in (self.firsts, self.counts, self.seen))
        places = torch.arange(self.states.shape[1], device=device) - firsts
        return (seen + places).clamp(min=0), (places >= 0) & (places < counts)


class Context:
    """Context rows of the drafter for all running rows: cached ones and those that wait for the next draft, which
    cost nothing until then.

    counts: context rows of each running row, those that wait included.
    positions, valid: [R, T] of the columns that a draft has read; where every column of every row counts (`dense`: one
    sequence), neither is kept.
    static: shapes of a compiled drafter, whose new rows are padded to one number; `None` = it is not compiled.
    """

    def __init__(self, drafter: XPressDrafter, num_rows: int, static: StaticShapes | None = None):
        self.static = static
        self.cache = drafter.new_cache() if static is None else static.drafter_cache
        self.counts = [0] * num_rows
        self.dense = num_rows == 1
        self.waiting: list[Waiting] = []
        self.positions: torch.Tensor | None = None
        self.valid: torch.Tensor | None = None

    def add(self, states: torch.Tensor, firsts: list[int], counts: list[int]) -> None:
        """Rows for the next draft: `counts[r]` places of row r of `states` [R, S, L * H], from `firsts[r]` on."""
        if self.dense:
            states = states[:, firsts[0] : firsts[0] + counts[0]]
        self.waiting.append(Waiting(states, firsts, counts, self.counts))
        self.counts = [old + more for old, more in zip(self.counts, counts, strict=True)]

    def take(self) -> torch.Tensor:
        """The rows that wait, for the drafter to read [R, S, L * H]; their columns join `positions` and `valid`."""
        waiting, self.waiting = self.waiting, []
        if not self.dense:
            columns = [one.columns() for one in waiting]
            if self.valid is not None:
                columns.insert(0, (self.positions, self.valid))
            self.positions, self.valid = (torch.cat(parts, dim=1) for parts in zip(*columns, strict=True))
        states = torch.cat([one.states for one in waiting], dim=1)
        return states if self.static is None else self.static.padded(states)

    def pack(self) -> None:
        """Reclaims columns of the drafter's cache that belong to no row."""
        if self.static is not None:
            self.cache.crop(self.counts[0] - int(self.cache.get_seq_length()))
        if self.dense:
            return
        width = max(self.counts)
        if width == self.valid.shape[1]:
            return
        # A stable sort moves what counts to the end and keeps its order.
        columns = self.valid.long().sort(dim=1, stable=True).indices[:, -width:]
        keep_columns(self.cache, columns)
        self.positions, self.valid = self.positions.gather(1, columns), self.valid.gather(1, columns)

    def keep(self, rows: list[int]) -> None:
        """Drops all rows but `rows`."""
        if self.dense:
            return
        self.counts = [self.counts[row] for row in rows]
        for one in self.waiting:
            one.keep(rows)
        if self.valid is not None:
            index = on_device(rows, self.valid.device)
            keep_rows(self.cache, index)
            self.positions, self.valid = self.positions[index], self.valid[index]
