"""Tensors of the reference implementations: same weights and inputs give the same outputs, within their tolerances."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from xpress_hf import XPressConfig, XPressDrafter
from xpress_hf.checkpoints.layouts import SERVING_REFINER_KEYS, rename
from xpress_hf.modeling.length_head import verified_length
from xpress_hf.modeling.refiner import refine_block


def close(found, expected, atol):
    torch.testing.assert_close(found, expected, atol=atol, rtol=1e-4)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("fixture", ["dflash_forward", "dflare_forward"])
@torch.no_grad()
def test_backbone_forward(golden, fixture, attention):
    folder = golden / fixture
    drafter = XPressDrafter.from_pretrained(folder / "checkpoint", attn_implementation=attention)
    given, expected = load_file(folder / "inputs.safetensors"), load_file(folder / "expected.safetensors")
    cache = drafter.new_cache()
    for case in ("nocache", "nocache_batch", "cached.0", "cached.1", "cached.2"):
        cached = case.startswith("cached")
        out = drafter(
            noise_embeds=given[f"{case}.noise_embedding"],
            context_hidden_states=given[f"{case}.target_hidden"],
            position_ids=given[f"{case}.position_ids"],
            cache=cache if cached else None,
        ).last_hidden_state
        close(out, expected[f"{case}.output"], 2e-5)
        if cached:
            cache.crop(-6)
    for layer in range(2):
        close(cache.layers[layer].keys, expected[f"cached.final_keys.{layer}"], 2e-5)
        close(cache.layers[layer].values, expected[f"cached.final_values.{layer}"], 2e-5)


@torch.no_grad()
def test_refiner(golden):
    refiner = XPressDrafter.from_pretrained(golden / "xpress_checkpoint" / "serving").refiner
    given = load_file(golden / "xpress_head" / "inputs.safetensors")
    expected = load_file(golden / "xpress_head" / "expected.safetensors")
    state = refiner.begin(given["h"])
    close(refiner.bias(state, given["prev_ids"]), expected["bias"], 2e-4)
    close(refiner.latent(state, given["prev_ids"]), expected["latent"], 2e-4)
    first = torch.stack([given["am1_ids"], given["anchor_ids"]], dim=1)
    base = given["base_logits"][:, 1:]
    for sweeps in (0, 1, 2, 3, 5):
        ids, _ = refine_block(refiner, given["h"], base, first, sweeps)
        assert torch.equal(ids, expected[f"jacobi.K{sweeps}"])
    for sweeps in (0, 1, 3, 5):
        ids, logits = refine_block(
            refiner, given["h"], base, first, sweeps, lambda x, _: (x / 0.7 + given["gumbel_noise"]).argmax(-1)
        )
        assert torch.equal(ids, expected[f"gumbel.K{sweeps}.tokens"])
        close((logits / 0.7).softmax(-1), expected[f"gumbel.K{sweeps}.q"], 1e-5)


def check_generation(target, drafter, case, expected):
    """Same ids; same acceptance in every cycle but the last, which the reference never cuts."""
    ids = torch.tensor([case["prompt_ids"]])
    out = target.generate(
        ids,
        attention_mask=torch.ones_like(ids),  # some prompts hold the padding id
        assistant_model=drafter,
        max_new_tokens=case["max_new_tokens"],
        do_sample=False,
        eos_token_id=case["stop_token_ids"],
        pad_token_id=0,
    )
    assert out[0].tolist() == expected["output_ids"]
    lengths = [kept + 1 for kept in drafter.last_acceptance.accepted]
    # One token of room is no cycle here.
    assert lengths[:-1] == expected["acceptance_lengths"][: max(len(lengths) - 1, 0)]


def test_generation(golden):
    folder = golden / "dflash_generate"
    target = AutoModelForCausalLM.from_pretrained(folder / "target")
    given = json.loads((folder / "inputs.json").read_text())
    found = json.loads((folder / "expected.json").read_text())
    cases = found["cases"] if "cases" in found else [dict(value, name=name) for name, value in found.items()]
    expected = {case["name"]: case for case in cases}
    for case in given["cases"]:
        if case["block_size"] == 1:
            continue
        drafter = XPressDrafter.from_pretrained(folder / given["drafters"][case["drafter"]])
        drafter.config.block_size = case["block_size"] or drafter.config.block_size
        check_generation(target, drafter, case, expected[case["name"]])


@pytest.mark.parametrize("layout", ["serving", "speculators"])
@torch.no_grad()
def test_xpress_checkpoint(golden, layout):
    """Backbone and refiner of both layouts over three cached cycles, sweeps 0 to 6."""
    drafter = XPressDrafter.from_pretrained(golden / "xpress_checkpoint" / layout)
    target = AutoModelForCausalLM.from_pretrained(golden / "dflash_generate" / "target")
    given = load_file(golden / "dflash_forward" / "inputs.safetensors")
    expected = load_file(golden / "xpress_checkpoint" / "expected.safetensors")
    case = json.loads((golden / "dflash_forward" / "case.json").read_text())
    cache = drafter.new_cache()
    for cycle in range(3):
        hidden = drafter(
            noise_embeds=given[f"cached.{cycle}.noise_embedding"],
            context_hidden_states=given[f"cached.{cycle}.target_hidden"],
            position_ids=given[f"cached.{cycle}.position_ids"],
            cache=cache,
        ).last_hidden_state
        cache.crop(-6)
        close(hidden, expected[f"{cycle}.hidden"], 2e-5)
        base = target.lm_head(hidden)
        close(base, expected[f"{cycle}.base_logits"], 2e-4)
        first = torch.tensor([[case["cached"][cycle]["am1_id"], case["cached"][cycle]["anchor_id"]]])
        for sweeps in (0, 1, 2, 5, 6):
            ids, _ = refine_block(drafter.refiner, hidden, base[:, 1:], first, sweeps)
            assert torch.equal(ids, expected[f"{cycle}.jacobi.K{sweeps}"])


@torch.no_grad()
def test_length_head(golden):
    """Share of the block, and the lengths that follow from it (rates 1.0 and 1.3, at least 1 or 2 slots)."""
    drafter = XPressDrafter.from_pretrained(golden / "adaflash_head" / "checkpoint")
    given = load_file(golden / "adaflash_head" / "inputs.safetensors")
    expected = load_file(golden / "adaflash_head" / "expected.safetensors")
    share = drafter.length_head(given["x"])
    close(share, expected["r"], 1e-5)
    for rate in (1.0, 1.3):
        for shortest in (1, 2):
            lengths = verified_length(share, drafter.config.block_size, rate, shortest)
            assert torch.equal(lengths, expected[f"length.rate{rate}.min{shortest}"].long())
    inputs = load_file(golden / "dflash_forward" / "inputs.safetensors")
    hidden = drafter(
        noise_embeds=inputs["nocache.noise_embedding"],
        context_hidden_states=inputs["nocache.target_hidden"],
        position_ids=inputs["nocache.position_ids"],
    ).last_hidden_state
    close(hidden, expected["drafter_hidden"], 2e-5)
    close(drafter.length_head(hidden), expected["r_from_drafter_hidden"], 1e-5)


def test_generation_with_a_refiner(golden):
    """Reference generations with 0 to 5 passes: same ids, same acceptance in every whole cycle."""
    folder = golden / "xpress_generate"
    given = json.loads((folder / "inputs.json").read_text())
    expected = {case["name"]: case for case in json.loads((folder / "expected.json").read_text())["cases"]}
    target = AutoModelForCausalLM.from_pretrained(folder / given["target"])
    bare = XPressDrafter.from_pretrained(folder / given["drafter"])
    sizes = {"vocab_size": 97, "refiner": {"rank": 8, "mlp_width": 16, "sweeps": 6}}
    drafter = XPressDrafter(XPressConfig(**{**bare.config.to_diff_dict(), **sizes})).eval()
    tensors = load_file(folder / "head.safetensors")
    head = {rename(f"xpress_head.{key}", SERVING_REFINER_KEYS): value for key, value in tensors.items()}
    drafter.load_state_dict({**bare.state_dict(), **head})
    for case in given["cases"]:
        drafter.speculation.sweeps = 0 if case["drafter_only"] else case["passes"]
        check_generation(target, drafter, case, expected[case["name"]])
    assert len(given["cases"]) == 20
