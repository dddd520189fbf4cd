"""Batches in our own loop: every row is what it would be alone, whatever the others do."""

import pytest
import torch
from transformers import set_seed
from transformers.generation import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
)

from tests.conftest import FAMILIES, OracleDrafter, build_config, build_drafter, build_target, plain, prompt
from xpress_hf.modeling.drafter import BlockDraft

LENGTHS = (9, 4, 13, 6)
NEW = 40


def ragged(lengths=LENGTHS, pad=0):
    """Left-padded prompts: ids, mask, list of the prompts alone."""
    prompts = [prompt(length, seed) for seed, length in enumerate(lengths)]
    width = max(lengths)
    ids = torch.cat([torch.cat([torch.full((1, width - p.shape[1]), pad), p], dim=1) for p in prompts])
    mask = torch.cat(
        [torch.cat([torch.zeros(1, width - p.shape[1]), torch.ones_like(p)], dim=1) for p in prompts]
    ).long()
    return ids, mask, prompts


class BatchOracle(OracleDrafter):
    """Knows every row's continuation by its last ids; wrong at positions that differ from row to row."""

    texts: list[list[int]]

    def errs(self, place: int, row: int) -> bool:
        return (place + row) % (3 + row) == 0

    def draft_block(self, target, known_ids, context_hidden_states, cache, choose=None, **kwargs):
        super(OracleDrafter, self).draft_block(target, known_ids, context_hidden_states, cache, **kwargs)
        positions = kwargs.get("position_ids")
        anchors = (
            torch.tensor([cache.get_seq_length()]) if positions is None else positions[:, -self.config.block_size]
        )
        depth, size = self.config.num_draft_tokens, target.config.vocab_size
        logits = torch.full((len(known_ids), depth, size), -20.0)
        for row, (pair, anchor) in enumerate(zip(known_ids.tolist(), anchors.tolist(), strict=True)):
            ends = [text[max(anchor - 1, 0) : anchor + 1] for text in self.texts]
            number = next(n for n, end in enumerate(ends) if end == pair[-len(end) :])
            for slot in range(depth):
                place = anchor + 1 + slot
                token = self.texts[number][place] if place < len(self.texts[number]) else 0
                if self.errs(place, number):
                    token = (token + 1) % (size - 1)
                logits[row, slot, token] = 20.0
        return BlockDraft(choose(logits, None), logits)


def oracle(target, prompts, expected=None, **overrides):
    """An oracle for the plain texts of the rows, or for those of a batch that was generated already."""
    torch.manual_seed(1)
    drafter = BatchOracle(build_config(**overrides)).eval()
    if expected is None:
        drafter.texts = [plain(target, ids, max_new_tokens=NEW + 16)[0].tolist() for ids in prompts]
    else:
        width = max(ids.shape[1] for ids in prompts)
        drafter.texts = [row[width - ids.shape[1] :].tolist() for row, ids in zip(expected, prompts, strict=True)]
    return drafter


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_equal_the_rows_alone(family):
    target = build_target(family)
    ids, mask, prompts = ragged()
    alone = [plain(target, one, max_new_tokens=NEW)[0, one.shape[1] :] for one in prompts]
    for drafter in (build_drafter(), oracle(target, prompts)):
        for sweeps in (0, 2):
            drafter.speculation.sweeps = sweeps
            out = target.generate(
                ids, attention_mask=mask, assistant_model=drafter, max_new_tokens=NEW, do_sample=False, pad_token_id=0
            )
            for row, expected in zip(out[:, ids.shape[1] :], alone, strict=True):
                assert torch.equal(row, expected)
    assert 2 < drafter.last_acceptance.acceptance_length < 7, "rows must advance by different steps"


@pytest.mark.parametrize("fusion", ["concat", "layerwise"])
@pytest.mark.parametrize("slot_layout", ["fill", "shift"])
@pytest.mark.parametrize("block_attention", ["bidirectional", "causal"])
def test_drafts_of_a_row_do_not_depend_on_the_batch(target, fusion, slot_layout, block_attention):
    """Every kind of drafter accepts as much in a batch as row by row in the stock loop."""
    overrides = {
        "fusion": fusion,
        "slot_layout": slot_layout,
        "block_attention": block_attention,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 6,
    }
    drafter = build_drafter(factor=1.5, **overrides)
    ids, mask, prompts = ragged()
    accepted = []
    for one in prompts:
        target.generate(one, assistant_model=drafter, max_new_tokens=24, do_sample=False)
        accepted += drafter.last_acceptance.accepted
    target.generate(
        ids, attention_mask=mask, assistant_model=drafter, max_new_tokens=24, do_sample=False, pad_token_id=0
    )
    assert sorted(drafter.last_acceptance.accepted) == sorted(accepted)


