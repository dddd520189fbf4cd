"""H13: a run that was killed and resumed ends with the weights of the uninterrupted run."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]


def run(output: Path, *arguments: str) -> int:
    command = [sys.executable, "-m", "tests.training.train_tiny", str(output), "--save-steps", "3", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, timeout=300).returncode


@pytest.mark.slow
@pytest.mark.parametrize("precision", [[], ["--bf16"]], ids=["float32", "bf16"])
def test_kill_9_and_resume_equals_the_uninterrupted_run(tmp_path, precision):
    steps = ["--steps", "14", "--loss-vocab-size", "48", *precision]
    assert run(tmp_path / "whole", *steps) == 0
    # After a checkpoint, in the middle of the third epoch of four steps or of the fourth one.
    killed_at = random.Random(len(precision)).randint(4, 13)
    assert run(tmp_path / "cut", *steps, "--kill-at", str(killed_at)) == -9
    assert not (tmp_path / "cut" / "model.safetensors").exists()
    assert run(tmp_path / "cut", *steps, "--resume") == 0
    whole, cut = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "cut"))
    for name, right in whole.items():
        torch.testing.assert_close(cut[name], right, atol=1e-6, rtol=0, msg=f"{name}, killed at {killed_at}")
    one, two = (json.loads((tmp_path / name / "figures.json").read_text()) for name in ("whole", "cut"))
    assert one == two
    assert one["best_metric"] is not None
