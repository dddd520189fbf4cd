"""Reported failures around taps, configs and saving, each as a test; the rows that live beside their subject elsewhere
are E4, E6 to E9, E12, E16, E17, I7 (test_layouts), I6 (test_export), I4, I5 (test_hub)."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.checkpoints.foreign import DFLASH, SPECULATORS, ZLAB, values, write
from tests.conftest import build_config, build_drafter, build_target, plain, prompt
from xpress_hf import XPressDrafter
from xpress_hf.checkpoints.export import export
from xpress_hf.decoding.target import Target, tap_request, taps
from xpress_hf.training.features import target_states


@torch.no_grad()
def read_taps(target, drafter) -> torch.Tensor:
    """[1, S, L * H] as generate() reads them."""
    layers = drafter.config.target_layer_ids
    output = target(prompt(), output_hidden_states=tap_request(layers))
    return taps(output.hidden_states, layers, target.config.num_hidden_layers)


@pytest.mark.parametrize("config", [ZLAB, SPECULATORS], ids=["z-lab", "speculators"])
def test_e1_a_tap_is_the_output_of_its_layer(tmp_path, config):
    drafter = XPressDrafter.from_pretrained(write(tmp_path, config, values(DFLASH)))
    target = build_target()
    before = read_taps(target, drafter)

    # The MLP's output is added to the stream, so the layer's output moves by as much.
    handle = target.model.layers[1].mlp.register_forward_hook(lambda module, inputs, output: output + 100)
    moved = read_taps(target, drafter) - before
    handle.remove()
    torch.testing.assert_close(moved[..., :32], torch.zeros(1, 9, 32))
    torch.testing.assert_close(moved[..., 32:], torch.full((1, 9, 32), 100.0), atol=1e-4, rtol=0)


def test_e2_training_and_generation_read_the_same_taps(tmp_path, monkeypatch):
    drafter = XPressDrafter.from_pretrained(write(tmp_path, SPECULATORS, values(DFLASH)))
    target, seen = build_target(), []
    forward = XPressDrafter.forward

    def spy(self, **kwargs):
        seen.append(kwargs["context_hidden_states"].clone())
        return forward(self, **kwargs)

    monkeypatch.setattr(XPressDrafter, "forward", spy)
    ids = target.generate(prompt(), assistant_model=drafter, max_new_tokens=16, do_sample=False)
    fed = torch.cat(seen, dim=1)
    trained, _ = target_states(target, ids, torch.ones_like(ids), drafter.config.target_layer_ids)
    torch.testing.assert_close(fed, trained[:, : fed.shape[1]].to(fed.dtype), atol=1e-4, rtol=1e-4)
    assert 1 <= drafter.last_acceptance.acceptance_length <= 1.6  # a random drafter is never perfect


def test_e4_taps_keep_their_order(tmp_path):
    build_drafter(target_layer_ids=[5, 1, 3], num_target_layers=8).save_pretrained(tmp_path)
    assert XPressDrafter.from_pretrained(tmp_path).config.target_layer_ids == [5, 1, 3]


@pytest.mark.parametrize(("layout", "drafted"), [("fill", [11, 12, 13]), ("shift", [10, 11, 12, 13])])
def test_e6_the_slot_of_the_anchor(tmp_path, layout, drafted):
    """Slots whose logits always choose 10, 11, 12, 13: in the fill layout the anchor's own slot drafts nothing."""
    build_drafter(slot_layout=layout, block_size=4, refiner=None).save_pretrained(tmp_path)
    drafter = XPressDrafter.from_pretrained(tmp_path)
    slots = torch.eye(64)[[10, 11, 12, 13]][None]
    drafter.backbone.register_forward_hook(lambda *args: slots)
    head = SimpleNamespace(embed=lambda ids: torch.zeros(*ids.shape, 32), logits=lambda states: states)
    known, context = torch.tensor([[1, 2]]), torch.zeros(1, 5, 64)
    assert drafter.draft_block(head, known, context, drafter.new_cache()).ids.tolist() == [drafted]


def test_e9_e12_the_rotary_base_and_three_taps_travel(tmp_path):
    rope = {"rope_type": "default", "rope_theta": 12345.0}
    taps = {"target_layer_ids": [0, 1, 2], "num_target_layers": 4}
    drafter = build_drafter(rope_parameters=rope, refiner=None, **taps)
    drafter.save_pretrained(tmp_path / "own")
    export(drafter, tmp_path / "zlab", "zlab")
    for one in (drafter, *(XPressDrafter.from_pretrained(tmp_path / name) for name in ("own", "zlab"))):
        assert one.config.num_hidden_layers == 2
        assert one.fusion.fc.in_features == 3 * 32
        assert one.backbone.rotary.inv_freq[1].item() == pytest.approx(12345 ** (-2 / 8), abs=1e-7)


def test_e10_a_config_without_a_vocabulary(tmp_path):
    config = {key: value for key, value in ZLAB.items() if key != "vocab_size"}
    drafter = XPressDrafter.from_pretrained(write(tmp_path, config, values(DFLASH)))
    target, ids = build_target(), prompt()
    assert torch.equal(
        target.generate(ids, assistant_model=drafter, max_new_tokens=9), plain(target, ids, max_new_tokens=9)
    )
    drafter.config.mask_token_id = 64
    with pytest.raises(ValueError, match=r"mask_token_id.*64"):
        target.generate(ids, assistant_model=drafter, max_new_tokens=9)


