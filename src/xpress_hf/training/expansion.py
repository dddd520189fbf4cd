"""Block expansion (DBloom, arXiv 2608.30427): a drafter of block B goes on as one of block B' > B."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch

from ..configuration import XPressConfig
from ..decoding.acceptance import AcceptanceRecord
from ..modeling.drafter import XPressDrafter


@torch.no_grad()
def rebuild(drafter: XPressDrafter, **changes: Any) -> XPressDrafter:
    """A new drafter with some fields of its config changed and the old weights kept; weights that the old one lacks (a
    refiner) are initialised. A longer block grows the refiner's mixer: old entries are kept, new ones are zero, so the
    old slots read each other as before.

    Raises:
        ValueError: a change that would drop or reshape weights: a shorter block, other sizes.
    """
    config = copy.deepcopy(drafter.config)
    for name, value in changes.items():
        if name not in XPressConfig.__dataclass_fields__:
            raise ValueError(f"`{name}` is no field of a drafter's config.")
        setattr(config, name, value)
    old = drafter.state_dict()
    grown = config.block_size - drafter.config.block_size
    if grown < 0 and drafter.refiner is not None:
        raise ValueError(
            f"`block_size` must be >= {drafter.config.block_size}, got {config.block_size}: the refiner's mixer "
            "belongs to its block."
        )
    if config.refiner is not None and "refiner.mixer" in old:
        old["refiner.mixer"] = torch.nn.functional.pad(old["refiner.mixer"], (0, grown, 0, grown))
    new = XPressDrafter(config).to(drafter.device, drafter.dtype)
    state = new.state_dict()
    if lost := sorted(name for name in old if name not in state or state[name].shape != old[name].shape):
        raise ValueError(f"{sorted(changes)}: these weights would be lost: {lost}. Start a new drafter instead.")
    new.load_state_dict(old, strict=False)
    new.speculation = copy.deepcopy(drafter.speculation)
    return new


def expand_block(drafter: XPressDrafter, block_size: int) -> XPressDrafter:
    """The same drafter with a longer block ("naive" expansion, before any training); all weights are kept.

    Raises:
        ValueError: `block_size` is not above the drafter's.
    """
    if block_size <= drafter.config.block_size:
        raise ValueError(f"`block_size` must be above the drafter's {drafter.config.block_size}, got {block_size}.")
    return rebuild(drafter, block_size=block_size)


@dataclass(frozen=True)
class ExpansionBound:
    """What a longer block can bring, from the ceiling bin of the old one.

    Args:
        block_size, new_block_size: slots before and after, anchor included.
        acceptance_length: tokens per cycle at the old size, bonus included.
        ceiling_share: share of full-length cycles that kept every draft.
    """

    block_size: int
    new_block_size: int
    acceptance_length: float
    ceiling_share: float

    @classmethod
    def of(cls, record: AcceptanceRecord, new_block_size: int) -> ExpansionBound:
        """From cycles at the old size.

        Raises:
            ValueError: no cycle of full length, so that the ceiling bin is unknown.
        """
        if record.ceiling_share is None:
            raise ValueError(
                "No cycle verified a whole block, so the ceiling bin is empty; measure on longer answers."
            )
        size = record.num_draft_tokens + 1
        return cls(size, new_block_size, record.acceptance_length, record.ceiling_share)

    @property
    def bound(self) -> float:
        """Tokens per cycle that the new slots can add at most, as long as the old ones do not improve:
        (B' - B) * P(all drafts kept), paper section 3."""
        return (self.new_block_size - self.block_size) * self.ceiling_share

    def pays(self, least_gain: float = 0.02) -> bool:
        """Whether the bound allows a relative gain of `least_gain`."""
        return self.bound >= least_gain * self.acceptance_length

    def __str__(self) -> str:
        verdict = "may pay" if self.pays() else "cannot pay"
        return (
            f"block {self.block_size} -> {self.new_block_size}: acceptance length {self.acceptance_length:.3f}, "
            f"ceiling bin {self.ceiling_share:.1%}, so new slots add at most {self.bound:.3f} tokens per cycle "
            f"({self.bound / self.acceptance_length:.1%}) while the old slots do not improve: expanding {verdict}"
        )
