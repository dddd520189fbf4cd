"""`draft_length="auto"`: lengths follow measured times and acceptance, and the text does not depend on them."""

from itertools import count

import pytest
import torch

from tests.conftest import OracleDrafter, build_drafter, build_target, plain, prompt
from tests.decoding.test_batches import LENGTHS, oracle, ragged
from xpress_hf import SpeculationConfig
from xpress_hf.decoding import loop as loop_module
from xpress_hf.decoding.budget import PROBE_EVERY, SAMPLES, AutoLength, CycleCosts, costs_of

NEW = 60


def measured(times: dict[int, float], limit: int = 4) -> AutoLength:
    auto = AutoLength(limit, CycleCosts())
    for length, seconds in times.items():
        for _ in range(SAMPLES):
            auto.costs.note(1, length, seconds)
    return auto


def test_lengths_that_were_never_timed_come_first():
    auto = measured({})
    lengths = []
    for _ in range(2 * SAMPLES):
        lengths.append(auto.choose(1))
        auto.note(1, lengths[-1], 1.0, [(0, lengths[-1])] if lengths[-1] else [])
    assert lengths == [4] * SAMPLES + [0] * SAMPLES
    assert auto.choose(2) == 4, "another number of rows has costs of its own"


def test_expected_tokens_in_closed_form():
    """Rates 1/2 in every slot: 1 + 1/2 + 1/4 + 1/8."""
    auto = measured({})
    assert [auto.tokens(length) for length in range(4)] == [1.0, 1.5, 1.75, 1.875]


@pytest.mark.parametrize(
    ("times", "length"),
    [
        ({0: 1.0, 4: 1.1}, 4),  # verification costs nothing: 1.9375 / 1.1
        ({0: 1.0, 4: 2.0}, 0),  # 1.9375 tokens in twice the time
        ({0: 1.0, 1: 1.05, 4: 1.9}, 1),  # 1.5 / 1.05 = 1.43; two drafts: 1.75 / 1.33 = 1.31
    ],
)
def test_the_fastest_length_is_chosen(times, length):
    assert measured(times).choose(1) == length


def test_lengths_between_two_timed_ones_are_interpolated():
    auto = measured({0: 1.0, 1: 2.0, 4: 5.0})
    assert [auto.costs.seconds(1, length) for length in range(5)] == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_speculation_that_does_not_pay_is_probed_now_and_then():
    auto = measured({0: 1.0, 4: 3.0})
    lengths = []
    for _ in range(2 * PROBE_EVERY + 2):
        lengths.append(auto.choose(1))
        auto.note(1, lengths[-1], 1.0 if not lengths[-1] else 3.0, [(0, 4)] if lengths[-1] else [])
    assert lengths == ([0] * PROBE_EVERY + [4]) * 2


def test_rates_follow_what_is_kept():
    auto = measured({0: 1.0, 4: 1.5})
    for _ in range(100):
        auto.note(1, 4, 1.5, [(2, 4)])
    assert auto.tokens(4) == pytest.approx(3.0, abs=0.1)
    assert auto.choose(1) == 4


class Clock:
    """A machine on which a cycle of n drafts takes as long as a table says."""

    def __init__(self, monkeypatch, seconds):
        self.seconds, self.now, self.lengths = seconds, 0.0, []
        step = loop_module.DecodingLoop._step

        def timed(loop, limit):
            step(loop, limit)
            self.lengths.append(limit)
            self.now += self.seconds(limit)

        monkeypatch.setattr(loop_module.DecodingLoop, "_step", timed)
        monkeypatch.setattr(loop_module.time, "perf_counter", lambda: self.now)


@pytest.mark.parametrize(("dear", "usual"), [(False, 7), (True, 0)])
def test_one_sequence(monkeypatch, dear, usual):
    clock = Clock(monkeypatch, lambda limit: 1.0 + limit * (2.0 if dear else 0.01))
    target, ids = build_target(), prompt()
    drafter = build_drafter(kind=OracleDrafter)
    drafter.continuation = plain(target, ids, max_new_tokens=NEW + 16)[0].tolist()
    drafter.is_wrong = lambda position: position % 9 == 0
    drafter.speculation.draft_length = "auto"
    for _ in range(2):
        out = target.generate(ids, assistant_model=drafter, max_new_tokens=NEW, do_sample=False)
        assert torch.equal(out, plain(target, ids, max_new_tokens=NEW))
    later = clock.lengths[2 * SAMPLES :]
    assert later.count(usual) > 0.8 * len(later)


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


def test_costs_belong_to_a_pair_and_its_sweeps():
    target, drafter = build_target(), build_drafter()
    costs = costs_of(target, drafter)
    assert costs_of(target, drafter) is costs
    drafter.speculation.sweeps = 0
    assert costs_of(target, drafter) is not costs
    assert costs_of(build_target(), drafter) is not costs


def test_only_one_word_is_known():
    with pytest.raises(ValueError, match=r"draft_length.*'auto'"):
        SpeculationConfig(draft_length="long")
