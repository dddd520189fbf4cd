"""The pickle that xPress training writes: read only where allowed, and then without running what it holds."""

import argparse
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoints.foreign import DFLASH, SERVING_HEAD, ZLAB, values
from tests.conftest import build_config
from xpress_hf import XPressDrafter
from xpress_hf.checkpoints.loading import open_checkpoint


def training_file(folder: Path, **changes) -> dict:
    head = {key.removeprefix("xpress_head."): value for key, value in values(SERVING_HEAD).items()}
    content = {
        "epoch": 6,
        "global_step": 100,
        "args": argparse.Namespace(markov_rank=8, mlp_ratio=4, input_relu=False),
        "refiner_state_dict": {**head, "mix.tril": torch.ones(8, 8).tril()},
        "draft_state_dict": values(DFLASH),
        "base_readout_state_dict": None,
        **changes,
    }
    (folder / "config.json").write_text(json.dumps(ZLAB))
    torch.save(content, folder / "refiner_cotrain.pt")
    return content


def test_a_pickle_is_read_only_when_allowed(tmp_path):
    content = training_file(tmp_path)
    with pytest.raises(ValueError, match="allow_pickle"):
        XPressDrafter.from_pretrained(tmp_path)
    drafter = XPressDrafter.from_pretrained(tmp_path, allow_pickle=True)
    assert drafter.config.refiner == {"rank": 8, "mlp_width": 16, "sweeps": 6}
    assert torch.equal(drafter.refiner.mixer, content["refiner_state_dict"]["mix.L"])
    assert torch.equal(drafter.fusion.fc.weight, content["draft_state_dict"]["fc.weight"])


def test_a_training_file_without_a_config(tmp_path):
    """Its arguments do not describe the layers; a config of one's own does."""
    training_file(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(OSError, match=r"config\.json"):
        XPressDrafter.from_pretrained(tmp_path, allow_pickle=True)
    config = build_config(refiner={"rank": 8, "mlp_width": 16, "sweeps": 4})
    drafter = XPressDrafter.from_pretrained(tmp_path, allow_pickle=True, config=config)
    assert drafter.num_sweeps == 4
    assert config._name_or_path == ""


class Intruder:
    """Unpickling it writes a file."""

    def __init__(self, path: str):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_a_pickle_that_would_run_code(tmp_path):
    trace = tmp_path / "trace"
    training_file(tmp_path, scheduler_state_dict=Intruder(str(trace)))
    with pytest.raises(ValueError, match=r"(?s)objects other than tensors.*mkdir"):
        XPressDrafter.from_pretrained(tmp_path, allow_pickle=True)
    assert not trace.exists()


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"refiner_state_dict": None}, "refiner_state_dict"),
        ({"base_readout_state_dict": {"weight": torch.ones(1)}}, "base_readout_state_dict"),
        ({"args": argparse.Namespace(input_relu=True)}, "input_relu"),
        ({"refiner_state_dict": {"layers.0.weight": torch.ones(2), "lowrank_head.weight": torch.ones(2)}}, "research"),
        ({"refiner_state_dict": {"w1.weight": torch.ones(64, 8), "w2.weight": torch.ones(64, 8)}}, "incomplete"),
        ({"draft_state_dict": {"fc.weight": 3}}, "no tensor"),
    ],
)
def test_files_of_other_models(tmp_path, changes, word):
    training_file(tmp_path, **changes)
    with pytest.raises(ValueError, match=word):
        XPressDrafter.from_pretrained(tmp_path, allow_pickle=True)


def test_a_file_of_an_old_torch(tmp_path):
    content = training_file(tmp_path)
    torch.save(content, tmp_path / "refiner_cotrain.pt", _use_new_zipfile_serialization=False)
    drafter = XPressDrafter.from_pretrained(tmp_path, allow_pickle=True)
    assert torch.equal(drafter.refiner.mixer, content["refiner_state_dict"]["mix.L"])


def test_the_layout_is_named(tmp_path):
    training_file(tmp_path)
    checkpoint = open_checkpoint(tmp_path, allow_pickle=True)
    assert checkpoint.layout == "xPress training file"
    assert "refiner_cotrain.pt" in checkpoint.reason


@pytest.mark.parametrize("content", [3000, b"", b"no pickle at all", b"PK\x03\x04"])
def test_a_damaged_pickle(tmp_path, content):
    training_file(tmp_path)
    path = tmp_path / "refiner_cotrain.pt"
    path.write_bytes(path.read_bytes()[:content] if isinstance(content, int) else content)
    with pytest.raises(OSError, match="no complete training file"):
        XPressDrafter.from_pretrained(tmp_path, allow_pickle=True)


def test_safetensors_win_over_a_pickle(tmp_path):
    training_file(tmp_path)
    drafter = XPressDrafter.from_pretrained(tmp_path, allow_pickle=True)
    drafter.save_pretrained(tmp_path)
    (tmp_path / "refiner_cotrain.pt").write_bytes(b"no pickle")
    state = XPressDrafter.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(state[key], value) for key, value in load_file(tmp_path / "model.safetensors").items())
