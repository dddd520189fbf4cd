"""Block expansion (DBloom, arXiv 2608.30427): a drafter of block B goes on as one of block B' > B."""

from __future__ import annotations

from ..modeling.drafter import XPressDrafter
from ..modeling.rebuilding import rebuild


def expand_block(drafter: XPressDrafter, block_size: int) -> XPressDrafter:
    """The same drafter with a longer block ("naive" expansion, before any training); all weights are kept.

    Raises:
        ValueError: `block_size` is not above the drafter's.
    """
    if block_size <= drafter.config.block_size:
        raise ValueError(f"`block_size` must be above the drafter's {drafter.config.block_size}, got {block_size}.")
    return rebuild(drafter, block_size=block_size)
