"""`draft_length="auto"`: lengths follow measured times and acceptance, and the text does not depend on them."""

from itertools import count, pairwise

import pytest
import torch

from tests.conftest import OracleDrafter, build_drafter, build_target, plain, prompt
from tests.decoding.test_batches import LENGTHS, oracle, ragged
from xpress_hf import SpeculationConfig
from xpress_hf.decoding import loop as loop_module
from xpress_hf.decoding.budget import PROBE_EVERY, PROBE_SHARE, SAMPLES, AutoLength, History, history_of

NEW = 60


def measured(times: dict[int, float], limit: int = 4, rows: int = 1) -> AutoLength:
    auto = AutoLength(limit, History())
    for length, seconds in times.items():
        for _ in range(SAMPLES):
            auto.history.note_time(rows, length, seconds)
    return auto


def lengths_of(auto: AutoLength, times: dict[int, float], cycles: int) -> list[int]:
    """Chosen lengths on a machine with these times, where no draft is kept."""
    lengths = []
    for _ in range(cycles):
        lengths.append(auto.choose(1))
        auto.note(1, lengths[-1], times[lengths[-1]], [(0, lengths[-1])] if lengths[-1] else [])
    return lengths


def test_lengths_that_were_never_timed_come_first():
    """The first draft of a call reads the prompt, so its time says nothing about the others."""
    auto = measured({})
    lengths = lengths_of(auto, {0: 1.0, 1: 1.0, 4: 1.0}, 3 * SAMPLES + 1)
    assert lengths == [4] * (SAMPLES + 1) + [1] * SAMPLES + [0] * SAMPLES
    later = AutoLength(4, auto.history)
    assert later.choose(1) == 4, "the next call knows"
    assert later.choose(2) == 4, "costs of one row stand for two"
    auto.history.note_time(3, 0, 1.0)
    assert [later.choose(3) for _ in range(2)] == [4, 4]
    assert auto.history.alike(3, (4, 1, 0)) is None, "but not for three"
    auto.history.note_time(2, 4, 1.0)
    assert AutoLength(4, auto.history, batch=2).choose(2) == 4, "a whole batch is timed itself: once more,"
    auto.history.note_time(2, 4, 1.0)
    assert AutoLength(4, auto.history, batch=2).choose(2) == 1, "then one draft"


def test_the_nearest_number_of_rows_stands_for_others():
    auto = measured({0: 1.0, 1: 1.1, 4: 9.0}, rows=8)
    for length, seconds in {0: 1.0, 1: 9.0, 4: 9.0}.items():
        for _ in range(SAMPLES):
            auto.history.note_time(3, length, seconds)
    assert [auto.history.alike(rows, (4, 1, 0)) for rows in (1, 2, 4, 5, 6, 8, 16, 17)] == [
        None,
        3,
        3,
        3,
        8,
        8,
        8,
        None,
    ]
    assert [auto.choose(rows) for rows in (3, 5, 6, 8)] == [0, 0, 1, 1]


def test_expected_tokens_in_closed_form():
    """Rates 1/2 in every slot: 1 + 1/2 + 1/4 + 1/8."""
    history = History()
    assert [history.tokens(length) for length in range(4)] == [1.0, 1.5, 1.75, 1.875]


@pytest.mark.parametrize(
    ("times", "length"),
    [
        ({0: 1.0, 1: 1.08, 4: 1.1}, 4),  # verification costs nothing: 1.9375 / 1.1
        ({0: 1.0, 1: 1.8, 4: 2.0}, 0),  # 1.9375 tokens in twice the time
        ({0: 1.0, 1: 1.05, 4: 1.9}, 1),  # 1.5 / 1.05 = 1.43; two drafts: 1.75 / 1.33 = 1.31
        ({0: 1.0, 1: 1.2, 4: 1.5}, 2),  # 1.25, 1.75 / 1.3 = 1.35, 1.875 / 1.4 = 1.34, 1.29
    ],
)
def test_the_fastest_length_is_chosen(times, length):
    assert measured(times).choose(1) == length


@pytest.mark.parametrize(("rows", "length"), [(1, 3), (2, 0), (8, 0)])
def test_in_a_batch_small_gains_do_not_count(rows, length):
    """At best 1.875 tokens in 1.7 times the time, 10 % of gain on the mean of all rows; the slowest one decides."""
    times = {0: 1.0, 1: 1.5, 4: 1.8}
    assert measured(times, rows=rows).choose(rows) == length
    assert measured({**times, 4: 1.6}, rows=rows).choose(rows) == 4, "21 %"


