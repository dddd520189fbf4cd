"""Every layout is read from a hand-written key list, and one wrong variant of each is refused with its cause.

Rows of the facts: E4, E6, E8, E9, E12, E13, E16, E17, I7, I8.
"""

import logging

import pytest
import torch

from tests.checkpoints.foreign import (
    ADAFLASH,
    DEEPSPEC,
    DFLARE,
    DFLASH,
    LENGTH_HEAD,
    MUSE,
    NATIVE,
    SERVING,
    SERVING_HEAD,
    SPECULATORS,
    SPECULATORS_HEAD,
    SPECULATORS_XPRESS,
    TARGETS_OWN,
    ZLAB,
    values,
    write,
)
from tests.conftest import build_drafter, build_target, prompt
from xpress_hf import XPressDrafter
from xpress_hf.checkpoints.loading import open_checkpoint

NESTED_BLOCK = {
    **{key: value for key, value in ZLAB.items() if key not in ("block_size", "num_target_layers", "rope_theta")},
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "dflash_config": {**ZLAB["dflash_config"], "block_size": 8, "num_target_layers": 3},
}
WITHOUT_CODE = {key: value for key, value in ZLAB.items() if key != "auto_map"}
JETSPEC = {**ZLAB, "dflash_config": {**ZLAB["dflash_config"], "causal_head": True}}
VARIABLE_PREFIX = {
    **ZLAB,
    "dflash_config": {**ZLAB["dflash_config"], "training_mode": "vp_drafter", "prefix_weight_base": 0.9},
}
XPRESS_KEYS = {**DFLASH, **SERVING_HEAD}

