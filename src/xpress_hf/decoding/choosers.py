"""Picks the tokens of a block: logits processors, then the largest logit, or a draw with fixed noise.

Symbols: R rows, D drafted slots, S committed tokens, V vocabulary.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from functools import partial

import torch
from transformers.generation import LogitsProcessorList

from .caches import on_device
from .processors import RowProcessors, position_free
from .rows import Row

# Stands for a probability of zero as long as anything else can be drawn.
LEAST_LOGIT = -1e9


class SlotChooser:
    """Picks a token per slot: processors, then the largest logit, or a draw with fixed noise.

    Noise: one exponential variable per slot and token, drawn once per block and kept for all sweeps, so that slot k of
    the last sweep is an exact draw from `laws[k]` given the slots before it, for any number of sweeps (argmax of
    p / E, the Gumbel trick). Greedy choice draws nothing.

    Args:
        input_ids: [R, S] committed ids, on the target's device; processors run there. [1, S] will do for any number
            of rows where no processor looks at the ids.
        processors: logits processors of the generate() call.
        do_sample: draw instead of taking the largest.
        forbidden_ids: ids the draft never takes: their probability is zero in the law the draft is drawn from.

    Attributes:
        laws: [R, D, V] logits of the last sweep after the processors.
        usable: [R] leading slots that have something to draw. Which slot is the first without depends on earlier slots
            only, so a draft that ends before it biases no law.
    """

    def __init__(
        self,
        input_ids: torch.Tensor,
        processors: LogitsProcessorList,
        do_sample: bool,
        forbidden_ids: torch.Tensor | None = None,
    ):
        self.input_ids = input_ids
        self.processors = processors
        self.do_sample = do_sample
        self.forbidden_ids = forbidden_ids
        self.noise: torch.Tensor | None = None
        self.laws: torch.Tensor | None = None
        self.usable: torch.Tensor | None = None

    def __call__(self, logits: torch.Tensor, draft_ids: torch.Tensor | None) -> torch.Tensor:
        """logits [R, D, V]; draft_ids [R, D] of the previous sweep, `None` in the seed -> ids [R, D]."""
        device = logits.device
        logits = logits.to(self.input_ids.device)
        if self.do_sample:
            # Processors may ban all candidates that the refiner left, and some break where nothing can be drawn.
            logits = logits.clamp(min=LEAST_LOGIT)
        if self.do_sample and self.noise is None:
            self.noise = torch.empty_like(logits, dtype=torch.float32).exponential_()
        if not position_free(self.processors):
            chosen = self._slot_by_slot(logits, draft_ids)
        else:
            laws = logits
            if self.processors:
                rows = logits.flatten(0, 1)
                laws = self.processors(self.input_ids[:1].expand(len(rows), -1), rows.float()).view(logits.shape)
            self.laws = self._forbid(laws)
            chosen = self._pick(self.laws, self.noise)
        if self.do_sample:
            drawable = torch.isfinite(self.laws).any(dim=-1)
            self.usable = drawable.long().cumprod(dim=1).sum(dim=1)
        else:
            self.usable = torch.full(logits.shape[:1], logits.shape[1], device=logits.device)
        return chosen.to(device)

    def _slot_by_slot(self, logits: torch.Tensor, draft_ids: torch.Tensor | None) -> torch.Tensor:
        chosen: list[torch.Tensor] = []
        laws: list[torch.Tensor] = []
        for slot in range(logits.shape[1]):
            before = (
                chosen if draft_ids is None else list(draft_ids[:, :slot].to(self.input_ids.device).split(1, dim=1))
            )
            prefix = torch.cat([self.input_ids, *before[:slot]], dim=1)
            law = self._forbid(self.processors(prefix, logits[:, slot].float().clone()))
            noise = None if self.noise is None else self.noise[:, slot]
            laws.append(law)
            chosen.append(self._pick(law, noise)[:, None])
        self.laws = torch.stack(laws, dim=1)
        return torch.cat(chosen, dim=1)

    def _forbid(self, laws: torch.Tensor) -> torch.Tensor:
        if not self.do_sample or self.forbidden_ids is None or not len(self.forbidden_ids):
            return laws
        return laws.index_fill(-1, self.forbidden_ids.to(laws.device), -torch.inf)

    def _pick(self, laws: torch.Tensor, noise: torch.Tensor | None) -> torch.Tensor:
        if noise is None:
            return laws.argmax(dim=-1)
        return (laws.float().softmax(dim=-1) / noise).argmax(dim=-1)


class RowChoosers:
    """A `SlotChooser` for all rows of a length, for processors that look at the ids; see there."""

    def __init__(self, rows: list[Row], processors: RowProcessors, do_sample: bool):
        groups: dict[int, list[int]] = defaultdict(list)
        for number, row in enumerate(rows):
            groups[len(row.ids)].append(number)
        self.choosers = [
            SlotChooser(
                torch.stack([rows[number].ids for number in group]),
                LogitsProcessorList([partial(processors, [rows[number].index for number in group])]),
                do_sample,
            )
            for group in groups.values()
        ]
        device = rows[0].ids.device
        self.groups = [on_device(group, device) for group in groups.values()]
        self.order = torch.cat(self.groups).argsort()

    def __call__(self, logits: torch.Tensor, draft_ids: torch.Tensor | None) -> torch.Tensor:
        return self._joined(
            chooser(logits[group], None if draft_ids is None else draft_ids[group])
            for chooser, group in zip(self.choosers, self.groups, strict=True)
        )

    @property
    def laws(self) -> torch.Tensor:
        return self._joined(chooser.laws for chooser in self.choosers)

    @property
    def usable(self) -> torch.Tensor:
        return self._joined(chooser.usable for chooser in self.choosers)

    def _joined(self, parts: Iterable[torch.Tensor]) -> torch.Tensor:
        """Rows of all groups in the order of the batch."""
        return torch.cat(list(parts))[self.order]


def chooser_for(rows: list[Row], processors: RowProcessors, do_sample: bool) -> SlotChooser | RowChoosers:
    if position_free(processors.processors):
        return SlotChooser(rows[0].ids[None], processors.processors, do_sample)
    return RowChoosers(rows, processors, do_sample)
