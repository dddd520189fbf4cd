"""`AcceptanceRecord`: how many drafted tokens were kept, cycle by cycle."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class AcceptanceRecord:
    """Acceptance of one or more generate() calls. D = `num_draft_tokens` of the drafter.

    A cycle is one draft and one verification; steps without a draft (the prefill, the last token of a budget) are no
    cycles. A cut cycle verified fewer than D drafts, because the budget or a stop rule left no room for more.

    Args:
        num_draft_tokens: D.
        accepted: drafted tokens kept, one entry per cycle.
        verified: drafted tokens handed to the target, one entry per cycle.
    """

    num_draft_tokens: int
    accepted: list[int] = field(default_factory=list)
    verified: list[int] = field(default_factory=list)

    def add(self, num_accepted: int, num_verified: int) -> None:
        if not 0 <= num_accepted <= num_verified <= self.num_draft_tokens:
            raise ValueError(
                f"`num_accepted` <= `num_verified` <= {self.num_draft_tokens} is violated by {num_accepted}, "
                f"{num_verified}."
            )
        self.accepted.append(num_accepted)
        self.verified.append(num_verified)

    def __add__(self, other: AcceptanceRecord) -> AcceptanceRecord:
        """Pools the cycles of two records."""
        if self.num_draft_tokens != other.num_draft_tokens:
            raise ValueError(
                "Records of drafters with different `num_draft_tokens` cannot be pooled: "
                f"{self.num_draft_tokens} and {other.num_draft_tokens}."
            )
        return AcceptanceRecord(self.num_draft_tokens, self.accepted + other.accepted, self.verified + other.verified)

    @property
    def num_cycles(self) -> int:
        return len(self.accepted)

    @property
    def histogram(self) -> list[int]:
        """Cycles with 0..D accepted drafts, length D + 1."""
        counts = [0] * (self.num_draft_tokens + 1)
        for count in self.accepted:
            counts[count] += 1
        return counts

    @property
    def acceptance_length(self) -> float:
        """Tokens per cycle, pooled over cycles, the target's bonus token included. NaN without a cycle."""
        return sum(self.accepted) / self.num_cycles + 1 if self.num_cycles else float("nan")

    @property
    def position_acceptance(self) -> list[float | None]:
        """Accepted / verified for each slot, length D; a slot counts as verified when all slots before it were kept.
        `None` for slots never verified."""
        rates: list[float | None] = []
        for slot in range(self.num_draft_tokens):
            cycles = zip(self.accepted, self.verified, strict=True)
            reached = [kept > slot for kept, length in cycles if kept >= slot and length > slot]
            rates.append(sum(reached) / len(reached) if reached else None)
        return rates

    @property
    def ceiling_share(self) -> float | None:
        """Share of cycles with all D drafts kept among the cycles that verified D; `None` if there was none."""
        full = [
            kept == self.num_draft_tokens
            for kept, length in zip(self.accepted, self.verified, strict=True)
            if length == self.num_draft_tokens
        ]
        return sum(full) / len(full) if full else None

    def to_dict(self) -> dict:
        """Figures for JSON output."""
        return {
            "num_draft_tokens": self.num_draft_tokens,
            "num_cycles": self.num_cycles,
            "acceptance_length": self.acceptance_length if self.num_cycles else None,
            "histogram": self.histogram,
            "position_acceptance": self.position_acceptance,
            "ceiling_share": self.ceiling_share,
        }

    def __str__(self) -> str:
        if not self.num_cycles:
            return f"no cycles (block drafts up to {self.num_draft_tokens} tokens)"
        ceiling = "n/a" if self.ceiling_share is None else f"{self.ceiling_share:.1%}"
        lines = [
            f"acceptance length {self.acceptance_length:.2f} over {self.num_cycles} cycles "
            f"(bonus included, at most {self.num_draft_tokens + 1}); ceiling bin {ceiling}",
            "accepted   cycles  slot accepted when reached",
        ]
        widest = max(self.histogram)
        for count, cycles in enumerate(self.histogram):
            rate = self.position_acceptance[count - 1] if count else None
            note = "" if rate is None else f"{rate:.0%}"
            bar = "#" * round(20 * cycles / widest)
            lines.append(f"{count:8d} {cycles:8d}  {note:>5} {bar}".rstrip())
        return "\n".join(lines)
