"""Layouts out: names and configs against lists written by hand, values bit for bit, and what is lost said.

Rows of the facts: E7, E12, I6, I8. A round trip alone proves nothing, since a rule and its inverse agree whatever they
write: every name below comes from the facts, not from the code.
"""

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from typer.testing import CliRunner

from tests.checkpoints.foreign import (
    DFLARE,
    DFLASH,
    LENGTH_HEAD,
    SERVING,
    SERVING_HEAD,
    SPECULATORS_HEAD,
    TARGETS_OWN,
    values,
    write,
)
from tests.conftest import build_drafter
from xpress_hf import XPressDrafter, cli
from xpress_hf.checkpoints.export import LAYOUTS_OUT, export
from xpress_hf.checkpoints.loading import open_checkpoint

QWEN3_FIELDS = {
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "max_position_embeddings": 40960,
    "initializer_range": 0.02,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "layer_types": ["full_attention", "full_attention"],
    "sliding_window": None,
    "use_sliding_window": False,
    "max_window_layers": 2,
    "tie_word_embeddings": False,
}
ZLAB_FIELDS = {
    **QWEN3_FIELDS,
    "architectures": ["DFlashDraftModel"],
    "block_size": 8,
    "num_target_layers": 3,
    "dflash_config": {"mask_token_id": 63, "target_layer_ids": [0, 1]},
    "dtype": "float32",
}
SERVING_FIELDS = {
    **ZLAB_FIELDS,
    "architectures": ["Qwen3XPressModel"],
    "xpress_rank": 8,
    "xpress_mlp_hidden": 16,
    "xpress_block_size": 8,
    "xpress_num_passes": 2,
    "sample_from_anchor": False,
}
ADAFLASH_FIELDS = {
    **ZLAB_FIELDS,
    "dflash_config": {
        "mask_token_id": 63,
        "target_layer_ids": [0, 1],
        "use_thresh_head_two_model": True,
        "thresh_head_bottleneck_dim": 12,
        "thresh_head_direct_len": True,
    },
}
BARE, HEAD = {"refiner": None}, {"refiner": None, "length_head": {"width": 12}}

# layout -> (overrides of the drafter, shapes on disk, config on disk)
WRITTEN = {
    "zlab": (BARE, DFLASH, ZLAB_FIELDS),
    "dflare": (
        {**BARE, "fusion": "layerwise"},
        DFLARE,
        {**ZLAB_FIELDS, "architectures": ["QwenDFlareDraftModel"]},
    ),
    "adaflash": (HEAD, {**DFLASH, **LENGTH_HEAD}, ADAFLASH_FIELDS),
    "serving": ({}, {**DFLASH, **SERVING_HEAD}, SERVING_FIELDS),
}


@pytest.mark.parametrize("layout", WRITTEN)
def test_names_shapes_and_config_are_those_of_the_layout(tmp_path, layout):
    overrides, shapes, config = WRITTEN[layout]
    export(build_drafter(**overrides), tmp_path / "out", layout)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: tuple(value.shape) for name, value in tensors.items()} == shapes
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == config
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("kind", ["dflash", "xpress"])
def test_speculators(tmp_path, kind):
    """Taps count the embedding output as 0 there; the block holds seven drafts (E7)."""
    drafter = build_drafter(target={"name": "maker/target"}, **({} if kind == "xpress" else BARE))
    export(drafter, tmp_path / "out", "speculators")
    shapes = {**DFLASH, **(SPECULATORS_HEAD if kind == "xpress" else {})}
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: tuple(value.shape) for name, value in tensors.items()} == shapes
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config.pop("transformer_layer_config") == QWEN3_FIELDS
    assert config.pop("speculators_config") == {
        "algorithm": kind,
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 7}],
        "verifier": {"name_or_path": "maker/target", "architectures": []},
    }
    refiner = {"xpress_rank": 8, "xpress_mlp_ratio": 2, "num_jacobi_passes": 2, "xpress_backbone": "dflash"}
    assert config.pop("speculators_version")
    assert config == {
        "architectures": ["XPressSpeculator" if kind == "xpress" else "DFlashSpeculator"],
        "speculators_model_type": kind,
        "draft_vocab_size": 64,
        "block_size": 8,
        "target_hidden_size": 32,
        "aux_hidden_state_layer_ids": [1, 2],
        "mask_token_id": 63,
        "sliding_window_non_causal": False,
        "sample_from_anchor": False,
        "dtype": "float32",
        **(refiner if kind == "xpress" else {}),
    }


GOLDEN = {
    "dflash_forward/checkpoint": "zlab",
    "dflare_forward/checkpoint": "dflare",
    "adaflash_head/checkpoint": "adaflash",
    "xpress_checkpoint/serving": "serving",
    "xpress_checkpoint/speculators": "speculators",
}


