"""Whether a longer block can pay (DBloom, arXiv 2608.30427): the bound from the ceiling bin of the old one."""

from __future__ import annotations

from dataclasses import dataclass

from ..decoding.acceptance import AcceptanceRecord


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