@pytest.mark.parametrize("loop", ["own", "stock"])
def test_both_loops_give_the_same_cycles_for_one_sequence(target, loop):
    ids = prompt()
    expected = plain(target, ids, max_new_tokens=NEW)
    drafter = build_drafter()
    drafter.speculation.loop = loop
    out = target.generate(ids, assistant_model=drafter, max_new_tokens=NEW, do_sample=False)
    assert torch.equal(out, expected)
    stock = build_drafter()
    target.generate(ids, assistant_model=stock, max_new_tokens=NEW, do_sample=False)
    assert drafter.last_acceptance.accepted == stock.last_acceptance.accepted


def test_finished_rows_are_padded_and_stop_costing(target):
    ids, mask, prompts = ragged()
    # An end id that some rows meet early and others late or never.
    texts = [plain(target, one, max_new_tokens=NEW)[0, one.shape[1] :].tolist() for one in prompts]
    end = texts[0][5]
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": end, "pad_token_id": 63}
    expected = target.generate(ids, attention_mask=mask, **options)
    drafter = oracle(target, prompts)
    sizes = []
    drafter.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(kwargs["noise_embeds"].shape[0]), with_kwargs=True
    )
    out = target.generate(ids, attention_mask=mask, assistant_model=drafter, **options)
    assert torch.equal(out, expected)
    assert sizes[0] == 4
    assert sizes[-1] < 4
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 2},
        {"min_new_tokens": 10, "eos_token_id": 7},
        {"bad_words_ids": [[3], [5, 7]]},
        {"suppress_tokens": [3, 5]},
        {"eos_token_id": [7, 9, 200]},
    ],
    ids=lambda options: next(iter(options)),
)
def test_processors_see_every_row_with_its_own_text(target, options):
    ids, mask, prompts = ragged()
    options = {**options, "max_new_tokens": 30, "do_sample": False, "pad_token_id": 0}
    expected = target.generate(ids, attention_mask=mask, **options)
    for drafter in (build_drafter(), oracle(target, prompts, expected)):
        assert torch.equal(target.generate(ids, attention_mask=mask, assistant_model=drafter, **options), expected)
    assert drafter.last_acceptance.acceptance_length > 1.5


class OwnPenalty(RepetitionPenaltyLogitsProcessor):
    """A subclass may do anything, so it is shown one text at a time."""


@pytest.mark.parametrize(("kind", "shared"), [(RepetitionPenaltyLogitsProcessor, True), (OwnPenalty, False)])
def test_texts_of_a_length_share_a_call_of_stock_processors(target, monkeypatch, kind, shared):
    calls = []

    def counted(self, input_ids, scores):
        calls.append(len(input_ids))
        return judge(self, input_ids, scores)

    judge = RepetitionPenaltyLogitsProcessor.__call__
    monkeypatch.setattr(RepetitionPenaltyLogitsProcessor, "__call__", counted)
    drafter, options = build_drafter(), {"max_new_tokens": 12, "do_sample": False}
    counts, texts = [], []
    for rows in (1, 4):
        calls.clear()
        ids = prompt().expand(rows, -1)
        options |= {"attention_mask": torch.ones_like(ids), "logits_processor": LogitsProcessorList([kind(1.3)])}
        texts.append(target.generate(ids, assistant_model=drafter, **options))
        counts.append(len(calls))
        assert set(calls) == {rows}
    assert torch.equal(texts[1], texts[0].expand(4, -1))
    assert counts[1] == counts[0] * (1 if shared else 4)


@pytest.mark.parametrize("new", [1, 2, 3, 8, 9])
def test_budgets(target, new):
    ids, mask, prompts = ragged()
    options = {"attention_mask": mask, "max_new_tokens": new, "do_sample": False, "pad_token_id": 0}
    out = target.generate(ids, assistant_model=oracle(target, prompts), **options)
    assert torch.equal(out, target.generate(ids, **options))


def test_scores_and_logits_of_a_batch(target):
    ids, mask, prompts = ragged()
    options = {
        "attention_mask": mask,
        "max_new_tokens": 12,
        "do_sample": False,
        "pad_token_id": 0,
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
        "repetition_penalty": 1.2,
    }
    expected = target.generate(ids, **options)
    out = target.generate(ids, assistant_model=oracle(target, prompts, expected.sequences), **options)
    assert torch.equal(out.sequences, expected.sequences)
    for name in ("scores", "logits"):
        assert len(out[name]) == len(expected[name])
        for found, right in zip(out[name], expected[name], strict=True):
            torch.testing.assert_close(found, right, atol=1e-3, rtol=1e-4)


