"""Bad input: a clear error before the first forward, naming the field and what was received."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, T5Config, T5ForConditionalGeneration, TextStreamer

from tests.conftest import build_config, build_drafter, build_target, prompt
from xpress_hf import SpeculationConfig, XPressConfig, XPressDrafter


@pytest.fixture
def quiet_target():
    """A target whose forward must not run."""
    target = build_target()

    def fail(*args, **kwargs):
        raise AssertionError("the target ran before the check")

    target.forward = fail
    return target


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"hidden_size": 48, "head_dim": 8}, ["target_hidden_size", "48", "32"]),
        ({"target_hidden_size": 48}, ["target_hidden_size", "48", "32"]),
        ({"vocab_size": 80}, ["vocab_size", "80", "64"]),
        ({"target_layer_ids": [0, 7], "num_target_layers": 8}, ["target_layer_ids", "7", "3"]),
        ({"target_layer_ids": [0, 2]}, ["target_layer_ids", "2", "cannot be tapped"]),
        ({"num_target_layers": 36}, ["num_target_layers", "36", "3"]),
        ({"vocab_size": None, "refiner": None, "mask_token_id": 64}, ["mask_token_id", "64"]),
    ],
)
def test_a_drafter_of_another_target(quiet_target, overrides, words):
    """E5, E10."""
    drafter = build_drafter(**overrides)
    with pytest.raises(ValueError, match="`") as error:
        quiet_target.generate(prompt(), assistant_model=drafter, max_new_tokens=8, do_sample=False)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"num_beams": 2}, "num_beams"),
        ({"num_return_sequences": 2}, "num_return_sequences"),
        ({"use_cache": False}, "use_cache"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens"),
        ({"guidance_scale": 1.5}, "guidance_scale"),
        ({"assistant_ensemble_weight": 0.5}, "assistant_ensemble_weight"),
    ],
)
def test_options_that_take_no_drafter(quiet_target, options, word):
    if word == "assistant_ensemble_weight" and not hasattr(quiet_target.generation_config, word):
        pytest.skip("this version of transformers has no ensemble option")
    with pytest.raises(ValueError, match=word):
        quiet_target.generate(prompt(), assistant_model=build_drafter(), max_new_tokens=8, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"streamer": TextStreamer(None)},
        {"cache_implementation": "static"},
    ],
    ids=lambda options: list(options)[-1],
)
def test_options_that_take_one_sequence(quiet_target, options):
    with pytest.raises(ValueError, match=f"{list(options)[-1]}|past_key_values|[Ss]treamer"):
        quiet_target.generate(prompt().expand(2, -1), assistant_model=build_drafter(), max_new_tokens=8, **options)


def test_a_target_whose_cache_cannot_be_rolled_back():
    config = AutoConfig.for_model(
        "mamba", vocab_size=64, hidden_size=32, num_hidden_layers=3, state_size=4, eos_token_id=None, pad_token_id=None
    )
    target = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(ValueError, match="cannot be cropped"):
        target.generate(prompt(), assistant_model=build_drafter(), max_new_tokens=8)


def test_an_encoder_decoder_target():
    config = T5Config(vocab_size=64, d_model=32, num_layers=2, num_heads=2, d_ff=32, d_kv=8, decoder_start_token_id=0)
    with pytest.raises(ValueError, match="encoder-decoder"):
        T5ForConditionalGeneration(config).generate(prompt(), assistant_model=build_drafter(), max_new_tokens=8)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"mask_token_id": None}, ["mask_token_id", "missing"]),
        ({"target_layer_ids": None}, ["target_layer_ids", "missing"]),
        ({"mask_token_id": 64}, ["mask_token_id", "64"]),
        ({"target_layer_ids": [0, 5]}, ["target_layer_ids", "num_target_layers"]),
        ({"target_layer_ids": []}, ["target_layer_ids"]),
        ({"block_size": 1}, ["block_size", "1"]),
        ({"slot_layout": "fil"}, ["slot_layout", "fil", "shift"]),
        ({"fusion": "sum"}, ["fusion", "sum"]),
        ({"block_attention": "both"}, ["block_attention", "both"]),
        ({"layer_types": ["full_attention"]}, ["layer_types", "num_hidden_layers=2"]),
        ({"layer_types": ["sliding_attention"] * 2}, ["sliding_window"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads", "3"]),
        ({"refiner": {"rank": 8}}, ["refiner.mlp_width"]),
        ({"refiner": {"rank": 8, "mlp_width": 16, "sweeps": 2, "ranks": 1}}, ["ranks"]),
        ({"vocab_size": None}, ["vocab_size"]),
        ({"fusion": "layerwise", "target_hidden_size": 16}, ["layerwise", "16"]),
        ({"speculation": {"sweep": 2}}, ["sweep", "sweeps"]),
        ({"not_a_key": 3}, ["not_a_key"]),
    ],
)
def test_configurations_that_contradict_themselves(overrides, words):
    with pytest.raises(ValueError, match="`") as error:
        XPressDrafter(build_config(**overrides))
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize(
    "values",
    [
        {"sweeps": -1},
        {"draft_length": 0},
        {"top_candidates": 0},
        {"sweeps": 1.5},
        {"sweeps": True},
        {"verification": "tree"},
    ],
)
def test_speculation_values(values):
    with pytest.raises(ValueError, match=next(iter(values))):
        SpeculationConfig(**values)


def test_a_drafter_alone_is_no_language_model():
    drafter = build_drafter()
    with pytest.raises(ValueError, match="assistant_model=drafter"):
        drafter(input_ids=prompt())
    with pytest.raises(ValueError, match="assistant_model=drafter"):
        drafter.generate(prompt())


@pytest.fixture
def saved(tmp_path):
    build_drafter().save_pretrained(tmp_path / "drafter")
    return tmp_path / "drafter"


def test_missing_weights_are_listed(saved):
    tensors = load_file(saved / "model.safetensors")
    gone = [key for key in tensors if "refiner" in key or key == "fusion.fc.weight"]
    save_file({k: v for k, v in tensors.items() if k not in gone}, saved / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="missing_keys") as error:
        XPressDrafter.from_pretrained(saved)
    assert all(key in str(error.value) for key in gone)


def test_unexpected_weights_are_listed(saved):
    tensors = load_file(saved / "model.safetensors")
    save_file({**tensors, "extra.weight": torch.zeros(2)}, saved / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"extra\.weight"):
        XPressDrafter.from_pretrained(saved)


def test_weights_that_are_not_finite(saved):
    tensors = load_file(saved / "model.safetensors")
    tensors["fusion.fc.weight"][0, 0] = torch.nan
    save_file(tensors, saved / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"not finite.*fusion\.fc\.weight"):
        XPressDrafter.from_pretrained(saved)


def test_folders_without_or_with_half_a_checkpoint(saved, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(OSError, match=r"config\.json"):
        XPressDrafter.from_pretrained(tmp_path / "empty")
    shutil.copytree(saved, tmp_path / "half")
    (tmp_path / "half" / "model.safetensors").unlink()
    with pytest.raises(OSError, match="safetensors"):
        XPressDrafter.from_pretrained(tmp_path / "half")
    for path in ("/no/such/folder", "./nowhere", "a/b/c"):
        with pytest.raises(OSError, match="does not exist; give a folder, or a Hub id"):
            XPressDrafter.from_pretrained(path)
    with pytest.raises(OSError, match="nowhere"):
        XPressDrafter.from_pretrained(tmp_path / "nowhere")
    (tmp_path / "half" / "config.json").write_text("{")
    with pytest.raises(OSError, match=r"config\.json"):
        XPressDrafter.from_pretrained(tmp_path / "half")


def test_an_unknown_key_in_a_saved_config(saved):
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps({**config, "blok_size": 4}))
    with pytest.raises(ValueError, match="blok_size"):
        XPressDrafter.from_pretrained(saved)


def test_a_checkpoint_that_is_no_drafter(tmp_path):
    build_target().save_pretrained(tmp_path)
    with pytest.raises((ValueError, OSError), match=r"drafter|layout"):
        XPressDrafter.from_pretrained(tmp_path)


def test_a_failed_call_keeps_the_last_record(target):
    drafter = build_drafter()
    target.generate(prompt(), assistant_model=drafter, max_new_tokens=8, do_sample=False)
    record = drafter.last_acceptance
    with pytest.raises(ValueError, match="num_beams"):
        target.generate(prompt(), assistant_model=drafter, max_new_tokens=8, num_beams=3)
    assert drafter.last_acceptance is record
    assert isinstance(drafter.config, XPressConfig)
