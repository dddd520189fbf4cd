"""`SpeculationConfig(verification=...)`: both rules leave the target's law as it is, and a block keeps no less."""

from itertools import product

import pytest
import torch
from transformers import set_seed
from transformers.generation import (
    LogitsProcessor,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

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
def exact_law(target, ids: torch.Tensor, *processors: LogitsProcessor) -> torch.Tensor:
    """Law of every text of `TEXTS` after the processors and the warpers of `SAMPLED`."""
    warpers = TemperatureLogitsWarper(SAMPLED["temperature"]), TopKLogitsWarper(SAMPLED["top_k"])
    texts = torch.cat([ids.expand(len(TEXTS), -1), TEXTS], dim=1)
    logits, law = target(texts).logits, torch.ones(len(TEXTS))
    for place in range(ids.shape[1], texts.shape[1]):
        judged = LogitsProcessorList([*processors, *warpers])(texts[:, :place], logits[:, place - 1].clone())
        law *= judged.softmax(dim=-1).gather(-1, texts[:, place, None])[:, 0]
    return law


def texts_of(out: torch.Tensor, width: int) -> torch.Tensor:
    """How often each text of `TEXTS` was drawn."""
    numbers = out[:, width:] @ torch.tensor([VOCAB**3, VOCAB**2, VOCAB, 1])
    return torch.bincount(numbers, minlength=len(TEXTS))


def check_chi_square(counts: torch.Tensor, law: torch.Tensor) -> None:
    """Cells that expect fewer than five draws are pooled."""
    expected = law * counts.sum()
    assert counts[expected == 0].sum() == 0, "top-k forbids these texts"
    common = expected >= 5
    found = torch.cat([counts[common], counts[~common].sum()[None]])
    right = torch.cat([expected[common], expected[~common].sum()[None]])
    found, right = found[right > 0], right[right > 0]
    assert len(right) > 15
    degrees = len(right) - 1
    assert float(((found - right).square() / right).sum()) < degrees + 4 * (2 * degrees) ** 0.5


def check_law(target, drafter, batch: int, calls: int, law: torch.Tensor, **options) -> set[int]:
    """`batch` x `calls` texts of four tokens follow a law. Returns the numbers of drafts that were kept."""
    ids = prompt(4, vocab=VOCAB)
    options = {**SAMPLED, **options, "attention_mask": torch.ones_like(ids), "num_return_sequences": batch}
    counts, lengths = torch.zeros(len(TEXTS)), set()
    set_seed(13)
    for _ in range(calls):
        counts += texts_of(target.generate(ids, assistant_model=drafter, **options), 4)
        lengths |= set(drafter.last_acceptance.accepted)
    check_chi_square(counts, law)
    return lengths


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize(("batch", "calls"), [(1, 400), (4, 150), (2000, 1)])
def test_joint_law_of_four_tokens(rule, batch, calls):
    """Tokens 3 and 4 hang on two drafts of one cycle."""
    target, drafter = pair(rule)
    law = exact_law(target, prompt(4, vocab=VOCAB))
    assert check_law(target, drafter, batch, calls, law) == {0, 1, 2}, "every outcome of a cycle must be met"


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("settings", [{}, {"sweeps": 0}, {"top_candidates": 2}, {"draft_length": 1}], ids=str)
def test_processors_that_look_at_the_text(rule, settings):
    """Penalties and n-grams see every draft before a place; the law is theirs, however the block was drafted."""
    target, drafter = pair(rule)
    for name, value in settings.items():
        setattr(drafter.speculation, name, value)
    options = {"repetition_penalty": 1.5, "sequence_bias": [[[1, 2], 2.0], [[3], -1.0]]}
    processors = (
        SequenceBiasLogitsProcessor(options["sequence_bias"]),
        RepetitionPenaltyLogitsProcessor(options["repetition_penalty"]),
    )
    law = exact_law(target, prompt(4, vocab=VOCAB), *processors)
    assert (law - exact_law(target, prompt(4, vocab=VOCAB))).abs().max() > 0.01
    check_law(target, drafter, 1000, 1, law, **options)


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("batch", [4, 2000])
def test_drafts_cut_by_confidence_keep_the_law(rule, batch):
    target, drafter = pair(rule)
    law = exact_law(target, prompt(4, vocab=VOCAB))
    check_law(target, drafter, batch, 2000 // batch, law, assistant_confidence_threshold=0.6)
    assert set(drafter.last_acceptance.verified) <= {1, 2}


@pytest.mark.parametrize("rule", ["token", "block"])
def test_rows_of_unequal_prompts_keep_their_laws(rule):
    """A thousand answers each to a prompt of four tokens and to its last two, side by side."""
    target, drafter = pair(rule)
    ids = prompt(4, vocab=VOCAB).expand(2, -1)
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])
    laws = exact_law(target, ids[:1]), exact_law(target, ids[:1, 2:])
    assert (laws[0] - laws[1]).abs().max() > 0.01
    set_seed(13)
    options = {**SAMPLED, "attention_mask": mask, "num_return_sequences": 1000}
    out = target.generate(ids, assistant_model=drafter, **options)
    for rows, law in zip(out.split(1000), laws, strict=True):
        check_chi_square(texts_of(rows, 4).float(), law)


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
