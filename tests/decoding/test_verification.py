"""Acceptance rules: enumerated exactly over three symbols, and drawn."""

from collections import Counter
from itertools import product

import pytest
import torch

from xpress_hf.decoding.verification import (
    block_acceptance,
    block_verification,
    block_weights,
    match,
    token_rejection,
)

V = 3


def laws(seed: int, depth: int) -> dict[tuple[int, ...], torch.Tensor]:
    """A random law after every prefix of up to `depth` tokens, in float64."""
    generator = torch.Generator().manual_seed(seed)
    prefixes = [prefix for length in range(depth + 1) for prefix in product(range(V), repeat=length)]
    return {prefix: torch.rand(V, generator=generator, dtype=torch.float64).pow(2).softmax(-1) for prefix in prefixes}


def along(table: dict, drafts: tuple[int, ...], places: int) -> torch.Tensor:
    """Laws met along a chain of drafts. -> [1, places, V]"""
    return torch.stack([table[drafts[:place]] for place in range(places)])[None]


def token_outcomes(drafts, p, q, length):
    """Exact law of (num_accepted, next token) of token-by-token rejection."""
    reach = 1.0
    for place in range(length):
        x = drafts[place]
        keep = min(1.0, float(p[drafts[:place]][x] / q[drafts[:place]][x]))
        rest = (p[drafts[:place]] - q[drafts[:place]]).clamp(min=0)
        if keep < 1:
            for token in range(V):
                yield place, token, reach * (1 - keep) * float(rest[token] / rest.sum())
        reach *= keep
    for token in range(V):
        yield length, token, reach * float(p[drafts[:length]][token])


def block_outcomes(drafts, p, q, length):
    """The same for block verification, from the probabilities that the product computes."""
    ids = torch.tensor([drafts])
    draft, target = along(q, drafts, len(drafts)), along(p, drafts, len(drafts) + 1)
    chances = block_acceptance(ids, draft, target, torch.tensor([length]))[0]
    weights = block_weights(ids, draft, target)[0]
    assert not chances[length + 1 :].any()
    for kept in range(length + 1):
        # Length 0 needs no acceptance of its own.
        chance = (chances[kept] if kept else 1.0) * float((1 - chances[kept + 1 :]).prod())
        law = p[drafts[:kept]]
        if kept < length:
            law = (weights[kept] * law - q[drafts[:kept]]).clamp(min=0)
            if law.sum() == 0:
                assert chance < 1e-12
                continue
        for token in range(V):
            yield kept, token, float(chance) * float(law[token] / law.sum())


@pytest.mark.parametrize("rule", [token_outcomes, block_outcomes])
@pytest.mark.parametrize("length", [1, 2])
@pytest.mark.parametrize("seed", range(5))
def test_enumerated_output_law_is_the_targets(rule, length, seed):
    """Sum over all drafts and outcomes, later tokens drawn from the target: the law of three tokens is p."""
    p, q = laws(seed, 3), laws(seed + 100, 3)
    found = Counter()
    for drafts in product(range(V), repeat=2):
        drawn = float(q[()][drafts[0]] * q[drafts[:1]][drafts[1]])
        for kept, token, chance in rule(drafts, p, q, length):
            head = (*drafts[:kept], token)
            for tail in product(range(V), repeat=3 - len(head)):
                weight, text = drawn * chance, head
                for step in tail:
                    weight *= float(p[text][step])
                    text = (*text, step)
                found[text] += weight
    for text in product(range(V), repeat=3):
        expected = float(p[()][text[0]] * p[text[:1]][text[1]] * p[text[:2]][text[2]])
        assert found[text] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_block_verification_accepts_at_least_as_much(seed):
    p, q = laws(seed, 3), laws(seed + 100, 3)
    means = []
    for rule in (token_outcomes, block_outcomes):
        mean = 0.0
        for drafts in product(range(V), repeat=2):
            drawn = float(q[()][drafts[0]] * q[drafts[:1]][drafts[1]])
            mean += drawn * sum(kept * chance for kept, _, chance in rule(drafts, p, q, 2))
        means.append(mean)
    assert means[1] >= means[0] - 1e-12


@pytest.mark.parametrize(
    ("rule", "outcomes"), [(token_rejection, token_outcomes), (block_verification, block_outcomes)]
)
@pytest.mark.parametrize("length", [0, 1, 2])
def test_draws_follow_the_enumerated_outcomes(rule, outcomes, length):
    p, q = laws(1, 3), laws(2, 3)
    draws = 20_000
    generator = torch.Generator().manual_seed(0)
    drafts = (2, 0)
    ids = torch.tensor([drafts]).expand(draws, -1)
    draft, target = (along(table, drafts, places).float().expand(draws, -1, -1) for table, places in ((q, 2), (p, 3)))
    kept, tokens = rule(ids, draft, target, torch.full((draws,), length), generator)
    counts = Counter(zip(kept.tolist(), tokens.tolist(), strict=True))
    for place, token, chance in outcomes(drafts, p, q, length):
        bound = 4 * (chance * (1 - chance) / draws) ** 0.5 + 1 / draws
        assert abs(counts.pop((place, token), 0) / draws - chance) <= bound
    assert not counts


@pytest.mark.parametrize("rule", [token_rejection, block_verification])
def test_equal_laws_keep_every_draft(rule):
    p = laws(3, 3)
    target = along(p, (1, 2), 3).float().expand(200, -1, -1)
    kept, _ = rule(torch.tensor([[1, 2]]).expand(200, -1), target[:, :2], target, torch.full((200,), 2))
    assert (kept == 2).all()


@pytest.mark.parametrize("rule", [token_rejection, block_verification])
def test_a_draft_that_the_target_forbids_is_never_kept(rule):
    draft = torch.tensor([[[0.5, 0.5, 0.0]]]).expand(300, -1, -1)
    target = torch.tensor([[[0.0, 0.4, 0.6], [1.0, 0.0, 0.0]]]).expand(300, -1, -1)
    kept, tokens = rule(torch.zeros(300, 1, dtype=torch.long), draft, target, torch.ones(300, dtype=torch.long))
    assert (kept == 0).all()
    assert set(tokens.tolist()) == {2}, "the residual of (0, .4, .6) over (.5, .5, 0) is the last token alone"


def test_matching_stops_at_the_first_miss_and_at_the_length():
    drafts = torch.tensor([[1, 2, 3], [1, 9, 3], [1, 2, 3], [5, 2, 3]])
    target = torch.tensor([[1, 2, 3, 4]]).expand(4, -1)
    assert match(drafts, target, torch.tensor([3, 3, 2, 3])).tolist() == [3, 1, 2, 0]


@pytest.mark.parametrize("excess", [1e-9, 6e-8, 1e-6])
def test_block_verification_counts_a_mass_below_the_rounding_of_one(excess):
    """After a kept draft c_1 = 1, so that length 1 is accepted for sure however little m_1 is."""
    sure = torch.tensor([1.0 - excess, excess, 0.0])
    target = torch.stack([torch.tensor([1.0, 0.0, 0.0]), sure, sure])[None]
    draft = torch.stack([torch.tensor([1.0, 0.0, 0.0]), torch.tensor([1.0, 0.0, 0.0])])[None]
    chances = block_acceptance(torch.tensor([[0, 0]]), draft, target, torch.tensor([2]))[0]
    assert chances[1] == 1.0
    assert chances[2] == pytest.approx(1.0 - excess, abs=1e-7), "c_2 = c_1 P(x_2) / Q(x_2)"