def test_e11_the_mask_token_is_explicit_and_travels(tmp_path):
    with pytest.raises(ValueError, match="mask_token_id"):
        XPressDrafter(build_config(mask_token_id=None))
    with pytest.raises(ValueError, match="mask_token_id"):
        XPressDrafter(build_config(mask_token_id=64))
    build_drafter(mask_token_id=17).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["mask_token_id"] == 17


@pytest.mark.parametrize("causal", [True, False])
@torch.no_grad()
def test_e13_the_direction_of_the_block_travels(tmp_path, causal):
    config = {**ZLAB, "dflash_config": {**ZLAB["dflash_config"], "causal_head": causal}}
    drafter = XPressDrafter.from_pretrained(write(tmp_path / "one", config, values(DFLASH)))
    drafter.save_pretrained(tmp_path / "two")
    for one in (drafter, XPressDrafter.from_pretrained(tmp_path / "two")):
        embeds = torch.randn(1, 8, 32, generator=torch.Generator().manual_seed(0))
        context = torch.randn(1, 5, 64, generator=torch.Generator().manual_seed(1))
        inputs = {"context_hidden_states": context, "position_ids": torch.arange(13)[None]}
        before = one(noise_embeds=embeds, **inputs).last_hidden_state
        embeds[:, 3] += 1
        after = one(noise_embeds=embeds, **inputs).last_hidden_state
        assert torch.equal(before[:, 1], after[:, 1]) == causal
        assert not torch.equal(before[:, 5], after[:, 5])


def test_e14_a_drafter_is_no_language_model(tmp_path):
    build_drafter().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="XPressConfig"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="assistant_model=drafter"):
        XPressDrafter.from_pretrained(tmp_path).generate(prompt())


@pytest.mark.parametrize("rows", [60, 70])
def test_e15_padded_vocabularies(rows):
    """The head is the target's, so the drafter's own count of tokens does not matter without a refiner."""
    target, ids = build_target(), prompt()
    drafter = build_drafter(vocab_size=rows, refiner=None, mask_token_id=59)
    assert torch.equal(
        target.generate(ids, assistant_model=drafter, max_new_tokens=20), plain(target, ids, max_new_tokens=20)
    )


def test_e16_the_head_is_the_targets_own():
    """Without a map of ids nothing is copied."""
    target = build_target()
    assert Target(target).head.weight.data_ptr() == target.lm_head.weight.data_ptr()


@pytest.mark.parametrize("family", ["llama", "llama-tied"])
def test_i2_borrowed_tensors_are_not_written(tmp_path, family):
    target, drafter, ids = build_target(family), build_drafter(), prompt()
    before = target.generate(ids, assistant_model=drafter, max_new_tokens=20, do_sample=False)
    drafter.save_pretrained(tmp_path)
    assert set(load_file(tmp_path / "model.safetensors")) == {name for name, _ in drafter.named_parameters()}
    loaded = XPressDrafter.from_pretrained(tmp_path)
    assert torch.equal(target.generate(ids, assistant_model=loaded, max_new_tokens=20, do_sample=False), before)
    assert loaded.last_acceptance.accepted == drafter.last_acceptance.accepted


CLASH = """
import sys
from transformers import AutoConfig, PreTrainedConfig

class Other(PreTrainedConfig):
    model_type = "xpress"

AutoConfig.register("xpress", Other)
import xpress_hf, xpress_hf.registration
xpress_hf.registration.register()
print(type(xpress_hf.XPressDrafter.from_pretrained(sys.argv[1]).config).__module__)
"""


def test_i3_a_model_type_that_someone_else_took(tmp_path):
    build_drafter().save_pretrained(tmp_path)
    command = [sys.executable, "-c", CLASH, str(tmp_path)]
    outcome = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert outcome.stdout.strip().endswith("xpress_hf.configuration"), outcome.stderr[-2000:]


@pytest.mark.parametrize("layout", ["own", "z-lab"])
def test_i9_the_attention_that_was_asked_for_is_used(tmp_path, layout, monkeypatch):
    if layout == "own":
        build_drafter(refiner=None).save_pretrained(tmp_path)
    else:
        write(tmp_path, ZLAB, values(DFLASH))
    eager = XPressDrafter.from_pretrained(tmp_path, attn_implementation="eager")
    other = XPressDrafter.from_pretrained(tmp_path, attn_implementation="sdpa")
    assert eager.config._attn_implementation == "eager"
    used = []
    interface = ALL_ATTENTION_FUNCTIONS.get_interface
    monkeypatch.setattr(
        ALL_ATTENTION_FUNCTIONS,
        "get_interface",
        lambda name, default: used.append(name) or interface(name, default),
    )
    target = build_target()
    for seed in range(20):
        ids = prompt(seed=seed)
        records = []
        for drafter in (eager, other):
            used.clear()
            target.generate(ids, assistant_model=drafter, max_new_tokens=6, do_sample=False)
            assert drafter.config._attn_implementation in used
            records.append(drafter.last_acceptance.accepted)
        assert records[0] == records[1]
