"""Sampled texts follow the law of plain sampling, whatever the drafter drafts."""

from collections import Counter

import pytest
import torch
from transformers import set_seed
from transformers.generation import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from tests.conftest import VOCAB, OracleDrafter, build_drafter, build_target, prompt
from xpress_hf.decoding.choosers import SlotChooser
from xpress_hf.decoding.verification import token_rejection
from xpress_hf.modeling.drafter import BlockDraft
from xpress_hf.modeling.refiner import refine_block

DRAWS = 40_000


def within_four_sigma(counts: Counter, law: torch.Tensor, draws: int) -> None:
    """Four sigma, since dozens of cells are looked at together."""
    for token, p in enumerate(law.tolist()):
        bound = 4 * (p * (1 - p) / draws) ** 0.5
        assert abs(counts[token] / draws - p) <= bound + 1e-9, (token, counts[token] / draws, p, bound)


def warped(logits: torch.Tensor, warpers: LogitsProcessorList) -> torch.Tensor:
    return warpers(torch.zeros(1, 1, dtype=torch.long), logits[None].clone())[0]


def cycles(p_logits: torch.Tensor, q_logits: torch.Tensor, warpers: LogitsProcessorList, draws: int = DRAWS):
    """First token of `draws` cycles that draft one token from q and verify it, and whether the draft was kept."""
    chooser = SlotChooser(torch.zeros(1, 1, dtype=torch.long), warpers, do_sample=True)
    drafts = chooser(q_logits.expand(draws, 1, -1), None)
    target_laws = warped(p_logits, warpers).softmax(dim=-1).expand(draws, 2, -1)
    draft_laws = chooser.laws.softmax(dim=-1)
    kept, tokens = token_rejection(drafts, draft_laws, target_laws, torch.ones(draws, dtype=torch.long))
    return torch.where(kept == 1, drafts[:, 0], tokens), kept == 1


LAWS = {
    "apart": ([0.6, 0.4, 0.0, 0.0], [0.2, 0.3, 0.5, 0.0]),
    "equal": ([0.5, 0.3, 0.2, 0.0], [0.5, 0.3, 0.2, 0.0]),
    "opposite": ([0.7, 0.3], [0.1, 0.9]),
    "three": ([0.4, 0.35, 0.25], [0.25, 0.25, 0.5]),
}
WARPERS = {
    "temperature 0.5": [TemperatureLogitsWarper(0.5)],
    "temperature 1": [],
    "temperature 2": [TemperatureLogitsWarper(2.0)],
    "top-k 2": [TopKLogitsWarper(2)],
    "top-p 0.7": [TemperatureLogitsWarper(0.7), TopPLogitsWarper(0.7)],
}


@pytest.mark.parametrize("laws", LAWS)
@pytest.mark.parametrize("warpers", WARPERS)
def test_first_token_of_a_cycle_follows_the_target(laws, warpers):
    p, q = (torch.tensor(law).log() for law in LAWS[laws])
    processors = LogitsProcessorList(WARPERS[warpers])
    torch.manual_seed(0)
    counts = Counter(cycles(p, q, processors)[0].tolist())
    within_four_sigma(counts, warped(p, processors).softmax(dim=-1), DRAWS)


def test_tempered_laws_have_the_known_values():
    """p = [.6, .4]: temperature .5 gives .6923, temperature 2 gives .5505."""
    p = torch.tensor([0.6, 0.4]).log()
    for temperature, expected in ((0.5, 0.6923), (2.0, 0.5505)):
        law = warped(p, LogitsProcessorList([TemperatureLogitsWarper(temperature)])).softmax(dim=-1)
        assert law[0] == pytest.approx(expected, abs=1e-4)


def test_token_after_a_rejection_follows_the_residual():
    """p = [.6, .4, 0, 0], q = [.2, .3, .5, 0]: after a rejected draft the law is [.8, .2, 0, 0]."""
    p, q = (torch.tensor(law).log() for law in LAWS["apart"])
    torch.manual_seed(1)
    tokens, kept = cycles(p, q, LogitsProcessorList())
    rejected = Counter(tokens[~kept].tolist())
    assert rejected.total() > 15_000
    within_four_sigma(rejected, torch.tensor([0.8, 0.2, 0.0, 0.0]), rejected.total())


def test_equal_laws_accept_every_draft():
    p, q = (torch.tensor(law).log() for law in LAWS["equal"])
    assert bool(cycles(p, q, LogitsProcessorList(), 200)[1].all())


@torch.no_grad()
@pytest.mark.parametrize("sweeps", [0, 1, 7])
def test_drafts_are_draws_from_the_laws_that_are_reported(sweeps):
    """Slot 3 of the last sweep, given its own prefix, is drawn from the law handed to the verifier: expected and found
    mean probability of a drafted token agree over many blocks."""
    refiner = build_drafter(factor=8.0, block_size=8).refiner
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 8, 32, generator=generator)
    base = torch.randn(1, 7, VOCAB, generator=generator) * 2
    torch.manual_seed(3)
    hits, expected, variance, blocks = 0.0, 0.0, 0.0, 1500
    for _ in range(blocks):
        chooser = SlotChooser(torch.zeros(1, 2, dtype=torch.long), LogitsProcessorList(), True, None)
        ids, _ = refine_block(refiner, hidden, base, torch.tensor([[1, 2]]), sweeps, chooser)
        law = chooser.laws[0, 3].softmax(dim=-1)
        best = float(law.max())
        hits += float(ids[0, 3] == law.argmax())
        expected += best
        variance += best * (1 - best)
    assert abs(hits - expected) <= 3 * variance**0.5