# name -> (config, shapes, layout found, fields of the config)
ROWS = {
    "z-lab, Qwen3 era": (ZLAB, DFLASH, "z-lab DFlash", {"block_size": 8, "slot_layout": "fill"}),
    "z-lab, Qwen3.5 on": (NESTED_BLOCK, DFLASH, "z-lab DFlash", {"block_size": 8, "num_target_layers": 3}),
    "SpecForge": (WITHOUT_CODE, DFLASH, "SpecForge DFlash", {"block_attention": "bidirectional"}),
    "xPress serving": (
        {**SERVING, "xpress_mlp_hidden": 512, "xpress_rank": 256, "xpress_block_size": 16},
        XPRESS_KEYS,
        "xPress serving",
        {"refiner": {"rank": 8, "mlp_width": 16, "sweeps": 6}, "block_size": 8, "vocab_size": 64},
    ),
    "speculators DFlash": (
        SPECULATORS,
        {**DFLASH, **TARGETS_OWN},
        "speculators DFlash",
        {"target_layer_ids": [0, 1], "target": {"name": "maker/target"}, "slot_layout": "fill"},
    ),
    "speculators XPress": (
        {**SPECULATORS_XPRESS, "xpress_mlp_ratio": 4},
        {**DFLASH, **SPECULATORS_HEAD},
        "speculators XPress",
        {"refiner": {"rank": 8, "mlp_width": 16, "sweeps": 5}, "target_layer_ids": [0, 1]},
    ),
    "AdaFlash": (ADAFLASH, {**DFLASH, **LENGTH_HEAD}, "AdaFlash", {"length_head": {"width": 12}}),
    "AdaFlash, short prefix": (
        ADAFLASH,
        {**DFLASH, **{key.replace("thresh_head_two_model", "thresh_head"): v for key, v in LENGTH_HEAD.items()}},
        "AdaFlash",
        {"length_head": {"width": 12}},
    ),
    "AngelSlim DFlare": (
        {**WITHOUT_CODE, "architectures": ["QwenDFlareDraftModel"], "loss_decay_gamma": 7.0},
        DFLARE,
        "AngelSlim DFlare",
        {"fusion": "layerwise"},
    ),
    "DeepSpec": (DEEPSPEC, {**DFLASH, **TARGETS_OWN}, "DeepSpec DFlash", {"slot_layout": "shift", "block_size": 8}),
    "transformers-native": (MUSE, NATIVE, "transformers-native", {"rms_norm_eps": 1e-5, "eos_token_id": 200001}),
    "JetSpec": (JETSPEC, DFLASH, "JetSpec", {"block_attention": "causal"}),
    "variable prefix": (VARIABLE_PREFIX, DFLASH, "variable-prefix DFlash", {"min_visible_prefix": 2}),
    "prefix `model.`": (ZLAB, {f"model.{key}": v for key, v in DFLASH.items()}, "z-lab DFlash", {}),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_layout_is_recognised_and_its_drafter_is_lossless(tmp_path, name):
    config, shapes, layout, fields = ROWS[name]
    folder = write(tmp_path, config, values(shapes))
    checkpoint = open_checkpoint(folder)
    assert checkpoint.layout == layout
    assert checkpoint.reason
    drafter, info = XPressDrafter.from_pretrained(folder, output_loading_info=True)
    assert {key: getattr(drafter.config, key) for key in fields} == fields
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    borrowed = {key.removeprefix("model.") for key in shapes} & set(TARGETS_OWN)
    assert set(checkpoint.ignored) == borrowed
    assert len(checkpoint.tensors) + len(borrowed) == len(shapes) == len(drafter.state_dict()) + len(borrowed)
    target, ids = build_target(), prompt()
    plain = target.generate(ids, max_new_tokens=12, do_sample=False)
    assert torch.equal(target.generate(ids, assistant_model=drafter, max_new_tokens=12, do_sample=False), plain)


def test_every_value_arrives_under_its_name(tmp_path):
    tensors = values({**DFLASH, **SPECULATORS_HEAD})
    state = XPressDrafter.from_pretrained(write(tmp_path, SPECULATORS_XPRESS, tensors)).state_dict()
    by_hand = {
        "fc.weight": "fusion.fc.weight",
        "hidden_norm.weight": "fusion.norm.weight",
        "norm.weight": "backbone.norm.weight",
        "layers.1.self_attn.o_proj.weight": "backbone.layers.1.self_attn.o_proj.weight",
        "refiner_head.mix_l": "refiner.mixer",
        "refiner_head.token_embed.weight": "refiner.token_embed.weight",
        "refiner_head.readout.weight": "refiner.readout.weight",
        "refiner_head.mlp_gate.weight": "refiner.gate_proj.weight",
        "refiner_head.mlp_up.weight": "refiner.up_proj.weight",
        "refiner_head.mlp_down.weight": "refiner.down_proj.weight",
    }
    for theirs, ours in by_hand.items():
        assert torch.equal(state[ours], tensors[theirs]), ours


def without(mapping: dict, *keys: str) -> dict:
    return {key: value for key, value in mapping.items() if key not in keys}


def inner(config: dict, **changes) -> dict:
    return {**config, "dflash_config": {**config["dflash_config"], **changes}}


# name of the row -> (config, shapes, what the message must name)
WRONG = {
    "z-lab: two block sizes (E8)": (inner(ZLAB, block_size=16), DFLASH, ["block_size", "8", "16"]),
    "z-lab: no taps (E4)": (inner(ZLAB, target_layer_ids=None), DFLASH, ["target_layer_ids", "missing"]),
    "z-lab: one tap too few (E12)": (
        inner(ZLAB, target_layer_ids=[0]),
        DFLASH,
        ["['fc.weight: [32, 64], expected [32, 32]']"],
    ),
    "z-lab: two rope bases (E9)": (
        {**ZLAB, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        DFLASH,
        ["rope_theta", "10000.0", "500000.0"],
    ),
    "z-lab: a dtype that nothing is computed in": (
        {**ZLAB, "dtype": "float8_e4m3fn"},
        DFLASH,
        ["`dtype`", "float8_e4m3fn", "bfloat16"],
    ),
    "z-lab: two slot layouts (E6)": (
        inner({**ZLAB, "sample_from_anchor": False}, shift_label=True),
        DFLASH,
        ["sample_from_anchor", "shift_label"],
    ),
    "z-lab: no first sliding layer": (
        {**without(ZLAB, "layer_types"), "use_sliding_window": True, "sliding_window": 16, "max_window_layers": None},
        DFLASH,
        ["max_window_layers", "None"],
    ),
    "z-lab: no rope base (E9)": (without(ZLAB, "rope_theta"), DFLASH, ["rope_theta"]),
    "z-lab: an endless rope base (E9)": ({**ZLAB, "rope_theta": float("inf")}, DFLASH, ["rope_theta", "inf"]),
    "z-lab: a rope factor that is a text": (
        {**ZLAB, "rope_scaling": {"type": "linear", "factor": "2"}},
        DFLASH,
        ["rope_parameters.factor", "'2'"],
    ),
    "z-lab: a rope factor of zero": (
        {**ZLAB, "rope_scaling": {"type": "yarn", "factor": 0}},
        DFLASH,
        ["rope_parameters.factor", "0"],
    ),
    "z-lab: rope factors of another head": (
        {**ZLAB, "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0] * 8}},
        DFLASH,
        ["rope_parameters.long_factor", "4 numbers"],
    ),
    "SpecForge: no projection (E17)": (
        WITHOUT_CODE,
        without(DFLASH, "fc.weight"),
        ["missing_keys: ['fc.weight']"],
    ),
    "SpecForge: a stray tensor (E17)": (WITHOUT_CODE, {**DFLASH, "gate.weight": (2,)}, ["unexpected", "gate.weight"]),
    "serving: folded mixer": ({**SERVING, "xpress_mixer_format": "folded"}, XPRESS_KEYS, ["xpress_mixer_format"]),
    "serving: shift layout": ({**SERVING, "sample_from_anchor": True}, XPRESS_KEYS, ["sample_from_anchor"]),
    "serving: shift layout by its nested field": (
        inner(without(SERVING, "sample_from_anchor"), sample_from_anchor=True),
        XPRESS_KEYS,
        ["sample_from_anchor", "serving layout"],
    ),
    "serving: no mixer": (SERVING, without(XPRESS_KEYS, "xpress_head.mix.L"), ["incomplete", "mix.L"]),
    "serving: research head": (
        SERVING,
        {**XPRESS_KEYS, "xpress_head.res_gate": (1,)},
        ["research variant", "xpress_head.res_gate"],
    ),
    "speculators: no taps": (
        without(SPECULATORS, "aux_hidden_state_layer_ids"),
        DFLASH,
        ["aux_hidden_state_layer_ids", "guessed"],
    ),
    "speculators: no layers": (
        without(SPECULATORS, "transformer_layer_config"),
        DFLASH,
        ["transformer_layer_config", "missing"],
    ),
    "speculators: a verifier that is a text": (
        {**SPECULATORS, "speculators_config": {"verifier": "maker/target"}},
        DFLASH,
        ["verifier", "maker/target", "dict"],
    ),
    "speculators: another algorithm (I8)": (
        {**SPECULATORS, "speculators_model_type": "mtp", "dflash_config": ZLAB["dflash_config"]},
        DFLASH,
        ["No known drafter layout", "mtp"],
    ),
    "speculators: taps the embedding": (
        {**SPECULATORS, "aux_hidden_state_layer_ids": [0, 2]},
        DFLASH,
        ["aux_hidden_state_layer_ids", "tap_offset"],
    ),
    "speculators: reduced vocabulary (E16)": (
        {**SPECULATORS, "draft_vocab_size": 16},
        {**DFLASH, "lm_head.weight": (16, 32), "d2t": (16,)},
        ["reduced vocabulary", "16", "64"],
    ),
    "speculators XPress: other backbone": (
        {**SPECULATORS_XPRESS, "xpress_backbone": "dflash2"},
        {**DFLASH, **SPECULATORS_HEAD},
        ["xpress_backbone", "dflash2"],
    ),
    "AdaFlash: threshold mode": (
        inner(ADAFLASH, thresh_head_direct_len=False),
        {**DFLASH, **LENGTH_HEAD},
        ["thresh_head_direct_len"],
    ),
    "AdaFlash: other heads": (
        ADAFLASH,
        {**DFLASH, **LENGTH_HEAD, "prob_head.0.weight": (2, 2)},
        ["other heads", "prob_head"],
    ),
    "AdaFlash: a layer of the short-named head in another shape": (
        ADAFLASH,
        {
            **DFLASH,
            **{key.replace("_two_model", ""): v for key, v in LENGTH_HEAD.items()},
            "thresh_head.out.bias": (2,),
        },
        ["thresh_head.out.bias: [2], expected [1]"],
    ),
    "AdaFlash: head without tensors": (ADAFLASH, DFLASH, ["length head is incomplete"]),
    "DFlare: no context projections": (
        ZLAB,
        without(DFLARE, "layers.1.self_attn.k_proj_target.weight"),
        ["missing_keys", "layers.1.self_attn.k_proj_target.weight"],
    ),
    "DeepSpec: Markov head": (
        {**DEEPSPEC, "markov_rank": 8},
        {**DFLASH, "markov_head.markov_w1.weight": (64, 8)},
        ["DSpark", "markov_head"],
    ),
    "DeepSpec: Gemma": (
        {**DEEPSPEC, "architectures": ["Gemma4DSparkModel"]},
        {**DFLASH, "layers.0.pre_feedforward_layernorm.weight": (32,)},
        ["Gemma", "decoder layers"],
    ),
    "DeepSpec: taps the embedding": ({**DEEPSPEC, "target_layer_ids": [-1, 1]}, DFLASH, ["target_layer_ids", "-1"]),
    "native: a layer too many": ({**MUSE, "num_hidden_layers": 3}, NATIVE, ["num_hidden_layers", "3", "2"]),
    "native: no projection (I7)": (
        MUSE,
        without(NATIVE, "encoder.fc.weight"),
        ["missing_keys: ['encoder.fc.weight']"],
    ),
    "JetSpec: two block sizes": (inner(JETSPEC, block_size=4), DFLASH, ["block_size", "4", "8"]),
    "JetSpec: a direction that is a text": (inner(JETSPEC, causal_head="yes"), DFLASH, ["causal_head", "'yes'"]),
    "variable prefix: mask outside (E11)": (inner(VARIABLE_PREFIX, mask_token_id=64), DFLASH, ["mask_token_id", "64"]),
    "prefix: the same tensor twice": (ZLAB, {**DFLASH, "model.norm.weight": (32,)}, ["norm.weight", "twice"]),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_variant_is_refused_with_its_cause(tmp_path, name):
    config, shapes, words = WRONG[name]
    write(tmp_path, config, values(shapes))
    with pytest.raises((ValueError, OSError)) as error:
        XPressDrafter.from_pretrained(tmp_path)
    assert all(word in str(error.value) for word in words), str(error.value)


REFUSED = {
    "DSpark": ({**ZLAB, "architectures": ["DSparkDraftModel"]}, {"markov_head.markov_w2.weight": (64, 8)}),
    "DSpark by config": (inner(ZLAB, projector_type="dspark"), {}),
    "DSpark, speculators": ({**SPECULATORS, "speculators_model_type": "dspark"}, {}),
    "DSpark, bare names": (ZLAB, {"markov_w1.weight": (64, 8)}),
    "DFlash2": (ZLAB, {"layers.0.attention_conv.base_kernel": (2, 2, 32)}),
    "DFlash2 by config": ({**ZLAB, "architectures": ["DFlash2DraftModel"]}, {}),
    "Domino": (ZLAB, {"prefix_gru.weight_ih_l0": (96, 32)}),
    "Domino, speculators": ({**SPECULATORS, "speculators_model_type": "domino"}, {}),
    "Domino by config": (inner(ZLAB, projector_type="domino"), {}),
    "EAGLE": ({**ZLAB, "architectures": ["LlamaForCausalLMEagle3"]}, {"midlayer.mlp.up_proj.weight": (64, 32)}),
    "EAGLE, speculators": ({**SPECULATORS, "speculators_model_type": "eagle3"}, {}),
    "EAGLE, parallel": ({**SPECULATORS, "speculators_model_type": "peagle"}, {}),
    "reduced vocabulary": (ZLAB, {"d2t": (16,), "t2d": (64,)}),
    "quantised": ({**ZLAB, "quantization_config": {"quant_method": "fp8"}}, {}),
    "quantised by tensors": (ZLAB, {"layers.0.mlp.up_proj.weight_scale": (64,)}),
    "mask embedding": (ZLAB, {"mask_embedding.weight": (1, 32)}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_run_faithfully_is_refused_by_name(tmp_path, name):
    """I8: never the bare backbone of a drafter that has more."""
    config, extra = REFUSED[name]
    write(tmp_path, config, values({**DFLASH, **extra}))
    with pytest.raises(ValueError, match="cannot be run faithfully without") as error:
        XPressDrafter.from_pretrained(tmp_path)
    assert name.split(",")[0].split(" by ")[0] in str(error.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logit_scale", 0.5),
        ("output_multiplier", 0.196),
        ("partial_rotary_factor", 0.5),
        ("attention_value_scale", 2.0),
        ("use_swa", True),
    ],
)
@pytest.mark.parametrize("place", ["top", "nested"])
def test_fields_that_change_the_drafter_are_not_dropped(tmp_path, field, value, place):
    config = {**ZLAB, field: value} if place == "top" else inner(ZLAB, **{field: value})
    write(tmp_path, config, values(DFLASH))
    with pytest.raises(ValueError, match=f"`{field}` is {value}"):
        XPressDrafter.from_pretrained(tmp_path)


def test_weights_stored_as_integers(tmp_path):
    tensors = values(DFLASH)
    tensors["fc.weight"] = tensors["fc.weight"].to(torch.int8)
    with pytest.raises(ValueError, match=r"quantised.*'fc\.weight'.*I8"):
        XPressDrafter.from_pretrained(write(tmp_path, ZLAB, tensors))


def test_tap_offset(tmp_path):
    """Some recipes stored zero-based layers in a field that counts from the embedding (facts/xpress 7.6)."""
    write(tmp_path, {**SPECULATORS, "aux_hidden_state_layer_ids": [0, 1]}, values(DFLASH))
    assert XPressDrafter.from_pretrained(tmp_path, tap_offset=0).config.target_layer_ids == [0, 1]
    write(tmp_path, ZLAB, values(DFLASH))
    with pytest.raises(ValueError, match="tap_offset"):
        XPressDrafter.from_pretrained(tmp_path, tap_offset=1)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ["causal", "bidirectional"]),
        ({"is_causal": False}, "bidirectional"),
        ({"is_causal": True}, "causal"),
        ({"dflash_config": {**ZLAB["dflash_config"], "causal": False}}, "bidirectional"),
        ({"dflash_config": {**ZLAB["dflash_config"], "causal_head": True}}, "causal"),
    ],
)
def test_direction_of_sliding_layers(tmp_path, changes, expected):
    """E13; order of the fields as serving engines read them."""
    config = {**ZLAB, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16, **changes}
    drafter = XPressDrafter.from_pretrained(write(tmp_path, config, values(DFLASH)))
    assert drafter.config.block_attention == expected
    assert drafter.config.sliding_window == 16


@pytest.mark.parametrize(("non_causal", "expected"), [(False, ["causal", "bidirectional"]), (True, "bidirectional")])
def test_direction_of_sliding_layers_in_speculators(tmp_path, non_causal, expected):
    layer = {**SPECULATORS["transformer_layer_config"], "layer_types": ["sliding_attention", "full_attention"]}
    layer["sliding_window"] = 16
    config = {**SPECULATORS, "transformer_layer_config": layer, "sliding_window_non_causal": non_causal}
    drafter = XPressDrafter.from_pretrained(write(tmp_path, config, values(DFLASH)))
    assert drafter.config.block_attention == expected


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({**SPECULATORS, "sample_from_anchor": True}, 8),
        ({**ZLAB, "sample_from_anchor": True}, 8),
        (inner(ZLAB, sample_from_anchor=True), 8),
        (inner(ZLAB, shift_label=True), 8),
        (inner(ZLAB, sample_from_anchor=False), 7),
        ({**DEEPSPEC, "sample_from_anchor": False}, 7),
    ],
    ids=["speculators", "z-lab", "z-lab nested", "SpecForge", "z-lab, off", "DeepSpec, off"],
)
def test_sample_from_anchor(tmp_path, config, expected):
    """E6: the slot convention is the file's, in every layout."""
    found = XPressDrafter.from_pretrained(write(tmp_path, config, values(DFLASH))).config
    assert found.num_draft_tokens == expected
    assert found.slot_layout == ("shift" if expected == 8 else "fill")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_window_layers": 1}, ["bidirectional", "causal"]),
        ({"max_window_layers": 0}, ["causal", "causal"]),
        ({}, "bidirectional"),  # Qwen3's default of 28 leaves two layers full
    ],
)
def test_sliding_layers_without_a_list(tmp_path, fields, expected):
    """`use_sliding_window` and `max_window_layers` say what `layer_types` would, the direction included."""
    base = without(ZLAB, "layer_types", "max_window_layers")
    config = {**base, "use_sliding_window": True, "sliding_window": 16, **fields}
    found = XPressDrafter.from_pretrained(write(tmp_path, config, values(DFLASH))).config
    assert found.block_attention == expected
    windows = ["sliding_attention" if one == "causal" else "full_attention" for one in found.block_attention_per_layer]
    assert found.layer_types == windows


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"dtype": "torch.bfloat16"}, torch.bfloat16),
        ({"torch_dtype": "float16"}, torch.float16),
        ({}, torch.float32),  # as stored
    ],
)
def test_spellings_of_the_dtype(tmp_path, fields, expected):
    write(tmp_path, {**without(ZLAB, "dtype"), **fields}, values(DFLASH))
    assert XPressDrafter.from_pretrained(tmp_path).dtype == expected


