"""`SpeculationConfig(verification=...)`: both rules leave the target's law as it is, and a block keeps no less."""

from itertools import product

import pytest
import torch
from transformers import set_seed

from tests.conftest import build_drafter, build_target, plain, prompt
from xpress_hf import SpeculationConfig

VOCAB = 4
TEXTS = torch.tensor(list(product(range(VOCAB), repeat=4)))
SAMPLED = {"do_sample": True, "temperature": 0.8, "top_k": 3, "max_new_tokens": 4, "pad_token_id": 0}


def pair(rule: str):
    """A flat target of four tokens and a drafter whose laws are neither equal to nor far from its own."""
    target = build_target("llama", vocab_size=VOCAB, factor=3.0)
    drafter = build_drafter(vocab_size=VOCAB, mask_token_id=3, block_size=4, factor=2.0)
    drafter.speculation = SpeculationConfig(loop="own", verification=rule)
    return target, drafter


@torch.no_grad()
def exact_law(target, ids: torch.Tensor) -> torch.Tensor:
    """Law of every text of `TEXTS`, after temperature and top-k."""
    logits = target(torch.cat([ids.expand(len(TEXTS), -1), TEXTS], dim=1)).logits[:, -5:-1] / SAMPLED["temperature"]
    lowest = logits.topk(SAMPLED["top_k"], dim=-1).values[..., -1:]
    laws = logits.masked_fill(logits < lowest, -torch.inf).softmax(dim=-1)
    return laws.gather(-1, TEXTS[..., None])[..., 0].prod(dim=1)


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize(("batch", "calls"), [(1, 400), (4, 150), (2000, 1)])
def test_joint_law_of_four_tokens(rule, batch, calls):
    """Tokens 3 and 4 hang on two drafts of one cycle. Cells that expect fewer than five draws are pooled."""
    target, drafter = pair(rule)
    ids = prompt(4, vocab=VOCAB)
    counts, lengths = torch.zeros(len(TEXTS)), set()
    set_seed(13)
    for _ in range(calls):
        out = target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            assistant_model=drafter,
            num_return_sequences=batch,
            **SAMPLED,
        )
        numbers = out[:, 4:] @ torch.tensor([VOCAB**3, VOCAB**2, VOCAB, 1])
        counts += torch.bincount(numbers, minlength=len(TEXTS))
        lengths |= set(drafter.last_acceptance.accepted)
    assert lengths == {0, 1, 2}, "every outcome of a cycle must be met"
    expected = exact_law(target, ids) * batch * calls
    assert counts[expected == 0].sum() == 0, "top-k forbids these texts"
    common = expected >= 5
    found = torch.cat([counts[common], counts[~common].sum()[None]])
    right = torch.cat([expected[common], expected[~common].sum()[None]])
    found, right = found[right > 0], right[right > 0]
    assert len(right) > 15
    degrees = len(right) - 1
    assert float(((found - right).square() / right).sum()) < degrees + 4 * (2 * degrees) ** 0.5


def test_a_block_keeps_no_less_than_token_by_token():
    """Mean drafts kept in the first cycle of 800 equal rows; the bound is four standard errors."""
    means, errors = [], []
    for rule in ("token", "block"):
        target, drafter = pair(rule)
        ids = prompt(4, vocab=VOCAB)
        set_seed(3)
        options = {**SAMPLED, "max_new_tokens": 5, "num_return_sequences": 800}
        target.generate(ids, attention_mask=torch.ones_like(ids), assistant_model=drafter, **options)
        kept = torch.tensor(drafter.last_acceptance.accepted[:800], dtype=torch.float32)
        means.append(float(kept.mean()))
        errors.append(float(kept.var()) / len(kept))
    assert means[1] > means[0] - 4 * sum(errors) ** 0.5
    assert means[1] < 3


@pytest.mark.parametrize("loop", [None, "own"])
def test_greedy_decoding_is_plain_with_either_rule(target, drafter, loop):
    expected = plain(target, prompt(), max_new_tokens=24)
    drafter.speculation = SpeculationConfig(loop=loop, verification="block")
    assert torch.equal(plain(target, prompt(), max_new_tokens=24, assistant_model=drafter), expected)


def test_the_stock_loop_has_no_block_rule(target, drafter):
    """Refused by name before any forward of the target."""
    drafter.speculation = SpeculationConfig(loop="stock", verification="block")
    calls = []
    target.register_forward_pre_hook(lambda *args: calls.append(1))
    with pytest.raises(ValueError, match="`verification`='block'"):
        target.generate(prompt(), assistant_model=drafter, max_new_tokens=4)
    assert not calls
