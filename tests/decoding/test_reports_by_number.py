"""Every row of groups A to G of the bug reports: where its test is, or why it has none. Paths start at `tests/`.

A1  decoding/test_lossless.py::test_an_end_id_at_every_offset_of_a_block
A2  decoding/test_reports_by_number.py::test_a2_a6_end_ids_of_every_form_and_kind_of_drafter
A3  decoding/test_lossless.py::test_budget_is_met_to_the_token_and_the_last_token_needs_no_draft
A4  decoding/test_reports_by_number.py::test_a4_stop_strings_inside_a_block
A6  decoding/test_reports_by_number.py::test_a2_a6_end_ids_of_every_form_and_kind_of_drafter
A7  decoding/test_lossless.py::test_first_token_is_an_end_id
A8  decoding/test_reports_by_number.py::test_a8_a_list_of_end_ids
A9  decoding/test_lossless.py::test_budget_is_met_to_the_token_and_the_last_token_needs_no_draft
A10 decoding/test_lossless.py::test_processors_of_generate

B1  decoding/test_lossless.py::test_prompt_lengths
B2  decoding/test_lossless.py::test_a_wrong_draft_at_every_offset
B3  decoding/test_fixed_laws.py::test_frequencies_of_drafted_tokens
B5  decoding/test_fixed_laws.py::test_frequencies_of_drafted_tokens
B6  decoding/test_fixed_laws.py::test_sampling_without_any_processor
B7  decoding/test_sampling.py::test_token_after_a_rejection_follows_the_residual
    decoding/test_fixed_laws.py::test_equal_laws_leave_nothing_undefined
B8  decoding/test_fixed_laws.py::test_every_token_of_a_law_is_met
B9  decoding/test_fixed_laws.py::test_one_candidate_is_greedy
B10 decoding/test_fixed_laws.py::test_frequencies_of_drafted_tokens
    evaluation/test_benchmark_cli.py::test_other_ids_are_refused_a_speed_figure
B11 decoding/test_fixed_laws.py::test_seeds
    decoding/test_lossless.py::test_greedy_decoding_leaves_the_random_state_alone
B12 decoding/test_lossless.py::test_half_precision_differs_at_near_ties_only
B13 decoding/test_fixed_laws.py::test_every_draft_length_gives_the_same_text
B14 decoding/test_fixed_laws.py::test_frequencies_of_drafted_tokens

C1  decoding/test_lossless.py::test_processors_of_generate
C3  decoding/test_reports_by_number.py::test_c3_least_lengths_and_the_users_own_processors
C4  decoding/test_reports_by_number.py::test_c4_the_drafter_applies_penalties_too
C5  decoding/test_reports_by_number.py::test_c5_warpers_leave_their_tokens_only
    decoding/test_lossless.py::test_processors_of_generate
C6  decoding/test_reports_by_number.py::test_c6_processors_see_one_device

D1  decoding/test_reports_by_number.py::test_d1_a_window_that_the_text_outgrows
D2  decoding/test_reports_by_number.py::test_d2_columns_of_the_returned_cache
D3  decoding/test_hybrids.py::test_recurrent_states_are_refused
D4  decoding/test_hybrids.py::test_what_can_be_rolled_back_is
D5  decoding/test_reports_by_number.py::test_d5_a_target_that_asks_for_a_static_cache
    decoding/test_calls.py::test_cache_implementations
D6  decoding/test_outputs.py::test_going_on_from_the_returned_cache
D8  decoding/test_outputs.py::test_going_on_from_the_returned_cache
D9  decoding/test_reports_by_number.py::test_d9_no_cache
D10 decoding/test_reports_by_number.py::test_d10_context_rows_are_those_of_the_accepted_tokens
D11 decoding/test_outputs.py::test_a_prompt_in_pieces
D12 decoding/test_reports_by_number.py::test_d12_no_draft_without_the_targets_states
D13 decoding/test_calls.py::test_a_text_longer_than_the_drafter_was_made_for_is_told_once
D14 decoding/test_reports_by_number.py::test_d14_windows_of_the_drafter_are_obeyed
D15 decoding/test_lossless.py::test_left_padding_changes_neither_text_nor_acceptance
D16 decoding/test_lossless.py::test_explicit_position_ids
    decoding/test_batches.py::test_token_types_go_on_with_the_last_one

E1  checkpoints/test_reports.py::test_e1_a_tap_is_the_output_of_its_layer
E2  checkpoints/test_reports.py::test_e2_training_and_generation_read_the_same_taps
E4  checkpoints/test_reports.py::test_e4_taps_keep_their_order
    checkpoints/test_layouts.py::test_a_wrong_variant_is_refused_with_its_cause
E5  test_errors.py::test_a_drafter_of_another_target
E6  checkpoints/test_reports.py::test_e6_the_slot_of_the_anchor
    checkpoints/test_layouts.py::test_sample_from_anchor
E7  decoding/test_acceptance.py::test_cut_cycles_do_not_count_for_the_ceiling_but_for_the_length
    checkpoints/test_export.py::test_speculators
E8  checkpoints/test_layouts.py::test_a_layout_is_recognised_and_its_drafter_is_lossless
    checkpoints/test_layouts.py::test_a_wrong_variant_is_refused_with_its_cause
E9  checkpoints/test_layouts.py::test_forms_of_the_rotary_base
    checkpoints/test_reports.py::test_e9_e12_the_rotary_base_and_three_taps_travel
E10 checkpoints/test_reports.py::test_e10_a_config_without_a_vocabulary
E11 checkpoints/test_reports.py::test_e11_the_mask_token_is_explicit_and_travels
    training/test_bug_reports.py::test_e11_a_run_does_not_go_on_under_other_conventions
E12 checkpoints/test_reports.py::test_e9_e12_the_rotary_base_and_three_taps_travel
    checkpoints/test_shapes.py::test_expected_shapes
E13 checkpoints/test_reports.py::test_e13_the_direction_of_the_block_travels
E14 checkpoints/test_reports.py::test_e14_a_drafter_is_no_language_model
    test_errors.py::test_a_drafter_alone_is_no_language_model
E15 checkpoints/test_reports.py::test_e15_padded_vocabularies
E16 checkpoints/test_reports.py::test_e16_the_head_is_the_targets_own
    checkpoints/test_layouts.py::test_what_cannot_be_run_faithfully_is_refused_by_name (a head with a map of ids)
    checkpoints/test_layouts.py::test_a_map_of_equal_vocabularies
E17 test_errors.py::test_missing_weights_are_listed
    test_errors.py::test_unexpected_weights_are_listed

F1  decoding/test_devices_and_dtypes.py::test_f1_a_target_whose_layers_lie_on_two_devices
    decoding/test_offloaded_targets.py::test_texts_and_drafts_are_those_of_the_whole_target
    decoding/test_devices_and_dtypes.py::test_f1_no_tensor_is_moved_to_a_device_named_in_the_source
F2  decoding/test_devices_and_dtypes.py::test_f2_target_and_drafter_on_different_devices
F3  decoding/test_lossless.py::test_target_and_drafter_of_different_dtype
F4  decoding/test_lossless.py::test_embedding_and_head_are_called_as_modules
F5  decoding/test_devices_and_dtypes.py::test_f5_a_target_with_packed_weights
    decoding/test_devices_and_dtypes.py::test_f5_weights_packed_by_the_libraries_that_transformers_calls
F6  decoding/test_devices_and_dtypes.py::test_f6_scaled_embeddings_are_the_same_in_training_and_in_generate
F7  decoding/test_lossless.py::test_peft_wrapped_target_and_drafter
F8  decoding/test_devices_and_dtypes.py::test_f8_a_sibling_of_the_target_is_used_with_at_most_one_warning

G2  decoding/test_reports_by_number.py::test_g2_scores_and_logits_of_every_new_token
G3  decoding/test_batches.py::test_rows_equal_the_rows_alone
G4  decoding/test_batches.py::test_returned_sequences_are_separate_draws (served, so there is nothing to refuse)
    test_errors.py::test_options_that_take_no_drafter (beams, and greedy copies)
G5  decoding/test_own_loop.py::test_streamed_ids_are_those_of_plain_decoding
    decoding/test_reports_by_number.py::test_g5_streamed_text
G6  decoding/test_reports_by_number.py::test_g6_two_threads_with_one_pair
G7  decoding/test_reports_by_number.py::test_g7_options_of_one_call
G8  decoding/test_reports_by_number.py::test_g8_forwards_of_the_target
G9  decoding/test_multimodal.py::test_g9_ids_behind_an_image_are_those_of_plain_generate
G10 test_cli.py::test_a_text_generation_pipeline
"""

