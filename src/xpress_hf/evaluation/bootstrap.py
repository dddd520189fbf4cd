"""Percentile intervals by drawing prompts with replacement: cycles of one prompt are not independent, prompts are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np

# Gathered prompts of this many draws stay small beside a model.
DRAWS_AT_A_TIME = 500


@dataclass(frozen=True)
class Interval:
    """A figure over all prompts and where it lies when prompts are drawn anew, 95 % of the time."""

    value: float
    low: float
    high: float

    def to_dict(self) -> dict[str, float]:
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def bootstrap(
    table: np.ndarray, statistic: Callable[[np.ndarray], np.ndarray], draws: int = 10_000, seed: int = 0
) -> Interval:
    """Interval of any figure over prompts.

    Args:
        table: [P, C] what is known of each prompt. Columns of two arms make an interval of their paired difference.
        statistic: [..., P, C] -> [...].

    Raises:
        ValueError: no prompt.
    """
    table = np.asarray(table, dtype=float)
    if not len(table):
        raise ValueError("An interval over prompts needs at least one prompt, got none.")
    chosen = np.random.default_rng(seed).integers(len(table), size=(draws, len(table)))
    parts = [statistic(table[chosen[first : first + DRAWS_AT_A_TIME]]) for first in range(0, draws, DRAWS_AT_A_TIME)]
    # A draw may hold no cycle that the figure is about.
    low, high = np.nanpercentile(np.concatenate(parts), [2.5, 97.5])
    return Interval(float(statistic(table)), float(low), float(high))


def pooled_ratio(table: np.ndarray) -> np.ndarray:
    """[..., P, 2] numerators and denominators -> [...] ratio of their sums, NaN without a denominator. Tokens and
    cycles of each prompt give the pooled acceptance length; a second column of ones gives the mean over prompts."""
    sums = table.sum(axis=-2)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(sums[..., 1] > 0, sums[..., 0] / sums[..., 1], np.nan)


def pooled_ratio_difference(table: np.ndarray) -> np.ndarray:
    """[..., P, 4] numerators and denominators of two arms -> [...] first ratio minus second."""
    return pooled_ratio(table[..., :2]) - pooled_ratio(table[..., 2:])
