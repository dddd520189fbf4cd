"""Greedy ids equal plain generate, whatever the drafter drafts (float32, exact)."""

import pytest
import torch
from transformers.generation import StoppingCriteria, StoppingCriteriaList

from tests.conftest import FAMILIES, OracleDrafter, build_cycle_target, build_drafter, build_target, plain, prompt

NEW = 64


def oracle(target, ids, new=NEW, every=None, offset=0, **overrides):
    """An oracle for the plain continuation; wrong at every `every`-th drafted position from `offset` on."""
    drafter = build_drafter(kind=OracleDrafter, **overrides)
    drafter.continuation = plain(target, ids, max_new_tokens=new + 16)[0].tolist()
    if every is not None:
        drafter.is_wrong = lambda position: (position - ids.shape[1]) % every == offset
    return drafter


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_with_random_and_oracle_drafters(family):
    target = build_target(family)
    for seed in range(3):
        ids = prompt(5 + 4 * seed, seed)
        expected = plain(target, ids, max_new_tokens=NEW)
        drafters = [build_drafter(seed), oracle(target, ids), oracle(target, ids, every=5, offset=seed)]
        for drafter in drafters:
            for sweeps in (0, 1, 6, 7):
                drafter.speculation.sweeps = sweeps
                out = target.generate(ids, assistant_model=drafter, max_new_tokens=NEW, do_sample=False)
                assert torch.equal(out, expected), (family, seed, type(drafter).__name__, sweeps)
        # The oracles must really have been accepted, else nothing inside a block was tested.
        assert drafters[1].last_acceptance.acceptance_length > 7
        assert 2 < drafters[2].last_acceptance.acceptance_length < 7


@pytest.mark.parametrize("fusion", ["concat", "layerwise"])
@pytest.mark.parametrize("slot_layout", ["fill", "shift"])
@pytest.mark.parametrize("block_attention", ["bidirectional", "causal"])
def test_every_kind_of_drafter(target, fusion, slot_layout, block_attention):
    ids = prompt()
    overrides = {
        "fusion": fusion,
        "slot_layout": slot_layout,
        "block_attention": block_attention,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 4,
    }
    expected = plain(target, ids, max_new_tokens=NEW)
    for drafter in (build_drafter(**overrides), oracle(target, ids, every=5, **overrides)):
        assert torch.equal(
            target.generate(ids, assistant_model=drafter, max_new_tokens=NEW, do_sample=False), expected
        )


@pytest.mark.parametrize("offset", range(5))
@pytest.mark.parametrize("block_size", [2, 4, 8, 16])
def test_a_wrong_draft_at_every_offset(target, offset, block_size):
    ids = prompt()
    drafter = oracle(target, ids, every=5, offset=offset, block_size=block_size)
    out = target.generate(ids, assistant_model=drafter, max_new_tokens=40, do_sample=False)
    assert torch.equal(out, plain(target, ids, max_new_tokens=40))


@pytest.mark.parametrize("length", [1, 2, 3, 7, 8, 9, 40])
def test_prompt_lengths(target, drafter, length):
    ids = prompt(length)
    out = target.generate(ids, assistant_model=drafter, max_new_tokens=40, do_sample=False)
    assert torch.equal(out, plain(target, ids, max_new_tokens=40))


def test_budget_is_met_to_the_token_and_the_last_token_needs_no_draft(target):
    ids = prompt()
    drafter = oracle(target, ids)
    calls = []
    drafter.register_forward_pre_hook(lambda *_: calls.append(1))
    for new in range(1, 21):
        calls.clear()
        out = target.generate(ids, assistant_model=drafter, max_new_tokens=new, do_sample=False)
        assert torch.equal(out, plain(target, ids, max_new_tokens=new))
        # The prefill gives one token, each cycle at most eight; a room of one token is no cycle.
        full, rest = divmod(new - 1, 8)
        assert len(calls) == full + (rest > 1)