import ast
import copy
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
import torch
from transformers import TextIteratorStreamer
from transformers.cache_utils import StaticLayer
from transformers.generation import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    LogitsProcessorList,
    MinPLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from tests.conftest import (
    SHARED,
    OracleDrafter,
    build_cycle_target,
    build_drafter,
    build_target,
    letter_tokenizer,
    plain,
    prompt,
)
from tests.decoding.test_lossless import oracle
from tests.decoding.test_outputs import cache_of
from tests.evaluation.test_evaluator import WordIds, prompts
from xpress_hf import XPressDrafter
from xpress_hf.evaluation.evaluator import EvaluationSettings, Evaluator
from xpress_hf.modeling.drafter import BlockDraft

TESTS = Path(__file__).parents[1]


def test_every_row_is_listed():
    facts = SHARED / "facts" / "bug_reports.md"
    if not facts.is_file():
        pytest.skip("the list of bug reports is not on this machine")
    rows = re.findall(r"^\| ([A-G]\d+) \|", facts.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert len(rows) > 60
    assert re.findall(r"^([A-G]\d+) ", __doc__, flags=re.MULTILINE) == rows


def test_every_test_that_is_named_exists():
    named = re.findall(r"(\S+\.py)::(\w+)", __doc__)
    assert len(named) > 80
    for path, name in named:
        tree = ast.parse((TESTS / path).read_text(encoding="utf-8"))
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, (path, name)


@pytest.mark.parametrize("refiner", [None, {"rank": 8, "mlp_width": 16, "sweeps": 2}], ids=["DFlash", "xPress"])
@pytest.mark.parametrize("form", ["id", "list", None])
def test_a2_a6_end_ids_of_every_form_and_kind_of_drafter(target, refiner, form):
    assert target.generation_config.eos_token_id is None
    assert target.generation_config.pad_token_id is None
    ids = prompt()
    drafter = oracle(target, ids, refiner=refiner)
    new = drafter.continuation[ids.shape[1] : ids.shape[1] + 12]
    for token in dict.fromkeys(new) if form else [None]:
        options = {"max_new_tokens": 30, "do_sample": False}
        if form:
            options |= {"eos_token_id": token if form == "id" else [200, token], "pad_token_id": 0}
        out = target.generate(ids, assistant_model=drafter, **options)
        assert torch.equal(out, target.generate(ids, **options))
        assert out.shape[1] == ids.shape[1] + (new.index(token) + 1 if form else 30)


@pytest.mark.parametrize("width", [1, 2])
def test_a4_stop_strings_inside_a_block(target, width):
    """Plain generate looks for the string behind every token."""
    ids, tokenizer = prompt(), letter_tokenizer()
    drafter = oracle(target, ids)
    new = drafter.continuation[ids.shape[1] :]
    for offset in range(12):
        text = tokenizer.decode(new[offset : offset + width])
        options = {"stop_strings": text, "tokenizer": tokenizer, "max_new_tokens": 30, "do_sample": False}
        out = target.generate(ids, assistant_model=drafter, **options)
        assert torch.equal(out, target.generate(ids, **options)), text
        assert ids.shape[1] < out.shape[1] <= ids.shape[1] + offset + width
        assert tokenizer.decode(out[0]).endswith(text)


def test_a8_a_list_of_end_ids():
    """Of [9, 6] the 6 comes first: 4, 5, 6; the evaluator counts three tokens as well."""
    target = build_cycle_target()
    target.generation_config.eos_token_id, target.generation_config.pad_token_id = [9, 6], 0
    drafter = build_drafter(kind=OracleDrafter, vocab_size=16, mask_token_id=15)
    drafter.continuation = [index % 16 for index in range(1, 60)]
    out = target.generate(torch.tensor([[1, 2, 3]]), assistant_model=drafter, max_new_tokens=20, do_sample=False)
    assert out.tolist() == [[1, 2, 3, 4, 5, 6]]
    (record,) = Evaluator(target, WordIds(), drafter, EvaluationSettings(20)).run(prompts("1 2 3"))
    assert record.new_tokens == 3


def test_c3_least_lengths_and_the_users_own_processors(target):
    ids = prompt()
    end = int(plain(target, ids, max_new_tokens=2)[0, -1])
    mine = LogitsProcessorList([TopKLogitsWarper(20), TopPLogitsWarper(0.99)])
    objects = list(mine)
    for least in ({"min_length": ids.shape[1] + 10}, {"min_new_tokens": 10}):
        options = {**least, "eos_token_id": end, "pad_token_id": 0, "max_new_tokens": 30, "do_sample": False}
        options["logits_processor"] = mine
        expected = target.generate(ids, **options)
        drafter = build_drafter(kind=OracleDrafter)
        drafter.continuation = expected[0].tolist()
        assert torch.equal(target.generate(ids, assistant_model=drafter, **options), expected)
        assert expected.shape[1] >= ids.shape[1] + 10
        assert [one is other for one, other in zip(mine, objects, strict=True)] == [True, True]


class KnowsTheTarget(XPressDrafter):
    """Drafts by the target's own table of next tokens, left to right; `careful`: with the processors of the call."""

    table: torch.Tensor
    careful = True

    def draft_block(self, target, known_ids, context_hidden_states, cache, choose=None, **kwargs):
        super().draft_block(target, known_ids, context_hidden_states, cache, **kwargs)
        depth, anchor = self.config.num_draft_tokens, known_ids[:, -1:]
        ids = choose(self.table[anchor].expand(-1, depth, -1), None)
        for _ in range(depth):
            logits = self.table[torch.cat([anchor, ids[:, :-1]], dim=1)]
            ids = choose(logits, ids) if self.careful else logits.argmax(dim=-1)
        return BlockDraft(ids, logits)


def test_c4_the_drafter_applies_penalties_too():
    """A cycle of five tokens with a second choice that a penalty makes the first."""
    target = build_cycle_target(period=5)
    with torch.no_grad():
        for token in range(16):
            target.lm_head.weight[(token + 5) % 16, token] = 0.9
        table = target(torch.arange(16)[:, None]).logits[:, 0]
    ids, lengths = torch.tensor([[0, 1, 2]]), []
    options = {"max_new_tokens": 40, "repetition_penalty": 1.2, "do_sample": False}
    expected = target.generate(ids, **options)
    assert not torch.equal(expected, plain(target, ids, max_new_tokens=40))
    for careful in (True, False):
        drafter = build_drafter(kind=KnowsTheTarget, vocab_size=16, mask_token_id=15, refiner=None)
        drafter.table, drafter.careful = table, careful
        assert torch.equal(target.generate(ids, assistant_model=drafter, **options), expected)
        lengths.append(drafter.last_acceptance.acceptance_length)
    assert lengths[0] > 7
    assert lengths[0] >= lengths[1] - 0.05


@pytest.mark.parametrize(
    ("options", "warper"),
    [
        ({"top_k": 3}, TopKLogitsWarper(3)),
        ({"top_k": 0, "top_p": 0.6}, TopPLogitsWarper(0.6)),
        ({"top_k": 0, "min_p": 0.2}, MinPLogitsWarper(0.2)),
        ({"top_k": 0, "typical_p": 0.5}, TypicalLogitsWarper(0.5)),
        ({"top_k": 0, "epsilon_cutoff": 0.05}, EpsilonLogitsWarper(0.05)),
        ({"top_k": 0, "eta_cutoff": 0.05}, EtaLogitsWarper(0.05)),
    ],
    ids=["top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"],
)
@pytest.mark.parametrize("rule", ["token", "block"])
@torch.no_grad()
def test_c5_warpers_leave_their_tokens_only(options, warper, rule):
    target, ids = build_target(factor=4.0), prompt()
    drafter = build_drafter(factor=1.0)
    drafter.speculation.verification = rule
    torch.manual_seed(0)
    options = {**options, "max_new_tokens": 40, "num_return_sequences": 16}
    out = target.generate(ids, assistant_model=drafter, do_sample=True, **options)
    assert sum(map(sum, (record.accepted for record in drafter.last_row_acceptance))) > 0
    logits = target(out).logits[:, ids.shape[1] - 1 : -1].flatten(0, 1)
    left = torch.isfinite(warper(out[:1].expand(len(logits), -1), logits.clone()))
    assert not left.all()
    assert left.gather(1, out[:, ids.shape[1] :].reshape(-1, 1)).all()


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("cpu", "cpu"),
        pytest.param("cuda", "cpu", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")),
    ],
)
def test_c6_processors_see_one_device(ours, theirs):
    target, drafter, ids = build_target().to(ours), build_drafter().to(theirs), prompt().to(ours)
    seen = []
    options = {"min_new_tokens": 10, "eos_token_id": [7, 9], "pad_token_id": 0, "max_new_tokens": 24}
    options["logits_processor"] = [lambda ids, scores: seen.append((ids.device.type, scores.device.type)) or scores]
    assert torch.equal(plain(target, ids, assistant_model=drafter, **options), plain(target, ids, **options))
    assert set(seen) == {(ours, ours)}


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("length", [4, 8, 20])
def test_d1_a_window_that_the_text_outgrows(attention, length):
    target, ids = build_target("mistral-window", attn_implementation=attention), prompt(length)
    assert target.config.sliding_window == 8
    for offset in range(5):
        drafter = oracle(target, ids, every=5, offset=offset)
        out = target.generate(ids, assistant_model=drafter, max_new_tokens=40, do_sample=False)
        assert torch.equal(out, plain(target, ids, max_new_tokens=40)), offset