def test_the_dtype_of_a_speculators_file_is_not_that_of_its_target(tmp_path):
    nested = {**SPECULATORS["transformer_layer_config"], "dtype": "bfloat16"}
    write(tmp_path, {**SPECULATORS, "dtype": "float32", "transformer_layer_config": nested}, values(DFLASH))
    assert XPressDrafter.from_pretrained(tmp_path).dtype == torch.float32


@pytest.mark.parametrize("form", ["old", "new", "scaled", "by type", "axes"])
def test_forms_of_the_rotary_base(tmp_path, form):
    """E9."""
    base = without(ZLAB, "rope_theta", "rope_scaling")
    forms = {
        "old": {"rope_theta": 12345, "rope_scaling": None},
        "new": {"rope_parameters": {"rope_type": "default", "rope_theta": 12345}},
        "scaled": {"rope_theta": 12345, "rope_scaling": {"type": "linear", "factor": 2.0}},
        "by type": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 12345}}},
        "axes": {"rope_theta": 12345, "rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}},
    }
    drafter = XPressDrafter.from_pretrained(write(tmp_path, {**base, **forms[form]}, values(DFLASH)))
    factor = 2.0 if form == "scaled" else 1.0
    expected = 12345 ** (-2 / 8) / factor
    assert abs(drafter.backbone.rotary.inv_freq[1].item() - expected) < 1e-7


