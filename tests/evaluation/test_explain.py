"""Explain: a drafter that learned its answers by heart is set up wrongly in one way, and the check finds that way."""

import copy

import pytest
import torch

from tests.conftest import build_config, build_target, scale_matrices
from tests.training.chat_fixtures import CHATML, THINKING, build_tokenizer
from tests.training.test_trainer import arguments, text_of
from xpress_hf import XPressDrafter
from xpress_hf.evaluation.explain import SUSPECT, UNKNOWN, Explainer
from xpress_hf.evaluation.prompts import BenchmarkPrompt, encode_prompt
from xpress_hf.modeling.rebuilding import rebuild
from xpress_hf.training.initialization import target_facts
from xpress_hf.training.trainer import DrafterTrainer

PROMPTS = [BenchmarkPrompt(f"p/{number}", "p", [text]) for number, text in enumerate(("one two", "the rain", "three"))]
NEW = 32


REPLAYED = ("taps off by one", "mask id", "sliding layers", "attention in the block", "slot layout")


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    """(target, tokenizer, drafter) of five layers, taps 1 and 2, answers learned by heart."""
    tokenizer = build_tokenizer(CHATML)
    target = build_target("llama", vocab_size=len(tokenizer), num_hidden_layers=5)
    config = build_config(
        vocab_size=len(tokenizer),
        mask_token_id=3,
        block_size=4,
        target_layer_ids=[1, 2],
        num_target_layers=5,
        refiner=None,
        sliding_window=8,
        target=target_facts(target),
    )
    torch.manual_seed(1)
    drafter = XPressDrafter(config)
    texts = []
    for prompt in PROMPTS:
        ids = encode_prompt(tokenizer, prompt.turns[0], target.device)
        texts.append(text_of(target.generate(ids, max_new_tokens=NEW, do_sample=False)[0], ids.shape[1]))
    args = arguments(
        tmp_path_factory.mktemp("run"), max_steps=100, num_anchors=32, recipe="dflash", per_device_train_batch_size=3
    )
    DrafterTrainer(drafter, args, target, train_dataset=texts).train()
    return target, tokenizer, drafter.eval()


def findings_of(learned, *checks: str, **options):
    """Findings; with `checks` only these are replayed."""
    target, tokenizer, drafter = learned
    explainer = Explainer(target, tokenizer, drafter, PROMPTS, NEW, **options)
    variants = explainer._variants
    if checks:
        explainer._variants = lambda answers: (one for one in variants(answers) if one.check in checks)
        changed = list(explainer._prompts_changed())
        explainer._prompts_changed = lambda: (one for one in changed if one[0] in checks)
    return explainer.run()


def suspects(findings) -> set[str]:
    return {finding.check for finding in findings if finding.verdict == SUSPECT}


def test_a_drafter_that_is_set_up_rightly_has_no_suspect(learned):
    findings = findings_of(learned)
    assert suspects(findings) == set()
    checks = {finding.check for finding in findings}
    expected = {*REPLAYED, "embedding scale", "template", "dtype", "quantised target", "target revision", "refiner"}
    assert expected == checks
    by_heart = float(next(one for one in findings if one.check == "mask id").measured.split("against ")[1])
    assert by_heart > 3


@pytest.mark.parametrize(
    ("check", "changes", "right"),
    [
        ("taps off by one", {"target_layer_ids": [0, 1]}, "[1, 2]"),
        ("taps off by one", {"target_layer_ids": [2, 3]}, "[1, 2]"),
        ("mask id", {"mask_token_id": 40}, "mask id 3"),
        ("sliding layers", {"layer_types": ["sliding_attention"] * 2}, "full_attention"),
        ("attention in the block", {"block_attention": "causal"}, "bidirectional"),
        ("slot layout", {"slot_layout": "shift"}, "fill"),
    ],
)
def test_what_is_set_up_wrongly_is_found(learned, check, changes, right):
    wrong = rebuild(learned[2], **changes).eval()
    tokenizer = copy.deepcopy(learned[1])
    tokenizer.add_special_tokens({"mask_token": "<|mask|>"})
    findings = findings_of((learned[0], tokenizer, wrong), *REPLAYED)
    assert check in suspects(findings)
    best = max((one for one in findings if one.acceptance_length is not None), key=lambda one: one.acceptance_length)
    assert best.check == check
    assert right in best.advice


def test_another_target_is_found_by_its_weights(learned):
    target = copy.deepcopy(learned[0])
    scale_matrices(target, 1.1)
    found = [one for one in findings_of((target, *learned[1:]), "none") if one.check == "target revision"]
    assert [one.verdict for one in found] == [UNKNOWN, SUSPECT]
    assert "weights_hash" in found[1].advice


def test_another_dtype_is_found_and_measured(learned):
    target, tokenizer, drafter = learned
    half = copy.deepcopy(target).to(torch.bfloat16), tokenizer, copy.deepcopy(drafter).to(torch.bfloat16)
    found = [one for one in findings_of(half, "dtype") if one.check == "dtype"]
    assert ["drafter in float32" in one.measured for one in found] == [True, False]
    assert found[1].verdict == SUSPECT
    assert "`--dtype float32`" in found[1].advice


def test_the_thinking_switch_is_flipped_where_the_template_has_one(learned):
    target, _, drafter = learned
    thinking = target, build_tokenizer(THINKING), drafter
    found = next(one for one in findings_of(thinking, "thinking switch") if one.check == "thinking switch")
    assert found.measured.startswith("enable_thinking=False")
    off = findings_of(thinking, "thinking switch", chat_template_kwargs={"enable_thinking": False})
    found = next(one for one in off if one.check == "thinking switch")
    assert found.measured.startswith("enable_thinking=True")


def test_a_refiner_that_takes_tokens_away(learned):
    target, tokenizer, drafter = learned
    torch.manual_seed(0)
    spoiled = rebuild(drafter, refiner={"rank": 8, "mlp_width": 16, "sweeps": 2}).eval()
    scale_matrices(spoiled.refiner, 60.0)
    before = spoiled.speculation.sweeps
    found = next(one for one in findings_of((target, tokenizer, spoiled), "none") if one.check == "refiner")
    assert found.verdict == SUSPECT
    assert "--sweeps 0" in found.advice
    assert spoiled.speculation.sweeps == before