@pytest.mark.parametrize("fixture", GOLDEN)
def test_reference_checkpoints_come_back_bit_for_bit(golden, tmp_path, fixture):
    source = golden / fixture
    export(source, tmp_path / "out", GOLDEN[fixture])
    before, after = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    one, two = XPressDrafter.from_pretrained(source), XPressDrafter.from_pretrained(tmp_path / "out")
    assert all(torch.equal(two.state_dict()[name], value) for name, value in one.state_dict().items())
    assert {**one.config.to_dict(), "_name_or_path": ""} == {**two.config.to_dict(), "_name_or_path": ""}


def test_what_the_reference_says_of_its_serving_layout_is_kept(golden, tmp_path):
    """Every field of the reference converter's config that is not about code comes back with its value."""
    source = golden / "xpress_checkpoint" / "serving"
    export(source, tmp_path / "out", "serving")
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (source, tmp_path / "out"))
    for key in ("auto_map", "torch_dtype", "use_cache", "bos_token_id", "eos_token_id"):
        before.pop(key, None)
    assert {key: after.get(key, "missing") for key in before} == before


@pytest.mark.parametrize("layout", ["own", "speculators"])
@pytest.mark.parametrize("overrides", [{}, BARE, {"slot_layout": "shift"}], ids=["refiner", "bare", "shift"])
def test_other_directions_of_the_round_trip(tmp_path, layout, overrides):
    drafter = build_drafter(**overrides).bfloat16()
    export(drafter, tmp_path / "out", layout)
    loaded = XPressDrafter.from_pretrained(tmp_path / "out")
    assert loaded.dtype == torch.bfloat16
    assert loaded.config.slot_layout == drafter.config.slot_layout
    assert loaded.config.refiner == drafter.config.refiner
    assert all(torch.equal(loaded.state_dict()[name], value) for name, value in drafter.state_dict().items())


@pytest.mark.parametrize(
    "overrides",
    [
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16},
        {
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 16,
            "block_attention": ["causal", "bidirectional"],
        },
        {"block_attention": "causal"},
        {"min_visible_prefix": 2},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
        {"target": {"embedding_scale": 5.5}},
        {"attention_bias": True},
    ],
    ids=["window", "causal window", "causal", "visible prefix", "rope", "scale", "bias"],
)
def test_what_the_drafter_computes_survives_the_zlab_layout(tmp_path, overrides):
    drafter = build_drafter(refiner=None, **overrides)
    export(drafter, tmp_path / "out", "zlab")
    loaded = XPressDrafter.from_pretrained(tmp_path / "out").config
    assert loaded.block_attention_per_layer == drafter.config.block_attention_per_layer
    for name in ("layer_types", "sliding_window", "min_visible_prefix", "rope_parameters", "target", "attention_bias"):
        assert getattr(loaded, name) == getattr(drafter.config, name), name


@pytest.mark.parametrize("direction", ["causal", "bidirectional"])
def test_the_direction_is_written_where_readers_look(tmp_path, direction):
    """JetSpec reads `causal_head`, servers read `is_causal`; neither is written where it is the default."""
    export(build_drafter(**BARE, block_attention=direction), tmp_path / "out", "zlab")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    expected = True if direction == "causal" else None
    assert (config.get("is_causal"), config["dflash_config"].get("causal_head")) == (expected, expected)


def test_our_own_layout_is_written_with_hashes(tmp_path):
    write(tmp_path / "drafter", SERVING, values({**DFLASH, **SERVING_HEAD}))
    export(tmp_path / "drafter", tmp_path / "out", "own")
    hashes = json.loads((tmp_path / "out" / "tensor_hashes.json").read_text())["tensors"]
    assert hashes.keys() == load_file(tmp_path / "out" / "model.safetensors").keys()
    assert all(len(value) == 64 for value in hashes.values())
    assert open_checkpoint(tmp_path / "out").hashes is not None


@pytest.mark.parametrize(
    ("overrides", "layout", "words"),
    [
        ({}, "zlab", ["refiner", "drop_refiner=True"]),
        (HEAD, "zlab", ["length_head", "drop_length_head=True"]),
        (HEAD, "speculators", ["length_head"]),
        ({**HEAD, "refiner": {"rank": 8, "mlp_width": 16, "sweeps": 2}}, "adaflash", ["refiner"]),
        (BARE, "serving", ["refiner", "zlab"]),
        (BARE, "adaflash", ["length_head", "lacks"]),
        ({**BARE, "fusion": "layerwise"}, "zlab", ["fusion", "layerwise", "dflare"]),
        (BARE, "dflare", ["fusion", "concat", "zlab"]),
        ({"slot_layout": "shift", **BARE}, "zlab", ["slot_layout", "shift", "speculators"]),
        ({"slot_layout": "shift"}, "serving", ["slot_layout"]),
        ({**BARE, "target_hidden_size": 48}, "zlab", ["target_hidden_size", "48", "32"]),
        ({**BARE, "target_hidden_size": 48}, "speculators", ["target_hidden_size", "48", "32"]),
        ({**BARE, "vocab_size": None}, "speculators", ["vocab_size"]),
        ({"refiner": {"rank": 8, "mlp_width": 12, "sweeps": 2}}, "speculators", ["mlp_width", "12", "8"]),
        ({**BARE, "block_attention": "causal"}, "speculators", ["block_attention"]),
        ({**BARE, "block_attention": ["causal", "bidirectional"]}, "zlab", ["block_attention"]),
        ({**BARE, "target": {"embedding_scale": 2.0}}, "speculators", ["embedding_scale"]),
        (BARE, "onnx", ["onnx", "speculators", "zlab"]),
    ],
)
def test_what_a_layout_cannot_say_is_refused(tmp_path, overrides, layout, words):
    """I8; and no folder is left behind."""
    with pytest.raises(ValueError, match=r"`|length_head|refiner") as error:
        export(build_drafter(**overrides), tmp_path / "out", layout)
    assert all(word in str(error.value) for word in words), str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_dropping_a_refiner_is_asked_for_and_said(tmp_path):
    drafter = build_drafter(target={"name": "maker/target", "revision": "abc"})
    drafter.speculation.draft_length = 3
    lost = export(drafter, tmp_path / "out", "zlab", drop_refiner=True)
    assert lost == ["the refiner", "facts about the target: name, revision", "defaults of speculation: draft_length"]
    assert set(load_file(tmp_path / "out" / "model.safetensors")) == set(DFLASH)
    assert drafter.refiner is not None
    assert drafter.config.refiner is not None