def test_sizes_a_config_leaves_out_come_from_the_tensors(tmp_path):
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    tensors = values(DFLASH)
    whole = XPressDrafter.from_pretrained(write(tmp_path / "whole", ZLAB, tensors)).config.to_dict()
    short = write(tmp_path / "short", without(ZLAB, *sizes, "head_dim", "vocab_size", "layer_types"), tensors)
    found = XPressDrafter.from_pretrained(short).config.to_dict()
    for key in ("_name_or_path", "vocab_size"):
        whole.pop(key)
        found.pop(key)
    assert found == whole


def test_fields_given_to_from_pretrained_replace_those_of_the_file(tmp_path):
    write(tmp_path, ZLAB, values(DFLASH))
    drafter = XPressDrafter.from_pretrained(tmp_path, block_size=4, mask_token_id=5, eos_token_id=9)
    assert (drafter.config.block_size, drafter.config.mask_token_id, drafter.config.eos_token_id) == (4, 5, 9)
    target, ids = build_target(), prompt()
    target.generate(ids, assistant_model=drafter, max_new_tokens=12, do_sample=False)
    assert max(drafter.last_acceptance.verified) == 3
    with pytest.raises(ValueError, match="slot_layout"):
        XPressDrafter.from_pretrained(tmp_path, slot_layout="left")
    with pytest.raises(TypeError, match="blok_size"):
        XPressDrafter.from_pretrained(tmp_path, blok_size=4)


