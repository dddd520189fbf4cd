"""Acceptance figures of answers: one definition for the evaluator, the `evaluate` metric and whoever else reports."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..decoding.acceptance import AcceptanceRecord

# Folder for `evaluate.load`.
METRIC_FOLDER = Path(__file__).parent / "acceptance_metric"

DEFINITIONS = {
    "acceptance_length": "tokens per cycle, pooled over all cycles; the target's own bonus token counts",
    "acceptance_length_without_bonus": "drafted tokens kept per cycle, pooled over all cycles; one less",
    "acceptance_length_prompt_mean": "acceptance length of each answer, bonus counted, averaged over answers (every "
    "turn of a chat and every seed is one); answers without a cycle are left out",
    "num_cycles": "drafts that were verified; the prefill and steps without a draft are no cycles",
    "histogram": "cycles that kept 0, 1, ... D of their drafts",
    "position_acceptance": "for each slot, kept over verified among cycles that kept all slots before it",
    "ceiling_share": "share of cycles that kept all D drafts among those that verified D",
}


def acceptance_figures(records: Sequence[AcceptanceRecord]) -> dict[str, Any]:
    """Figures named in `DEFINITIONS` of answers, one record each; figures without a cycle are `None`.

    Raises:
        ValueError: no record, or records of drafters with different blocks.
    """
    if not records:
        raise ValueError("There is no answer to measure.")
    pooled = sum(records[1:], start=records[0])
    lengths = [record.acceptance_length for record in records if record.num_cycles]
    return {
        "acceptance_length": pooled.acceptance_length if pooled.num_cycles else None,
        "acceptance_length_without_bonus": pooled.acceptance_length - 1 if pooled.num_cycles else None,
        "acceptance_length_prompt_mean": sum(lengths) / len(lengths) if lengths else None,
        "num_answers": len(records),
        "num_cycles": pooled.num_cycles,
        "num_draft_tokens": pooled.num_draft_tokens,
        "histogram": pooled.histogram,
        "position_acceptance": pooled.position_acceptance,
        "ceiling_share": pooled.ceiling_share,
    }


def records_of(
    accepted: Sequence[Sequence[int]], verified: Sequence[Sequence[int]], num_draft_tokens: int
) -> list[AcceptanceRecord]:
    """Records of answers from counts per cycle.

    Raises:
        ValueError: counts that contradict each other.
    """
    records = []
    for kept, asked in zip(accepted, verified, strict=True):
        record = AcceptanceRecord(num_draft_tokens)
        for pair in zip(kept, asked, strict=True):
            record.add(*map(int, pair))
        records.append(record)
    return records