def test_returned_sequences_are_separate_draws(target):
    set_seed(0)
    target = build_target(factor=2.0)
    out = target.generate(
        prompt(), assistant_model=build_drafter(), do_sample=True, top_k=0, num_return_sequences=4, max_new_tokens=12
    )
    assert out.shape == (4, 21)
    assert len({tuple(row.tolist()) for row in out}) == 4


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_joint_law_of_two_tokens_in_a_batch(temperature):
    """Rows of one prompt are independent draws: tokens 2 and 3, which come out of a cycle, follow the target's law."""
    target = build_target("llama", vocab_size=5, factor=3.0)
    ids = prompt(4, vocab=5)
    drafter = build_drafter(vocab_size=5, mask_token_id=4, block_size=4)
    set_seed(5)
    rows = 3000
    out = target.generate(
        ids,
        attention_mask=torch.ones_like(ids),  # the prompt holds the padding id
        assistant_model=drafter,
        do_sample=True,
        temperature=temperature,
        top_k=0,
        num_return_sequences=rows,
        max_new_tokens=3,
        pad_token_id=0,
    )[:, 4:]
    law = torch.zeros(5, 5, 5)
    with torch.no_grad():
        one = (target(ids).logits[0, -1] / temperature).softmax(-1)
        for a in range(5):
            two = (target(torch.cat([ids, torch.tensor([[a]])], 1)).logits[0, -1] / temperature).softmax(-1)
            for b in range(5):
                three = (target(torch.cat([ids, torch.tensor([[a, b]])], 1)).logits[0, -1] / temperature).softmax(-1)
                law[a, b] = one[a] * two[b] * three
    counts = torch.zeros(5, 5, 5)
    for a, b, c in out.tolist():
        counts[a, b, c] += 1
    chi_square = float((rows * (counts / rows - law).square() / law).sum())
    # 124 degrees of freedom: mean 124, standard deviation 15.7.
    assert chi_square < 124 + 4 * 15.7


@pytest.mark.parametrize("hole", ["inside", "right"])
def test_padding_that_is_not_on_the_left_is_refused(target, hole):
    ids, mask, _ = ragged((9, 9))
    mask[0, 4 if hole == "inside" else -1] = 0
    with pytest.raises(ValueError, match="padding on the left"):
        target.generate(ids, attention_mask=mask, assistant_model=build_drafter(), max_new_tokens=4, pad_token_id=0)


@pytest.mark.parametrize("lengths", [(9,), (9, 6)])
def test_token_types_go_on_with_the_last_one(lengths):
    """Plain generate extends them so; here the first half of a prompt is of another type than the rest."""
    target = build_target("gpt2", type_vocab_size=2)
    ids, mask, _ = ragged(lengths)
    types = (torch.arange(ids.shape[1]) > 4).long().expand_as(ids)
    options = {"attention_mask": mask, "token_type_ids": types, "max_new_tokens": 16, "pad_token_id": 0}
    options["do_sample"] = False
    drafter = build_drafter()
    out = target.generate(ids, assistant_model=drafter, **options)
    assert torch.equal(out, target.generate(ids, **options))


def test_an_argument_per_row_is_refused_by_name(target):
    ids, mask, _ = ragged((9, 9))
    with pytest.raises(ValueError, match="cu_seq_lens_q"):
        target.generate(
            ids,
            attention_mask=mask,
            cu_seq_lens_q=torch.tensor([0, 9]),
            assistant_model=build_drafter(),
            max_new_tokens=4,
            pad_token_id=0,
        )


class RowLimit(StoppingCriteria):
    """Keeps one limit per row of the batch."""

    def __init__(self, limits):
        self.limits = torch.tensor(limits)

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids.shape[1] >= self.limits


def test_a_criterion_with_a_limit_per_row(target):
    ids, mask, _ = ragged((9, 6))
    rules = StoppingCriteriaList([RowLimit([14, 22])])
    options = {"attention_mask": mask, "max_new_tokens": 30, "do_sample": False, "pad_token_id": 0, "eos_token_id": 62}
    expected = target.generate(ids, stopping_criteria=rules, **options)
    out = target.generate(ids, stopping_criteria=rules, assistant_model=build_drafter(), **options)
    assert torch.equal(out, expected)
    with pytest.raises(ValueError, match="stopping_criteria"):
        target.generate(
            ids, stopping_criteria=rules, assistant_model=build_drafter(), **{**options, "eos_token_id": None}
        )
