"""What the refiner does to every block, noted while generate() runs and without changing what it does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ..decoding.acceptance import AcceptanceRecord
from ..modeling.drafter import BlockDraft, XPressDrafter
from ..modeling.refiner import greedy_choice


@dataclass(frozen=True)
class ObservedBlock:
    """One drafted block of one sequence.

    anchor: position of the anchor in the text. drafts: [K + 1, D] ids of the bare draft and after each sweep that
    was run; a block that repeats itself is not swept further.
    """

    anchor: int
    drafts: torch.Tensor

    @property
    def sweeps_until_stable(self) -> int:
        """Sweeps after which the block stayed as it ended; 0 = the refiner changed nothing."""
        differs = (self.drafts != self.drafts[-1]).any(dim=-1).nonzero()
        return int(differs[-1]) + 1 if len(differs) else 0


def anchor_position(
    drafter: XPressDrafter, cache: Any, position_ids: torch.Tensor | None = None, **kwargs: Any
) -> int:
    """Position of the anchor of a block that was just drafted, from arguments of `draft_block`. Without positions the
    cache holds every row before the anchor; with them it may hold rows of rejected drafts too."""
    return cache.get_seq_length() if position_ids is None else int(position_ids[0, -drafter.config.block_size])


@contextmanager
def observed(drafter: XPressDrafter) -> Iterator[list[ObservedBlock]]:
    """Within the context, blocks of one sequence that this drafter drafts are added to the list."""
    blocks: list[ObservedBlock] = []
    draft_block = drafter.draft_block

    def noting(
        target: Any,
        known_ids: torch.Tensor,
        context: torch.Tensor,
        cache: Any,
        choose: Any = greedy_choice,
        **kwargs: Any,
    ) -> BlockDraft:
        chosen: list[torch.Tensor] = []

        def note(logits: torch.Tensor, draft_ids: torch.Tensor | None) -> torch.Tensor:
            chosen.append(choose(logits, draft_ids))
            return chosen[-1]

        draft = draft_block(target, known_ids, context, cache, note, **kwargs)
        blocks.append(ObservedBlock(anchor_position(drafter, cache, **kwargs), torch.cat(chosen).cpu()))
        return draft

    drafter.draft_block = noting
    try:
        yield blocks
    finally:
        del drafter.draft_block


@dataclass(frozen=True)
class Diagnosis:
    """Fields of `PromptRecord` of the same names, one entry per cycle."""

    changed: list[bool]
    sweeps_until_stable: list[int]
    bare_accepted: list[int] | None


def diagnose(
    blocks: list[ObservedBlock],
    record: AcceptanceRecord,
    ids: torch.Tensor,
    end_ids: torch.Tensor | None,
    draft_limit: int,
    greedy: bool,
) -> Diagnosis:
    """What the refiner changed in each cycle of one answer.

    Args:
        ids: [S] prompt and answer.
        end_ids: ids that end a text; a block that starts with one makes no cycle.
        draft_limit: drafts verified per cycle at most.
        greedy: whether the text itself tells what the target would have said to the bare draft.

    Raises:
        RuntimeError: blocks and record do not belong together.
    """
    ends = set() if end_ids is None else set(end_ids.tolist())
    cycles = [block for block in blocks if int(block.drafts[-1, 0]) not in ends]
    if len(cycles) != record.num_cycles:
        raise RuntimeError(f"{len(cycles)} blocks were drafted, but {record.num_cycles} cycles recorded.")
    # The last token of a text is the target's own: it ends the text or the budget.
    bare = [_kept(block, ids[block.anchor + 1 : -1], draft_limit) for block in cycles] if greedy else None
    return Diagnosis(
        [bool((block.drafts[0] != block.drafts[-1]).any()) for block in cycles],
        [block.sweeps_until_stable for block in cycles],
        bare,
    )


def _kept(block: ObservedBlock, following: torch.Tensor, draft_limit: int) -> int:
    following = following[:draft_limit]
    return int((block.drafts[0, : len(following)] == following).long().cumprod(dim=0).sum())
