"""How many drafts of a block are worth verifying on this machine: `SpeculationConfig(draft_length="auto")`.

Symbols: D drafts of a block, R rows that run together. A cycle of length 0 is a plain step without a draft.
"""

from __future__ import annotations

from collections import defaultdict, deque
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

from ..modeling.drafter import XPressDrafter

# Cycles that are timed before a length is trusted; the first ones of a process pay for lazy set-up.
SAMPLES = 2
# The latest cycles follow a context that grows.
REMEMBERED = 9
# Slots that are not drafted teach nothing: one cycle in so many verifies the whole block all the same ...
PROBE_EVERY = 32
# ... or fewer, so that what is lost by it stays below this share of the time.
PROBE_SHARE = 0.01
# Weight of the past per cycle in the running acceptance of a slot.
DECAY = 0.98
# A batch ends with its slowest row, which keeps less than the mean that is counted here: drafts must gain this much.
BATCH_GAIN = 1.15
# As rows of a batch end, costs of R rows stand for those of R / 2 to 2 R rows; whole batches are timed themselves.
ALIKE = 2


class History:
    """What was measured of a pair while decoding, over all calls: seconds of whole cycles by number of rows and
    verified length, acceptance of each slot, and cycles since a whole block was verified."""

    def __init__(self) -> None:
        self._times: dict[tuple[int, int], deque[float]] = defaultdict(lambda: deque(maxlen=REMEMBERED))
        # One kept draft of two per slot to begin with.
        self._kept: dict[int, float] = defaultdict(lambda: 1.0)
        self._reached: dict[int, float] = defaultdict(lambda: 2.0)
        self.since_whole = 0

    def note_time(self, rows: int, length: int, seconds: float) -> None:
        self._times[rows, length].append(seconds)

    def note_drafts(self, accepted: int, verified: int) -> None:
        for slot in range(min(accepted + 1, verified)):
            self._kept[slot] = DECAY * self._kept[slot] + (slot < accepted)
            self._reached[slot] = DECAY * self._reached[slot] + 1

    def tokens(self, length: int) -> float:
        """Expected tokens of a row in a cycle: 1 + sum over k of the product of the first k acceptance rates."""
        expected, chance = 1.0, 1.0
        for slot in range(length):
            chance *= self._kept[slot] / self._reached[slot]
            expected += chance
        return expected

    def is_known(self, rows: int, length: int) -> bool:
        return len(self._times[rows, length]) >= SAMPLES

    def alike(self, rows: int, lengths: tuple[int, ...]) -> int | None:
        """The number of rows nearest to `rows` whose costs are known at these lengths and can stand for its own."""
        counts = {count for count, _ in self._times if rows <= ALIKE * count and count <= ALIKE * rows}
        known = [count for count in counts if all(self.is_known(count, length) for length in lengths)]
        return min(known, key=lambda count: (abs(count - rows), count), default=None)

    def seconds(self, rows: int, length: int) -> float:
        """Time of a cycle, the shortest of the latest: what else a machine does makes cycles longer, never shorter.
        Lengths in between are interpolated. Needs lengths on both sides, but 0."""
        known = sorted(one for count, one in self._times if count == rows and one and self.is_known(rows, one))
        if length == 0 or length in known:
            return min(self._times[rows, length])
        low, high = max(one for one in known if one < length), min(one for one in known if one > length)
        share = (length - low) / (high - low)
        return (1 - share) * self.seconds(rows, low) + share * self.seconds(rows, high)


_histories: WeakKeyDictionary[XPressDrafter, WeakKeyDictionary[PreTrainedModel, dict[int, History]]]
_histories = WeakKeyDictionary()


def history_of(target: PreTrainedModel, drafter: XPressDrafter) -> History:
    """That of this pair with its present number of sweeps since the process began."""
    pair = _histories.setdefault(drafter, WeakKeyDictionary()).setdefault(target, {})
    return pair.setdefault(drafter.num_sweeps, History())


class AutoLength:
    """Picks, for one generate() call, the length with the most expected tokens per second.

    It looks at acceptance and times of earlier cycles only, never at the draft that it cuts, so sampled texts keep
    their law; as times differ from run to run, the same seed may give another text.

    Args:
        limit: longest length. history: measured before, and added to. batch: rows of the call.
    """

    def __init__(self, limit: int, history: History, batch: int = 1):
        self.limit, self.history, self.batch = limit, history, batch
        # Lengths that are timed first; those in between follow from them until they are chosen.
        self.anchors = tuple(dict.fromkeys((limit, 1, 0)))
        self._plain, self._drafted = 0, 0

    def choose(self, rows: int) -> int:
        """Drafts to verify in the next cycle of `rows` rows, 0 to `limit`."""
        history = self.history
        alike = history.alike(rows, self.anchors)
        if alike is None or (rows == self.batch and alike != rows):
            return next(length for length in self.anchors if not history.is_known(rows, length))
        costs = [history.seconds(alike, length) for length in range(self.limit + 1)]
        speeds = [history.tokens(length) / cost for length, cost in enumerate(costs)]
        best = speeds.index(max(speeds))
        if rows > 1 and speeds[best] < BATCH_GAIN * speeds[0]:
            best = 0
        # Nothing that a probe keeps is counted: in a batch the slowest row decides, which may keep none.
        lost_s = costs[-1] - costs[best]
        if history.since_whole >= max(PROBE_EVERY, lost_s / (PROBE_SHARE * costs[best])):
            return self.limit
        return best

    def note(self, rows: int, length: int, seconds: float, cycles: list[tuple[int, int]]) -> None:
        """Adds one cycle: its time and, row by row, drafts kept and verified."""
        # The first draft of a call reads the whole prompt.
        if length == 0 or self._drafted:
            self.history.note_time(rows, length, seconds)
        for accepted, verified in cycles:
            self.history.note_drafts(accepted, verified)
        self.history.since_whole = 0 if length == self.limit else self.history.since_whole + 1
        self._plain, self._drafted = self._plain + (length == 0), self._drafted + (length > 0)

    @property
    def mostly_plain(self) -> bool:
        return self._plain > self._drafted