@pytest.mark.parametrize("as_list", [False, True])
def test_an_end_id_at_every_offset_of_a_block(target, as_list):
    ids = prompt()
    drafter = oracle(target, ids)
    new = plain(target, ids, max_new_tokens=12)[0, ids.shape[1] :].tolist()
    for token in dict.fromkeys(new):
        eos = [token, 200] if as_list else token
        options = {"max_new_tokens": 30, "eos_token_id": eos, "pad_token_id": 0, "do_sample": False}
        out = target.generate(ids, assistant_model=drafter, **options)
        assert torch.equal(out, target.generate(ids, **options))
        assert out[0, -1] == token


def test_a_prompt_that_ends_in_an_end_id(target, drafter):
    ids = prompt()
    options = {"max_new_tokens": 20, "eos_token_id": int(ids[0, -1]), "pad_token_id": 0, "do_sample": False}
    assert torch.equal(target.generate(ids, assistant_model=drafter, **options), target.generate(ids, **options))


def test_first_token_is_an_end_id():
    target = build_cycle_target()
    drafter = build_drafter(vocab_size=16, mask_token_id=15, refiner=None)
    out = target.generate(
        torch.tensor([[2, 3, 4]]), assistant_model=drafter, eos_token_id=5, pad_token_id=0, max_new_tokens=20
    )
    assert out.tolist() == [[2, 3, 4, 5]]


class StopsAfter(StoppingCriteria):
    """Fires when the text ends in a given pair of ids."""

    def __init__(self, pair):
        self.pair = pair

    def __call__(self, input_ids, scores, **kwargs):
        hit = input_ids.shape[1] >= 2 and input_ids[0, -2:].tolist() == self.pair
        return torch.full((input_ids.shape[0],), hit, dtype=torch.bool)


@pytest.mark.parametrize("offset", range(12))
def test_a_stop_rule_inside_a_block(target, offset):
    ids = prompt()
    drafter = oracle(target, ids)
    text = plain(target, ids, max_new_tokens=14)[0].tolist()
    pair = text[ids.shape[1] + offset : ids.shape[1] + offset + 2]
    options = {"max_new_tokens": 30, "do_sample": False}
    rules = StoppingCriteriaList([StopsAfter(pair)])
    out = target.generate(ids, assistant_model=drafter, stopping_criteria=rules, **options)
    assert torch.equal(out, target.generate(ids, stopping_criteria=rules, **options))
    assert len(rules) == 1


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 2},
        {"min_new_tokens": 10, "eos_token_id": 7, "pad_token_id": 0},
        {"suppress_tokens": [3, 5]},
        {"bad_words_ids": [[3], [5, 7]]},
        {"sequence_bias": [[[3], 4.0]]},
        {"begin_suppress_tokens": [11, 12]},
        {"forced_eos_token_id": 7, "pad_token_id": 0},
        {"renormalize_logits": True},
        {"max_time": 0.0},
        {"prefix_allowed_tokens_fn": lambda batch, ids: list(range(0, 60, 2))},
    ],
    ids=lambda options: next(iter(options)),
)
def test_processors_of_generate(target, options):
    ids = prompt()
    expected = target.generate(ids, max_new_tokens=40, do_sample=False, **options)
    drafter = build_drafter(kind=OracleDrafter)
    drafter.continuation = expected[0].tolist()
    for assistant in (drafter, build_drafter()):
        out = target.generate(ids, assistant_model=assistant, max_new_tokens=40, do_sample=False, **options)
        assert torch.equal(out, expected)


def test_left_padding_changes_neither_text_nor_acceptance(target):
    ids = prompt()
    drafter = build_drafter()
    expected = plain(target, ids, max_new_tokens=40)[0, ids.shape[1] :]
    records = []
    for pad in (0, 9):
        padded = torch.cat([torch.full((1, 3), pad), ids], dim=1)
        mask = torch.cat([torch.zeros(1, 3), torch.ones_like(ids)], dim=1).long()
        out = target.generate(
            padded, attention_mask=mask, assistant_model=drafter, max_new_tokens=40, do_sample=False, pad_token_id=0
        )
        assert torch.equal(out[0, padded.shape[1] :], expected)
        records.append(drafter.last_acceptance.accepted)
    target.generate(ids, assistant_model=drafter, max_new_tokens=40, do_sample=False)
    assert records[0] == records[1] == drafter.last_acceptance.accepted