def test_d2_columns_of_the_returned_cache():
    """A sequence of 16: 15 columns in full layers, at most 8 in windowed ones."""
    target, ids = build_target("gemma3"), prompt()
    options = {"max_new_tokens": 7, "do_sample": False, "return_dict_in_generate": True}
    cache = cache_of(target.generate(ids, assistant_model=oracle(target, ids, every=5), **options))
    kinds = target.config.layer_types
    assert set(kinds) == {"sliding_attention", "full_attention"}
    for layer, kind in zip(cache.layers, kinds, strict=True):
        columns = layer.keys.shape[2]
        assert columns == 15 if kind == "full_attention" else 0 < columns <= 8
    assert cache.get_seq_length() == 15


@pytest.mark.skipif(not StaticLayer.is_croppable, reason="static caches cannot be cropped in this transformers")
def test_d5_a_target_that_asks_for_a_static_cache(target):
    ids = prompt()
    expected = plain(target, ids, max_new_tokens=24)
    target.generation_config.cache_implementation = "static"
    out = target.generate(ids, assistant_model=oracle(target, ids, every=5), max_new_tokens=24, do_sample=False)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("place", ["call", "config"])
def test_d9_no_cache(target, drafter, place):
    options = {"use_cache": False} if place == "call" else {}
    if place == "config":
        target.generation_config.use_cache = False
    before = target.config.to_dict()
    with pytest.raises(ValueError, match=r"`use_cache`=False.*cache.*`use_cache=True`"):
        target.generate(prompt(), assistant_model=drafter, max_new_tokens=8, **options)
    assert target.config.to_dict() == before