def test_a_sweep_count_set_on_the_drafter_is_what_servers_run(tmp_path):
    drafter = build_drafter()
    drafter.speculation.sweeps = 4
    export(drafter, tmp_path / "out", "serving")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["xpress_num_passes"] == 4


def test_adapters_have_to_be_merged(tmp_path):
    adapted = get_peft_model(build_drafter(**BARE), LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ValueError, match=r"unexpected_keys.*lora_A"):
        export(adapted, tmp_path / "out", "zlab")
    export(adapted.merge_and_unload(), tmp_path / "out", "zlab")
    assert set(load_file(tmp_path / "out" / "model.safetensors")) == set(DFLASH)


def test_shards(tmp_path):
    drafter = build_drafter()
    export(drafter, tmp_path / "out", "serving", max_shard_size=20_000)
    shards = sorted((tmp_path / "out").glob("model-*.safetensors"))
    assert len(shards) > 3
    assert all(path.stat().st_size < 25_000 for path in shards)
    assert all(
        torch.equal(XPressDrafter.from_pretrained(tmp_path / "out").state_dict()[name], value)
        for name, value in drafter.state_dict().items()
    )


@pytest.mark.parametrize("size", ["much", "0", 0, "-1GB", "1.5GB"])
def test_a_size_of_shards_that_is_none(tmp_path, size):
    with pytest.raises(ValueError, match=f"`max_shard_size` must be.*{size}"):
        export(build_drafter(**BARE), tmp_path / "out", "zlab", max_shard_size=size)


def test_the_working_folder_is_not_replaced(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OSError, match="working folder"):
        export(build_drafter(**BARE), ".", "zlab")
    export(build_drafter(**BARE), "out", "zlab")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_folder_with_something_in_it_is_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(OSError, match="not empty"):
        export(build_drafter(**BARE), tmp_path, "zlab")
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_every_layout_out_is_a_layout_in(tmp_path):
    seen = {}
    for layout in LAYOUTS_OUT:
        overrides = WRITTEN.get(layout, ({},))[0]
        export(build_drafter(**overrides), tmp_path / layout, layout)
        seen[layout] = open_checkpoint(tmp_path / layout).layout
    assert seen == {
        "own": "own",
        "zlab": "SpecForge DFlash",
        "dflare": "AngelSlim DFlare",
        "adaflash": "AdaFlash",
        "serving": "xPress serving",
        "speculators": "speculators XPress",
    }


def test_the_command(tmp_path):
    build_drafter().save_pretrained(tmp_path / "drafter")
    arguments = ["convert", str(tmp_path / "drafter"), str(tmp_path / "out"), "--to", "zlab"]
    outcome = CliRunner().invoke(cli.app, arguments)
    assert isinstance(outcome.exception, ValueError)
    assert "--drop-refiner" in str(outcome.exception)
    outcome = CliRunner().invoke(cli.app, [*arguments, "--drop-refiner", "--max-shard-size", "20000"])
    assert outcome.exit_code == 0, outcome.output
    assert "not written: the refiner" in outcome.output
    assert XPressDrafter.from_pretrained(tmp_path / "out").refiner is None
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 3


def test_the_command_says_what_was_left_aside(tmp_path):
    shapes = {**DFLASH, **SERVING_HEAD, **TARGETS_OWN}
    write(tmp_path / "drafter", {**SERVING, "block_size": 16}, values(shapes))
    outcome = CliRunner().invoke(
        cli.app, ["convert", str(tmp_path / "drafter"), str(tmp_path / "out"), "--to", "serving"]
    )
    text = " ".join(outcome.output.split())
    assert "note: `block_size` is 16 in the config; the mixer was trained for 8 slots." in text
    assert "ignored ['embed_tokens.weight', 'lm_head.weight']" in text
