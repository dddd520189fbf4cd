"""The reference implementations' tensors: same weights and inputs, same outputs (tolerances of the fixtures' README)."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from xpress_hf import XPressDrafter
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
        out = target.generate(
            torch.tensor([case["prompt_ids"]]),
            assistant_model=drafter,
            max_new_tokens=case["max_new_tokens"],
            do_sample=False,
            eos_token_id=case["stop_token_ids"],
            pad_token_id=0,
        )
        assert out[0].tolist() == expected[case["name"]]["output_ids"]
        lengths = [kept + 1 for kept in drafter.last_acceptance.accepted]
        # The reference never cuts its last cycle, and one token of room is no cycle here.
        assert lengths[:-1] == expected[case["name"]]["acceptance_lengths"][: max(len(lengths) - 1, 0)]
