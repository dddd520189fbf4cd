"""Targets and drafters whose laws are known exactly (fixture T4 of the bug reports, group B), through generate()."""

import pytest
import torch
from transformers import set_seed

from tests.conftest import HIDDEN, VOCAB, OracleDrafter, build_drafter, build_target, plain, prompt
from tests.decoding.test_sampling import ConstantDrafter

DRAWS = 4000


def fixed_law_target(law: list[float]):
    """A target that gives every token the same probability after any text."""
    target = build_target("llama", vocab_size=len(law))
    with torch.no_grad():
        for name, parameter in target.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                parameter.zero_()
        target.model.embed_tokens.weight.fill_(1.0)
        rows = torch.tensor(law).log().clamp(min=-1e4) / HIDDEN
        target.lm_head.weight.copy_(rows[:, None].expand(-1, HIDDEN))
    return target


def draws(
    law: list[float], draft_law: list[float], count: int, rule: str = "token", seed: int = 5, **options
) -> torch.Tensor:
    """Tokens 2 and 3 of `count` answers: the first of a cycle and what follows it. [count, 2]"""
    drafter = build_drafter(kind=ConstantDrafter, vocab_size=len(law), mask_token_id=len(law) - 1, block_size=4)
    drafter.law = torch.tensor(draft_law)
    drafter.speculation.verification = rule
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": 3, "pad_token_id": 0, **options}
    ids, target = torch.zeros(1, 3, dtype=torch.long), fixed_law_target(law)
    set_seed(seed)
    out = target.generate(
        ids, attention_mask=torch.ones_like(ids), assistant_model=drafter, num_return_sequences=count, **options
    )
    assert drafter.last_acceptance.num_cycles == count
    return out[:, 4:]


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize(
    ("law", "draft_law", "temperature", "expected", "tolerance"),
    [
        pytest.param([0.6, 0.4, 0.0, 0.0], [0.2, 0.3, 0.5, 0.0], 1.0, [0.6, 0.4, 0.0, 0.0], 0.024, id="B3"),
        pytest.param([0.6, 0.4], [0.2, 0.8], 0.5, [0.6923, 0.3077], 0.023, id="B5, temperature 0.5"),
        pytest.param([0.6, 0.4], [0.2, 0.8], 2.0, [0.5505, 0.4495], 0.023, id="B5, temperature 2"),
        pytest.param([0.7, 0.3], [0.0, 1.0], 1.0, [0.7, 0.3], 0.022, id="B14, a point mass"),
    ],
)
def test_frequencies_of_drafted_tokens(rule, law, draft_law, temperature, expected, tolerance):
    found = draws(law, draft_law, DRAWS, rule, temperature=temperature)
    for place in range(2):
        counts = torch.bincount(found[:, place], minlength=len(law)) / DRAWS
        assert (counts - torch.tensor(expected)).abs().max() <= tolerance, place
        assert not counts[torch.tensor(expected) == 0].any()


def test_every_token_of_a_law_is_met():
    """B8: the chance to miss the rarest in 300 draws is 0.75^300."""
    found = draws([0.4, 0.35, 0.25], [0.25, 0.25, 0.5], 300)
    assert set(found[:, 0].tolist()) == {0, 1, 2}


def test_equal_laws_leave_nothing_undefined():
    """B7: every draft is kept, and no residual of zeros becomes a text."""
    for rule in ("token", "block"):
        found = draws([0.5, 0.3, 0.2, 0.0], [0.5, 0.3, 0.2, 0.0], 200, rule)
        assert set(found.flatten().tolist()) == {0, 1, 2}


@pytest.mark.parametrize("block_size", [2, 3, 4, 16])
def test_sampling_without_any_processor(target, block_size):
    """B6"""
    drafter = build_drafter(block_size=block_size)
    options = {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.0, "max_new_tokens": 8}
    out = target.generate(prompt(), assistant_model=drafter, **options)
    assert out.shape == (1, 9 + 8)
    assert int(out.max()) < VOCAB


@pytest.mark.parametrize("rule", [{"top_k": 1}, {"top_k": 0, "top_p": 1e-4}], ids=["top_k", "top_p"])
def test_one_candidate_is_greedy(target, drafter, rule):
    """B9"""
    expected = plain(target, prompt(), max_new_tokens=24)
    for seed in range(5):
        set_seed(seed)
        out = target.generate(prompt(), assistant_model=drafter, do_sample=True, max_new_tokens=24, **rule)
        assert torch.equal(out, expected)


def test_seeds():
    """B11: same seed, same ids; of 20 seeds at least two differ (chance of failure 2^-19)."""
    same, again, *others = (draws([0.5, 0.5], [0.2, 0.8], 1, seed=seed)[0].tolist() for seed in (7, 7, *range(20)))
    assert same == again
    assert len({text[0] for text in others}) == 2


def test_every_draft_length_gives_the_same_text(target):
    """B13: all lengths of a block of 8, the checkpoint's own included."""
    expected = plain(target, prompt(), max_new_tokens=60)
    drafter = build_drafter(kind=OracleDrafter)
    drafter.continuation = expected[0].tolist()
    drafter.is_wrong = lambda position: position % 5 == 0
    for length in (None, *range(1, 9)):
        drafter.speculation.draft_length = length
        out = target.generate(prompt(), assistant_model=drafter, max_new_tokens=60, do_sample=False)
        assert torch.equal(out, expected), length
