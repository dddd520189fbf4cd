"""Two runs side by side: which differences exceed the noise between prompts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .arms import PLAIN
from .bootstrap import Interval, bootstrap, pooled_ratio, pooled_ratio_difference
from .figures import LEAST_PROMPTS, ArmFigures, PromptTotals, figures, totals_by_prompt
from .records import PromptRecord
from .tables import Table

Run = tuple[dict[str, Any], list[PromptRecord]]

NOISE, BEYOND, TOO_FEW = "noise", "beyond noise", "too few prompts"
LENGTH, SPEEDUP, SPEED = "acceptance length", "speed-up", "decode tokens/s"


@dataclass(frozen=True)
class Difference:
    """One figure of one arm in two runs, over the prompts that both answered.

    Attributes:
        first, second: the figure in each run. interval: second - first, prompts drawn in pairs.
    """

    arm: str
    temperature: float
    figure: str
    prompts: int
    first: float
    second: float
    interval: Interval

    @property
    def verdict(self) -> str:
        if self.prompts < LEAST_PROMPTS:
            return TOO_FEW
        return NOISE if self.interval.low <= 0 <= self.interval.high else BEYOND

    def to_dict(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in ("arm", "temperature", "figure", "prompts", "first", "second")}
        return {**values, "difference": self.interval.to_dict(), "verdict": self.verdict}


def compare(first: Run, second: Run) -> list[Difference]:
    """Differences of all arms and temperatures that both runs hold.

    Raises:
        ValueError: the runs have no answer of one arm to one prompt in common.
    """
    overall = [figures(*run) for run in (first, second)]
    found: list[Difference] = []
    for temperature in [one for one in overall[0] if one in overall[1]]:
        totals = [_totals(rows, temperature) for _, rows in (first, second)]
        both = [{one.arm: one for one in next(iter(run[temperature].values()))} for run in overall]
        for arm in [name for name in both[0] if name in both[1]]:
            pair = [both[0][arm], both[1][arm]]
            keys = [key for key in totals[0][arm] if key in totals[1][arm]]
            found += _differences(arm, temperature, pair, keys, totals)
    if not found:
        raise ValueError("The two runs have no answer of the same arm to the same prompt: nothing can be compared.")
    return found


Totals = dict[str, dict[tuple[str, str], PromptTotals]]


def _totals(rows: Sequence[PromptRecord], temperature: float) -> Totals:
    rows = [row for row in rows if row.temperature == temperature]
    return {name: totals_by_prompt(row for row in rows if row.arm == name) for name in {row.arm for row in rows}}


def _differences(
    arm: str, temperature: float, pair: Sequence[ArmFigures], keys: list[tuple[str, str]], totals: Sequence[Totals]
) -> list[Difference]:
    own = [[run[arm][key] for key in keys] for run in totals]
    counts = np.array([[(one.kept + one.cycles, one.cycles) for one in run] for run in own], dtype=float)
    found = []
    # [runs, prompts, tokens and cycles]
    if len(keys) and counts[..., 1].any(axis=1).all():
        interval = bootstrap(np.hstack([counts[1], counts[0]]), pooled_ratio_difference)
        first, second = pooled_ratio(counts).tolist()
        found.append(Difference(arm, temperature, LENGTH, len(keys), first, second, interval))
    if any(one.refused for one in pair):
        return found
    speeds = np.array([[one.tokens_per_s for one in run] for run in own]).T
    plain = np.array([[_speed(run.get(PLAIN, {}).get(key)) for key in keys] for run in totals]).T
    for figure, table in ((SPEEDUP, speeds / plain), (SPEED, speeds)):
        table = table[np.isfinite(table).all(axis=1)]
        if len(table) and (arm, figure) != (PLAIN, SPEEDUP):
            first, second = np.median(table, axis=0).tolist()
            interval = bootstrap(table, median_difference)
            found.append(Difference(arm, temperature, figure, len(table), first, second, interval))
    return found


def _speed(totals: PromptTotals | None) -> float:
    return float("nan") if totals is None else totals.tokens_per_s


def median_difference(table: np.ndarray) -> np.ndarray:
    """[..., P, 2] -> [...] median of the second column minus that of the first."""
    medians = np.median(table, axis=-2)
    return medians[..., 1] - medians[..., 0]


def differing_settings(first: dict[str, Any], second: dict[str, Any]) -> Table:
    """What the headers of two runs do not have in common."""
    names = [name for name in {**first, **second} if first.get(name) != second.get(name)]
    cells = [[name, *(json.dumps(one.get(name)) for one in (first, second))] for name in names]
    return Table("What differs between the runs", ["", "first", "second"], cells)


def comparison_table(differences: Sequence[Difference]) -> Table:
    rows = [
        [
            f"{one.arm}" + (f", T = {one.temperature:g}" if one.temperature else ""),
            one.figure,
            str(one.prompts),
            f"{one.first:.3f}",
            f"{one.second:.3f}",
            f"{one.interval.value:+.3f} [{one.interval.low:+.3f}, {one.interval.high:+.3f}]",
            one.verdict,
        ]
        for one in differences
    ]
    note = (
        "Second minus first with its 95 % interval: the same prompts are drawn with replacement from both runs. "
        "Beyond noise: the interval leaves out zero; one in twenty does so by chance. Acceptance lengths are pooled "
        "over cycles, speeds are medians over prompts. The runs were not interleaved: tokens/s also differ when the "
        "machine was slower in one of them, speed-ups over the run's own plain generate hardly do. Arms that were "
        "refused a speed figure in one run are compared by acceptance alone."
    )
    return Table(
        "Comparison", ["arm", "figure", "prompts", "first", "second", "difference [95 %]", "verdict"], rows, note
    )