class ConstantDrafter(OracleDrafter):
    """Every slot has one fixed law."""

    law: torch.Tensor

    def draft_block(self, target, known_ids, context_hidden_states, cache, choose=None, **kwargs):
        super(OracleDrafter, self).draft_block(target, known_ids, context_hidden_states, cache, **kwargs)
        logits = self.law.log().expand(len(known_ids), self.config.num_draft_tokens, -1)
        return BlockDraft(choose(logits, None), logits)


def tiny_target():
    """Five tokens; temperature 1 leaves a law that is far from uniform and depends on the context."""
    target = build_target("llama", vocab_size=5, factor=3.0)
    target.generation_config.eos_token_id = None
    return target


def joint_law(target, ids, top_k=None, temperature=1.0):
    """Exact joint law of the next two tokens: [V, V]."""
    warpers = LogitsProcessorList(
        [TemperatureLogitsWarper(temperature)] + ([TopKLogitsWarper(top_k)] if top_k else [])
    )
    vocab = target.config.vocab_size
    law = torch.zeros(vocab, vocab)
    with torch.no_grad():
        first = warped(target(ids).logits[0, -1], warpers).softmax(dim=-1)
        for token in range(vocab):
            extended = torch.cat([ids, torch.tensor([[token]])], dim=1)
            law[token] = first[token] * warped(target(extended).logits[0, -1], warpers).softmax(dim=-1)
    return law


@pytest.mark.parametrize(
    ("loop", "rows", "calls", "temperature", "top_k"),
    [
        ("own", 3000, 1, 1.0, None),
        ("own", 3000, 1, 2.0, None),
        ("own", 3000, 1, 0.5, 3),
        pytest.param("stock", 1, 1200, 1.0, None, marks=pytest.mark.slow),
        pytest.param("stock", 1, 1200, 2.0, None, marks=pytest.mark.slow),
        pytest.param("stock", 1, 1200, 0.5, 3, marks=pytest.mark.slow),
    ],
)
def test_joint_law_of_two_tokens_through_generate(loop, rows, calls, temperature, top_k):
    """The prefill gives the first token, so tokens 2 and 3 come out of a cycle: their joint law is that of the
    target."""
    target = tiny_target()
    ids = prompt(4, vocab=5)
    drafter = build_drafter(kind=ConstantDrafter, vocab_size=5, mask_token_id=4, block_size=4)
    drafter.law = torch.tensor([0.05, 0.15, 0.3, 0.3, 0.2])
    drafter.speculation.loop = loop
    options = {"do_sample": True, "temperature": temperature, "top_k": top_k or 0, "top_p": 1.0}
    options.update(attention_mask=torch.ones_like(ids), num_return_sequences=rows, max_new_tokens=3, pad_token_id=0)
    draws, counts, firsts = rows * calls, Counter(), Counter()
    set_seed(11)
    for _ in range(calls):
        for tokens in target.generate(ids, assistant_model=drafter, **options)[:, ids.shape[1] :].tolist():
            firsts[tokens[0]] += 1
            counts[tuple(tokens)] += 1
    assert drafter.last_acceptance.num_cycles == rows
    start = joint_law(target, ids, top_k, temperature).sum(dim=1)
    within_four_sigma(firsts, start, draws)
    for first in range(5):
        law = start[first] * joint_law(target, torch.cat([ids, torch.tensor([[first]])], 1), top_k, temperature)
        for (second, third), p in zip(
            [(a, b) for a in range(5) for b in range(5)], law.flatten().tolist(), strict=True
        ):
            # 125 cells are looked at together: four sigma, and a floor for cells that are nearly empty.
            bound = 4 * (p * (1 - p) / draws) ** 0.5 + 2 / draws
            assert abs(counts[(first, second, third)] / draws - p) <= bound


def test_same_seed_same_ids_and_other_seeds_other_ids():
    target, ids = build_target(factor=2.0), prompt()
    drafter = build_drafter()
    texts = []
    for seed in (7, 7, *range(5)):
        set_seed(seed)
        out = target.generate(ids, assistant_model=drafter, max_new_tokens=24, do_sample=True, top_k=0)
        texts.append(tuple(out[0].tolist()))
    assert texts[0] == texts[1]
    assert len(set(texts)) > 2


@pytest.mark.parametrize(
    ("loop", "rows", "calls"), [("own", 3000, 1), pytest.param("stock", 1, 400, marks=pytest.mark.slow)]
)
def test_an_end_id_can_still_be_drawn(loop, rows, calls):
    """Whether or not a draft may hold end ids, texts end as often as without a drafter."""
    target, ids = tiny_target(), prompt(4, vocab=5)
    drafter = build_drafter(kind=ConstantDrafter, vocab_size=5, mask_token_id=4, block_size=4)
    drafter.law = torch.tensor([0.05, 0.15, 0.3, 0.3, 0.2])
    drafter.speculation.loop = loop
    options = {"do_sample": True, "top_k": 0, "eos_token_id": 2, "pad_token_id": 0, "max_new_tokens": 4}
    options.update(attention_mask=torch.ones_like(ids), num_return_sequences=rows)
    set_seed(3)
    lengths = [Counter(), Counter()]
    draws = rows * calls
    for counter, assistant in zip(lengths, (None, drafter), strict=True):
        for _ in range(calls):
            for tokens in target.generate(ids, assistant_model=assistant, **options)[:, ids.shape[1] :].tolist():
                length = tokens.index(2) + 1 if 2 in tokens else len(tokens)
                counter[length] += 1
                assert not any(tokens[length:])
    for length in range(1, 5):
        p = (lengths[0][length] + lengths[1][length]) / (2 * draws)
        bound = 4 * (2 * p * (1 - p) / draws) ** 0.5
        assert abs(lengths[0][length] - lengths[1][length]) / draws <= bound + 1e-9