@torch.no_grad()
def test_d10_context_rows_are_those_of_the_accepted_tokens(target):
    ids, seen = prompt(), []
    drafter = oracle(target, ids, every=5)
    drafter.fusion.register_forward_pre_hook(lambda _, args: seen.append(args[0].clone()))
    out = target.generate(ids, assistant_model=drafter, max_new_tokens=30, do_sample=False)
    states = target(out, output_hidden_states=True).hidden_states
    rows = torch.cat([states[1], states[2]], dim=-1)
    prompt_rows = target(ids, output_hidden_states=True).hidden_states
    torch.testing.assert_close(seen[0], torch.cat([prompt_rows[1], prompt_rows[2]], dim=-1), atol=1e-5, rtol=1e-5)
    place = ids.shape[1]
    assert len(set(drafter.last_acceptance.accepted)) > 1
    for found, accepted in zip(seen[1:], drafter.last_acceptance.accepted, strict=False):
        torch.testing.assert_close(found, rows[:, place : place + accepted + 1], atol=1e-4, rtol=1e-4)
        place += accepted + 1


def test_d12_no_draft_without_the_targets_states(target, drafter):
    block = {"noise_embeds": torch.zeros(1, 8, 32), "position_ids": torch.arange(8)[None]}
    with pytest.raises(ValueError, match="`context_hidden_states`"):
        drafter(**block)
    with pytest.raises(ValueError, match=r"`context_hidden_states` is empty"):
        drafter(**block, context_hidden_states=torch.zeros(1, 0, 64), cache=drafter.new_cache())


