"""How many drafts of a block are worth verifying on this machine: `SpeculationConfig(draft_length="auto")`.

Symbols: D drafts of a block, R rows that run together. A cycle of length 0 is a plain step without a draft.
"""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

from ..modeling.drafter import XPressDrafter

# Cycles that are timed before a length is trusted; the first ones of a process pay for lazy set-up.
SAMPLES = 2
# Medians over the latest cycles follow a context that grows.
REMEMBERED = 9
# Without drafts nothing is learned about them: one cycle in so many drafts all the same.
PROBE_EVERY = 32
# Weight of the past per cycle in the running acceptance of a slot.
DECAY = 0.98


class CycleCosts:
    """Seconds of whole cycles by number of rows and drafted length, measured while decoding."""

    def __init__(self) -> None:
        self._times: dict[tuple[int, int], deque[float]] = defaultdict(lambda: deque(maxlen=REMEMBERED))

    def note(self, rows: int, length: int, seconds: float) -> None:
        self._times[rows, length].append(seconds)

    def is_known(self, rows: int, length: int) -> bool:
        return len(self._times[rows, length]) >= SAMPLES

    def seconds(self, rows: int, length: int) -> float:
        """Median time of a cycle; lengths in between are interpolated. Needs two known lengths, one of them > 0."""
        known = sorted(one for count, one in self._times if count == rows and one and self.is_known(rows, one))
        if length == 0 or length in known:
            return statistics.median(self._times[rows, length])
        low = max((one for one in known if one < length), default=None)
        high = min((one for one in known if one > length), default=None)
        if low is None:
            # A block is drafted whole, so that a short draft saves verification only: as dear as the next longer one.
            return self.seconds(rows, high)
        if high is None:
            return self.seconds(rows, low)
        share = (length - low) / (high - low)
        return (1 - share) * self.seconds(rows, low) + share * self.seconds(rows, high)


_costs: WeakKeyDictionary[XPressDrafter, WeakKeyDictionary[PreTrainedModel, dict[int, CycleCosts]]]
_costs = WeakKeyDictionary()


def costs_of(target: PreTrainedModel, drafter: XPressDrafter) -> CycleCosts:
    """What was measured of this pair, with its present number of sweeps, since the process began."""
    pair = _costs.setdefault(drafter, WeakKeyDictionary()).setdefault(target, {})
    return pair.setdefault(drafter.num_sweeps, CycleCosts())


class AutoLength:
    """Picks the length with the most expected tokens per second.

    It looks at acceptance and times of earlier cycles only, never at the draft that it cuts, so sampled texts keep
    their law; as times differ from run to run, the same seed may give another text.

    Args:
        limit: longest length. costs: measured before, and added to.
    """

    def __init__(self, limit: int, costs: CycleCosts):
        self.limit, self.costs = limit, costs
        # One kept draft of two per slot to begin with.
        self.kept, self.reached = [1.0] * limit, [2.0] * limit
        self.since_draft = 0

    def choose(self, rows: int) -> int:
        """Drafts to verify in the next cycle of `rows` rows, 0 to `limit`."""
        for length in (self.limit, 0):
            if not self.costs.is_known(rows, length):
                return length
        if self.since_draft >= PROBE_EVERY:
            return self.limit
        speeds = [self.tokens(length) / self.costs.seconds(rows, length) for length in range(self.limit + 1)]
        return speeds.index(max(speeds))

    def tokens(self, length: int) -> float:
        """Expected tokens of a row in a cycle: 1 + sum over k of the product of the first k acceptance rates."""
        expected, chance = 1.0, 1.0
        for kept, reached in zip(self.kept[:length], self.reached, strict=False):
            chance *= kept / reached
            expected += chance
        return expected

    def note(self, rows: int, length: int, seconds: float, cycles: list[tuple[int, int]]) -> None:
        """Adds one cycle: its time and, row by row, drafts kept and verified."""
        self.costs.note(rows, length, seconds)
        self.since_draft = self.since_draft + 1 if length == 0 else 0
        for accepted, verified in cycles:
            for slot in range(min(accepted + 1, verified)):
                self.kept[slot] = DECAY * self.kept[slot] + (slot < accepted)
                self.reached[slot] = DECAY * self.reached[slot] + 1