def test_explicit_position_ids(target):
    ids = prompt()
    positions = torch.arange(5, 5 + ids.shape[1])[None]
    options = {"position_ids": positions, "max_new_tokens": 20, "do_sample": False}
    out = target.generate(ids, assistant_model=build_drafter(), **options)
    assert torch.equal(out, target.generate(ids, **options))


def test_the_stock_loop_refuses_a_cached_prefix_by_name(target, drafter):
    drafter.speculation.loop = "stock"
    first = target.generate(
        prompt(), assistant_model=drafter, max_new_tokens=12, do_sample=False, return_dict_in_generate=True
    )
    with pytest.raises(ValueError, match="past_key_values"):
        target.generate(
            first.sequences, past_key_values=first.past_key_values, assistant_model=drafter, max_new_tokens=8
        )


def assert_near_tie(reference, expected, out):
    """At the first difference the candidates' float32 logits are within 2^-6 of the largest one (rule B12)."""
    assert out.shape == expected.shape
    for place in (out != expected).nonzero().flatten()[:1].tolist():
        with torch.no_grad():
            logits = reference(expected[None, :place]).logits[0, -1]
        assert (logits[expected[place]] - logits[out[place]]).abs() <= 2**-6 * logits.abs().max()


def test_target_and_drafter_of_different_dtype(target):
    """F3"""
    ids = prompt()
    out = target.generate(ids, assistant_model=build_drafter().bfloat16(), max_new_tokens=40, do_sample=False)
    assert torch.equal(out, plain(target, ids, max_new_tokens=40))
    low = build_target().bfloat16()
    out = low.generate(ids, assistant_model=build_drafter(), max_new_tokens=40, do_sample=False)
    assert_near_tie(target, plain(low, ids, max_new_tokens=40)[0], out[0])


def test_half_precision_differs_at_near_ties_only(target):
    low = build_target().bfloat16()
    for seed in range(4):
        ids = prompt(8, seed)
        expected = plain(low, ids, max_new_tokens=NEW)[0]
        out = low.generate(ids, assistant_model=oracle(low, ids), max_new_tokens=NEW, do_sample=False)[0]
        assert_near_tie(target, expected, out)


def test_peft_wrapped_target_and_drafter(target):
    peft = pytest.importorskip("peft")
    ids = prompt()
    base = plain(target, ids, max_new_tokens=30)
    lora = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False, r=4)
    drafter = build_drafter()
    adapted = peft.get_peft_model(build_target(), lora)
    expected = adapted.generate(input_ids=ids, max_new_tokens=30, do_sample=False)
    out = adapted.generate(input_ids=ids, assistant_model=drafter, max_new_tokens=30, do_sample=False)
    assert torch.equal(out, expected)
    assert not torch.equal(expected, base)
    assert not [name for name, _ in drafter.named_parameters() if "lora" in name]
    with adapted.disable_adapter():
        out = adapted.generate(input_ids=ids, assistant_model=drafter, max_new_tokens=30, do_sample=False)
    assert torch.equal(out, base)
    wrapped = peft.get_peft_model(build_drafter(), lora)
    assert torch.equal(target.generate(ids, assistant_model=wrapped, max_new_tokens=30, do_sample=False), base)


class Forward(torch.nn.Module):
    """Hides the `weight` of a module, as quantised layers do."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args):
        return self.module(*args)


def test_embedding_and_head_are_called_as_modules(target, drafter):
    ids = prompt()
    expected = plain(target, ids, max_new_tokens=30)
    target.lm_head = Forward(target.lm_head)
    target.model.embed_tokens = Forward(target.model.embed_tokens)
    assert torch.equal(target.generate(ids, assistant_model=drafter, max_new_tokens=30, do_sample=False), expected)


def test_greedy_decoding_leaves_the_random_state_alone(target, drafter):
    state = torch.get_rng_state()
    target.generate(prompt(), assistant_model=drafter, max_new_tokens=20, do_sample=False)
    assert torch.equal(state, torch.get_rng_state())
