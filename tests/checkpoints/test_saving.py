"""A saved drafter comes back as it was, through every door of transformers."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel

from tests.conftest import build_drafter, build_target, prompt
from xpress_hf import XPressConfig, XPressDrafter


def same(one, two):
    left, right = one.state_dict(), two.state_dict()
    assert left.keys() == right.keys()
    for key in left:
        assert torch.equal(left[key], right[key]), key


@pytest.mark.parametrize(
    "overrides",
    [{}, {"refiner": None}, {"fusion": "layerwise"}, {"slot_layout": "shift", "block_attention": "causal"}],
)
def test_save_and_load(tmp_path, overrides):
    drafter = build_drafter(**overrides)
    drafter.speculation.sweeps = None if overrides.get("refiner", 1) is None else 3
    drafter.save_pretrained(tmp_path)
    loaded = XPressDrafter.from_pretrained(tmp_path)
    same(drafter, loaded)
    assert {**loaded.config.to_dict(), "_name_or_path": ""} == drafter.config.to_dict()
    assert loaded.speculation == drafter.speculation
    target, ids = build_target(), prompt()
    texts = []
    for one in (drafter, loaded):
        texts.append(target.generate(ids, assistant_model=one, max_new_tokens=24, do_sample=False))
    assert torch.equal(*texts)
    assert loaded.last_acceptance.accepted == drafter.last_acceptance.accepted


def test_auto_classes(tmp_path):
    build_drafter().save_pretrained(tmp_path)
    assert isinstance(AutoConfig.from_pretrained(tmp_path), XPressConfig)
    assert isinstance(AutoModel.from_pretrained(tmp_path), XPressDrafter)


def test_neither_embedding_nor_head_is_saved_and_the_mixer_is_raw(tmp_path):
    drafter = build_drafter()
    with torch.no_grad():
        drafter.refiner.mixer.fill_(0.5)
    drafter.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert not [key for key in tensors if "embed_tokens" in key or "lm_head" in key]
    assert torch.equal(tensors["refiner.mixer"], torch.full_like(drafter.refiner.mixer, 0.5))


def test_shards_and_half_precision(tmp_path):
    build_drafter().bfloat16().save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    loaded = XPressDrafter.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    same(build_drafter().bfloat16(), loaded)


def test_a_config_written_by_hand_needs_its_keys_only(tmp_path):
    drafter = build_drafter()
    drafter.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for key in ("layer_types", "min_visible_prefix", "target_hidden_size", "speculation", "target"):
        config.pop(key, None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    same(XPressDrafter.from_pretrained(tmp_path), drafter)


def test_the_generation_config_travels_with_the_drafter(tmp_path):
    drafter = build_drafter()
    drafter.generation_config.num_assistant_tokens = 3
    drafter.save_pretrained(tmp_path)
    loaded = XPressDrafter.from_pretrained(tmp_path)
    assert loaded.generation_config.num_assistant_tokens == 3
    build_target().generate(prompt(), assistant_model=loaded, max_new_tokens=20, do_sample=False)
    assert max(loaded.last_acceptance.verified) == 3
    drafter.generation_config.num_assistant_tokens = None
    drafter.save_pretrained(tmp_path)
    assert XPressDrafter.from_pretrained(tmp_path).generation_config.num_assistant_tokens is None


def test_the_older_name_of_dtype(tmp_path, golden):
    build_drafter().save_pretrained(tmp_path)
    for folder in (tmp_path, golden / "dflash_forward" / "checkpoint"):
        assert XPressDrafter.from_pretrained(folder, torch_dtype=torch.bfloat16).dtype == torch.bfloat16


def test_fields_given_to_from_pretrained_replace_those_of_the_file(tmp_path):
    build_drafter(refiner=None).save_pretrained(tmp_path)
    loaded = XPressDrafter.from_pretrained(tmp_path, block_size=4, eos_token_id=9)
    assert (loaded.config.block_size, loaded.config.eos_token_id) == (4, 9)
    with pytest.raises(TypeError, match="blok_size"):
        XPressDrafter.from_pretrained(tmp_path, blok_size=4)
