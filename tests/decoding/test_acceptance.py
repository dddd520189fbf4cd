"""The acceptance record: its definitions on closed-form texts, and what it says about itself."""

import math

import pytest

from tests.conftest import OracleDrafter, build_cycle_target, build_drafter, build_target, plain, prompt
from xpress_hf import AcceptanceRecord


def record_on_cycle(block_size: int, wrong_slot: int | None = None, new: int = 25) -> AcceptanceRecord:
    """Record of an oracle on the cycle target, whose text is 0 1 2 ... 15 0 1 ..."""
    target = build_cycle_target()
    drafter = build_drafter(kind=OracleDrafter, vocab_size=16, mask_token_id=15, block_size=block_size)
    drafter.continuation = [index % 16 for index in range(200)]
    if wrong_slot is not None:
        # With one draft kept and one bonus, cycles start every two positions after the first new token.
        drafter.is_wrong = lambda position: (position - 4) % 2 == 1 if wrong_slot == 2 else False
    target.generate(
        plain(target, prompt(1, vocab=1), max_new_tokens=2),
        assistant_model=drafter,
        max_new_tokens=new,
        do_sample=False,
    )
    return drafter.last_acceptance


def test_an_oracle_fills_every_block():
    record = record_on_cycle(block_size=4, new=25)
    assert record.num_cycles == 6
    assert record.acceptance_length == 4.0
    assert record.position_acceptance == [1.0, 1.0, 1.0]
    assert record.histogram == [0, 0, 0, 6]
    assert record.ceiling_share == 1.0


def test_an_error_forced_at_slot_two():
    record = record_on_cycle(block_size=4, wrong_slot=2, new=25)
    assert record.acceptance_length == 2.0
    assert record.position_acceptance == [1.0, 0.0, None]
    assert record.ceiling_share == 0.0


def test_cut_cycles_do_not_count_for_the_ceiling_but_for_the_length():
    """56 tokens in cycles of 8 leave a cut one: seven full cycles and one that verified six drafts."""
    target, ids = build_target(), prompt()
    drafter = build_drafter(kind=OracleDrafter)
    drafter.continuation = plain(target, ids, max_new_tokens=80)[0].tolist()
    target.generate(ids, assistant_model=drafter, max_new_tokens=64, do_sample=False)
    record = drafter.last_acceptance
    assert record.accepted == [7] * 7 + [6]
    assert record.verified == [7] * 7 + [6]
    assert record.ceiling_share == 1.0
    assert record.acceptance_length == pytest.approx(7.875)
    assert 1 + sum(record.accepted) + record.num_cycles == 64


def test_records_are_pooled_over_cycles():
    one, two = AcceptanceRecord(3, [3, 1], [3, 3]), AcceptanceRecord(3, [0], [2])
    both = one + two
    assert (both.accepted, both.verified) == ([3, 1, 0], [3, 3, 2])
    assert both.acceptance_length == pytest.approx(1 + 4 / 3)
    assert both.ceiling_share == 0.5
    with pytest.raises(ValueError, match="3 and 4"):
        one + AcceptanceRecord(4)


def test_a_record_without_cycles_is_readable():
    record = AcceptanceRecord(5)
    assert math.isnan(record.acceptance_length)
    assert record.to_dict()["acceptance_length"] is None
    assert "no cycles" in str(record)


def test_printed_record_names_its_definition():
    text = str(AcceptanceRecord(3, [3, 1, 0, 1], [3, 3, 3, 1]))
    assert "acceptance length 2.25 over 4 cycles (bonus included, at most 4)" in text
    assert "ceiling bin 33.3%" in text
    assert len(text.splitlines()) == 6


@pytest.mark.parametrize("numbers", [(4, 4), (2, 1), (-1, 2)])
def test_impossible_cycles_are_refused(numbers):
    with pytest.raises(ValueError, match="num_accepted"):
        AcceptanceRecord(3).add(*numbers)


def test_every_call_gets_a_record_of_its_own():
    target, drafter = build_target(), build_drafter()
    assert drafter.last_acceptance is None
    target.generate(prompt(), assistant_model=drafter, max_new_tokens=10, do_sample=False)
    first = drafter.last_acceptance
    target.generate(prompt(), assistant_model=drafter, max_new_tokens=10, do_sample=False)
    assert drafter.last_acceptance is not first
    assert drafter.last_acceptance.accepted == first.accepted