@pytest.mark.parametrize("layout", ["own", "foreign"])
def test_a_subfolder(tmp_path, layout):
    if layout == "own":
        build_drafter().save_pretrained(tmp_path / "inner")
    else:
        write(tmp_path / "inner", ZLAB, values(DFLASH))
    assert XPressDrafter.from_pretrained(tmp_path, subfolder="inner").config.block_size == 8
    with pytest.raises(OSError, match=r"config\.json"):
        XPressDrafter.from_pretrained(tmp_path)


def test_what_was_left_aside_is_said(tmp_path, caplog):
    write(tmp_path, DEEPSPEC, values({**DFLASH, **TARGETS_OWN}))
    with caplog.at_level(logging.WARNING):
        XPressDrafter.from_pretrained(tmp_path)
    assert "embed_tokens.weight" in caplog.text
    assert "the target's output head is used" in caplog.text


def test_a_map_of_equal_vocabularies(tmp_path):
    """`d2t` holds offsets: zeros are the identity."""
    tensors = values({**DFLASH, **TARGETS_OWN})
    tensors["d2t"] = torch.zeros(64, dtype=torch.int64)
    tensors["t2d"] = torch.ones(64, dtype=torch.bool)
    assert XPressDrafter.from_pretrained(write(tmp_path, SPECULATORS, tensors)).config.vocab_size == 64
    tensors["d2t"][3] = 1
    with pytest.raises(ValueError, match="d2t"):
        XPressDrafter.from_pretrained(write(tmp_path, SPECULATORS, tensors))