def test_lengths_between_two_timed_ones_are_interpolated():
    auto = measured({0: 1.0, 1: 2.0, 4: 5.0})
    assert [auto.history.seconds(1, length) for length in range(5)] == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_a_cycle_that_was_disturbed_does_not_count():
    auto = measured({0: 1.0, 1: 1.1, 4: 1.2})
    auto.history.note_time(1, 4, 60.0)
    assert auto.history.seconds(1, 4) == 1.2


@pytest.mark.parametrize(("whole", "every"), [(1.2, PROBE_EVERY), (1.8, 80), (4.0, 300)])
def test_whole_blocks_are_tried_now_and_then(whole, every):
    """Every 32 cycles; or less often, so that little is lost: here 0.8 and 3 s a probe, 1 % of 80 and 300 steps."""
    times = {0: 1.0, 1: whole, 4: whole}
    auto = measured(times)
    for _ in range(500):
        auto.history.note_drafts(0, 4)
    lengths = lengths_of(auto, times, 3000)
    gaps = [after - before for before, after in pairwise(n for n, length in enumerate(lengths) if length)]
    assert set(lengths) == {0, 4}
    assert gaps == pytest.approx([every + 1] * len(gaps), rel=0.02)
    assert len(gaps) > 5
    lost = sum(times[length] for length in lengths) / len(lengths) - 1
    assert 0 < lost < 1.05 * PROBE_SHARE


def test_rates_follow_what_is_kept():
    auto = measured({0: 1.0, 1: 1.2, 4: 1.5})
    for _ in range(100):
        auto.note(1, 4, 1.5, [(2, 4)])
    assert auto.history.tokens(4) == pytest.approx(3.0, abs=0.1)
    assert auto.choose(1) == 2


class Clock:
    """A machine on which a cycle of n drafts takes as long as a table says."""

    def __init__(self, monkeypatch, seconds):
        self.seconds, self.now, self.lengths = seconds, 0.0, []
        step = loop_module.DecodingLoop._step

        def timed(loop, limit):
            verified = step(loop, limit)
            self.lengths.append(limit)
            self.now += self.seconds(verified)
            return verified

        monkeypatch.setattr(loop_module.DecodingLoop, "_step", timed)
        monkeypatch.setattr(loop_module.time, "perf_counter", lambda: self.now)


@pytest.mark.parametrize(("dear", "usual"), [(False, 7), (True, 0)])
def test_one_sequence(monkeypatch, caplog, dear, usual):
    clock = Clock(monkeypatch, lambda limit: 1.0 + limit * (2.0 if dear else 0.01))
    target, ids = build_target(), prompt()
    drafter = build_drafter(kind=OracleDrafter)
    drafter.continuation = plain(target, ids, max_new_tokens=NEW + 16)[0].tolist()
    drafter.is_wrong = lambda position: position % 9 == 0
    drafter.speculation.draft_length = "auto"
    for _ in range(2):
        out = target.generate(ids, assistant_model=drafter, max_new_tokens=NEW, do_sample=False)
        assert torch.equal(out, plain(target, ids, max_new_tokens=NEW))
    later = clock.lengths[3 * SAMPLES + 1 :]
    assert later.count(usual) > 0.8 * len(later)
    assert ("speculation does not pay for 1 sequences" in caplog.text) == dear


def test_rows_of_a_batch_and_drafts_after_plain_steps(monkeypatch):
    """Every length in turn, plain steps among them: context rows wait until the next draft."""
    numbers = count()
    monkeypatch.setattr(AutoLength, "choose", lambda self, rows: (0, 0, 7, 0, 3)[next(numbers) % 5])
    target = build_target()
    ids, mask, prompts = ragged(LENGTHS)
    options = {"attention_mask": mask, "max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    expected = target.generate(ids, **options)
    drafter = oracle(target, prompts, expected)
    drafter.speculation.draft_length = "auto"
    assert torch.equal(target.generate(ids, assistant_model=drafter, **options), expected)
    assert set(drafter.last_acceptance.verified) >= {3, 7}


def test_a_history_belongs_to_a_pair_and_its_sweeps():
    target, drafter = build_target(), build_drafter()
    history = history_of(target, drafter)
    assert history_of(target, drafter) is history
    drafter.speculation.sweeps = 0
    assert history_of(target, drafter) is not history
    assert history_of(build_target(), drafter) is not history


def test_only_one_word_is_known():
    with pytest.raises(ValueError, match=r"draft_length.*'auto'"):
        SpeculationConfig(draft_length="long")
