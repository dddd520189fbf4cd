"""Figures of a run from its rows alone: acceptance, speed against plain generate, where the time goes, and bounds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from ..decoding.acceptance import AcceptanceRecord
from .arms import PLAIN
from .bootstrap import Interval, bootstrap, pooled_ratio
from .records import PromptRecord

ALL = "all"
# With five prompts, a difference of the same sign on every one of them still happens by chance once in 16 times.
LEAST_PROMPTS = 6


@dataclass(frozen=True)
class Spread:
    """Median over prompts and the quartiles around it."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread | None:
        """`None` without a value."""
        known = [value for value in values if np.isfinite(value)]
        return cls(*np.percentile(known, [50, 25, 75]).tolist()) if known else None

    def __str__(self) -> str:
        return f"{self.median:.3g} ({self.low:.3g} to {self.high:.3g})"


@dataclass(frozen=True)
class PromptTotals:
    """All turns and seeds of one arm on one prompt. Times in seconds, `None` where they were not measured.

    decode_tokens: new tokens after the prefill.
    """

    kept: int
    cycles: int
    decode_tokens: int
    decode_s: float | None
    prefill_s: float | None

    @classmethod
    def of(cls, rows: Sequence[PromptRecord]) -> PromptTotals:
        timed = all(row.decode_s is not None for row in rows)
        return cls(
            kept=sum(sum(row.accepted) for row in rows),
            cycles=sum(len(row.accepted) for row in rows),
            decode_tokens=sum(row.new_tokens - row.prefill_tokens for row in rows),
            decode_s=sum(row.decode_s for row in rows) if timed else None,
            prefill_s=sum(row.prefill_s for row in rows) if timed else None,
        )

    @property
    def tokens_per_s(self) -> float:
        """Decode speed; NaN where it was not timed or nothing came after the prefill."""
        return self.decode_tokens / self.decode_s if self.decode_s and self.decode_tokens > 0 else float("nan")


def totals_by_prompt(rows: Iterable[PromptRecord]) -> dict[tuple[str, str], PromptTotals]:
    """Benchmark and id of every prompt -> its totals, for rows of one arm."""
    groups: dict[tuple[str, str], list[PromptRecord]] = {}
    for row in rows:
        groups.setdefault((row.benchmark, row.id), []).append(row)
    return {key: PromptTotals.of(group) for key, group in groups.items()}


@dataclass(frozen=True)
class Bounds:
    """Speed-ups that this acceptance and these forward times allow, over plain generate's time per token.

    measured: time per token of plain generate over that of the arm, both pooled over prompts.
    forwards: the same if the arm did nothing but its forwards (draft, refine, verify).
    free_drafts: the same if drafts cost nothing either, so that only the target's forwards were left.
    """

    measured: float
    forwards: float
    free_drafts: float

    @property
    def share(self) -> float:
        """Part of what the forwards allow that was reached."""
        return self.measured / self.forwards


@dataclass(frozen=True)
class ArmFigures:
    """One arm on one benchmark, or on all of them.

    Attributes:
        prompts: their number. record: cycles of all of them; `None` where nothing was drafted.
        bare_record: what the bare drafts of the same cycles would have kept; `None` where it was not observed.
        acceptance_length: pooled over cycles, bonus included, with its interval over prompts.
        equal, ties, faults: greedy texts equal to plain generate's, parted at a near tie, parted elsewhere.
        refused: why there is no speed figure, in words.
        tokens_per_s, speedup: over prompts; speedup_interval: 95 % interval of the median speed-up.
        cycle_s: seconds per cycle, which is a forward of the target, by part. token_s: seconds per token. Both pooled.
        hooks_share: what timing cost, over the time of a cycle.
    """

    arm: str
    benchmark: str
    prompts: int
    record: AcceptanceRecord | None
    bare_record: AcceptanceRecord | None
    acceptance_length: Interval | None
    equal: int
    ties: int
    faults: int
    refused: str | None
    tokens_per_s: Spread | None
    speedup: Spread | None
    speedup_interval: Interval | None
    prefill_s: Spread | None
    cycle_s: dict[str, float] | None
    token_s: float | None
    hooks_share: float | None
    bounds: Bounds | None

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        values = asdict(self)
        for name in ("record", "bare_record"):
            record: AcceptanceRecord | None = getattr(self, name)
            values[name] = None if record is None else record.to_dict()
        if self.bounds is not None:
            values["bounds"]["share"] = self.bounds.share
        return values


def figures(header: dict[str, Any], records: Sequence[PromptRecord]) -> dict[float, dict[str, list[ArmFigures]]]:
    """Temperature -> benchmark -> figures of its arms, in the order of the run. The first benchmark is `ALL`, which
    pools the others, where there are several.

    Raises:
        ValueError: no row.
    """
    if not records:
        raise ValueError("The run holds no answer yet: there is nothing to report.")
    names = list(dict.fromkeys([*header.get("arms", {}), *(row.arm for row in records)]))
    found: dict[float, dict[str, list[ArmFigures]]] = {}
    for temperature in sorted({row.temperature for row in records}):
        rows = [row for row in records if row.temperature == temperature]
        benchmarks = list(dict.fromkeys(row.benchmark for row in rows))
        groups = {one: [row for row in rows if row.benchmark == one] for one in benchmarks}
        if len(benchmarks) > 1:
            groups = {ALL: rows, **groups}
        found[temperature] = {group: _arms(group, names, own, header["dtype"]) for group, own in groups.items()}
    return found


