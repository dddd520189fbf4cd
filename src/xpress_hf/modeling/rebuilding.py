"""The same drafter with some fields of its config changed."""

from __future__ import annotations

import copy
from typing import Any

import torch

from ..configuration import XPressConfig
from .drafter import XPressDrafter


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