@pytest.mark.parametrize("kind", ["sliding_attention", "full_attention"])
@torch.no_grad()
def test_d14_windows_of_the_drafter_are_obeyed(kind):
    """Window 4, twelve context rows: the first seven reach no slot of the block."""
    window = 4 if kind == "sliding_attention" else None
    drafter = build_drafter(num_hidden_layers=1, layer_types=[kind], sliding_window=window, refiner=None)
    generator = torch.Generator().manual_seed(0)
    context = torch.randn(1, 12, 64, generator=generator)
    block = {"noise_embeds": torch.randn(1, 8, 32, generator=generator), "position_ids": torch.arange(20)[None]}
    before = drafter(**block, context_hidden_states=context.clone()).last_hidden_state
    context[:, :7] = torch.randn(1, 7, 64, generator=generator)
    after = drafter(**block, context_hidden_states=context).last_hidden_state
    assert torch.equal(before, after) == (kind == "sliding_attention")


@pytest.mark.parametrize("kind", ["oracle", "random", "end"])
def test_g2_scores_and_logits_of_every_new_token(kind):
    target, ids = build_target(factor=4.0), prompt()
    options = {"max_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True, "pad_token_id": 0}
    options |= {"output_scores": True, "output_logits": True}
    drafter = build_drafter() if kind == "random" else oracle(target, ids)
    if kind == "end":
        options["eos_token_id"] = plain(target, ids, max_new_tokens=5)[0, -1].item()
    expected = target.generate(ids, **options)
    found = target.generate(ids, assistant_model=drafter, **options)
    new = found.sequences.shape[1] - ids.shape[1]
    assert new == (20 if kind != "end" else 5)
    assert len(found.scores) == len(found.logits) == new
    for name in ("scores", "logits"):
        for one, other in zip(found[name], expected[name], strict=True):
            assert (one - other).abs().max() < 1e-4
    scores = [target.compute_transition_scores(one.sequences, one.scores) for one in (found, expected)]
    assert (scores[0] - scores[1]).abs().max() < 1e-4


def test_g5_streamed_text(target):
    ids, tokenizer = prompt(), letter_tokenizer()
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    out = plain(target, ids, assistant_model=oracle(target, ids, every=5), streamer=streamer, max_new_tokens=30)
    assert "".join(streamer) == tokenizer.decode(out[0, ids.shape[1] :])


def test_g6_two_threads_with_one_pair(target, drafter):
    texts = [prompt(6, 0), prompt(11, 1)]
    expected = [plain(target, ids, max_new_tokens=30) for ids in texts]
    barrier = Barrier(2)

    def run(ids):
        barrier.wait()
        return plain(target, ids, assistant_model=drafter, max_new_tokens=30)

    with ThreadPoolExecutor(2) as pool:
        for _ in range(5):
            for found, right in zip(pool.map(run, texts), expected, strict=True):
                assert torch.equal(found, right)


def test_g7_options_of_one_call(target, drafter):
    kept = (target.config, target.generation_config, drafter.config, drafter.generation_config)
    before = [copy.deepcopy(one.to_dict()) for one in kept]
    ids = prompt()
    out = plain(target, ids, assistant_model=drafter, num_assistant_tokens=2, max_new_tokens=30)
    assert torch.equal(out, plain(target, ids, max_new_tokens=30))
    assert max(drafter.last_acceptance.verified) == 2
    assert [one.to_dict() for one in kept] == before
    with pytest.raises(ZeroDivisionError):
        plain(target, ids, assistant_model=drafter, logits_processor=[lambda ids, scores: 1 / 0], max_new_tokens=30)
    assert [one.to_dict() for one in kept] == before
    plain(target, ids, assistant_model=drafter, max_new_tokens=30)
    assert max(drafter.last_acceptance.verified) == 7


def test_g8_forwards_of_the_target():
    """56 tokens: one from the prefill, 55 from seven cycles of at most eight."""
    target, calls = build_cycle_target(), []
    drafter = build_drafter(kind=OracleDrafter, vocab_size=16, mask_token_id=15)
    drafter.continuation = [index % 16 for index in range(100)]
    target.register_forward_pre_hook(lambda *args: calls.append(1))
    ids = torch.tensor([[0, 1, 2]])
    out = target.generate(ids, assistant_model=drafter, max_new_tokens=56, do_sample=False)
    assert out[0].tolist() == [index % 16 for index in range(59)]
    assert len(calls) == 8
    assert drafter.last_acceptance.num_cycles == 7
    assert drafter.last_acceptance.acceptance_length == pytest.approx(55 / 7)