def _arms(benchmark: str, names: list[str], rows: list[PromptRecord], dtype: str) -> list[ArmFigures]:
    by_arm = {name: [row for row in rows if row.arm == name] for name in names}
    plain = by_arm.get(PLAIN, [])
    return [_arm(name, benchmark, own, plain, dtype) for name, own in by_arm.items() if own]


def _arm(
    name: str, benchmark: str, rows: list[PromptRecord], plain_rows: list[PromptRecord], dtype: str
) -> ArmFigures:
    totals, plain = totals_by_prompt(rows), totals_by_prompt(plain_rows)
    compared = [row.agreement for row in rows if row.agreement is not None]
    equal = sum(one.equal for one in compared)
    faults = sum(not one.is_tie(dtype) for one in compared)
    refused = f"{faults} of {len(compared)} texts part from plain generate beyond near ties" if faults else None
    timed = refused is None and all(one.decode_s is not None for one in totals.values())
    ratios = [totals[key].tokens_per_s / plain[key].tokens_per_s for key in totals if key in plain] if timed else []
    ratios = [ratio for ratio in ratios if np.isfinite(ratio)]
    drafts = np.array([[one.kept + one.cycles, one.cycles] for one in totals.values()])
    split = _pooled_split(rows)
    return ArmFigures(
        arm=name,
        benchmark=benchmark,
        prompts=len(totals),
        record=pooled_record(rows),
        bare_record=bare_record(rows),
        acceptance_length=bootstrap(drafts, pooled_ratio) if drafts[:, 1].any() else None,
        equal=equal,
        ties=len(compared) - equal - faults,
        faults=faults,
        refused=refused,
        tokens_per_s=Spread.of(one.tokens_per_s for one in totals.values()) if timed else None,
        speedup=Spread.of(ratios),
        speedup_interval=bootstrap(np.array(ratios)[:, None], median) if ratios else None,
        prefill_s=Spread.of(one.prefill_s for one in totals.values()) if timed else None,
        cycle_s={part: value / _cycles(rows) for part, value in split.items()} if split else None,
        token_s=sum(split.values()) / max(sum(one.decode_tokens for one in totals.values()), 1) if split else None,
        hooks_share=sum(row.hooks_s or 0.0 for row in rows) / sum(split.values()) if split else None,
        bounds=_bounds(totals, plain, split) if ratios and split and name != PLAIN else None,
    )


def pooled_record(rows: Iterable[PromptRecord]) -> AcceptanceRecord | None:
    """Cycles of all rows; `None` where nothing was drafted. Assistants that choose the length of a draft have no fixed
    D: the longest of theirs counts."""
    drafted = [row for row in rows if row.num_draft_tokens]
    if not drafted:
        return None
    return AcceptanceRecord(
        max(row.num_draft_tokens for row in drafted),
        [count for row in drafted for count in row.accepted],
        [count for row in drafted for count in row.verified],
    )


def bare_record(rows: Sequence[PromptRecord]) -> AcceptanceRecord | None:
    """Cycles of all rows with what their bare drafts would have kept; `None` where a row does not know."""
    if any(row.bare_accepted is None for row in rows):
        return None
    return pooled_record([replace(row, accepted=row.bare_accepted) for row in rows])


def median(table: np.ndarray) -> np.ndarray:
    """[..., P, 1] -> [...], for `bootstrap`."""
    return np.median(table[..., 0], axis=-1)


def _cycles(rows: Sequence[PromptRecord]) -> int:
    """Forwards of the target after the prefill: each gives one token of its own beside the drafts it keeps. The
    prefill too gave one, and whatever else came with it is among the kept drafts."""
    return max(sum(row.new_tokens - 1 - sum(row.accepted) for row in rows), 1)


def _pooled_split(rows: Sequence[PromptRecord]) -> dict[str, float] | None:
    """Seconds by part of the cycle over all rows; `None` where they were not measured."""
    if any(row.split_s is None for row in rows):
        return None
    return {part: sum(row.split_s[part] for row in rows) for part in rows[0].split_s}


def _bounds(
    totals: dict[tuple[str, str], PromptTotals], plain: dict[tuple[str, str], PromptTotals], split: dict[str, float]
) -> Bounds:
    """Time per token is (T_draft + T_verify) / acceptance length; both are pooled over prompts (facts: time model)."""
    plain_s = sum(one.decode_s for one in plain.values()) / sum(one.decode_tokens for one in plain.values())
    tokens = sum(one.decode_tokens for one in totals.values())
    forwards_s = sum(split.values()) - split["rest"]
    return Bounds(
        measured=plain_s * tokens / sum(split.values()),
        forwards=plain_s * tokens / forwards_s,
        free_drafts=plain_s * tokens / split["verify"],
    )
