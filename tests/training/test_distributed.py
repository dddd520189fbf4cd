"""Two gloo processes against one with the doubled batch: by accelerate (DDP) and by torch's `fully_shard`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from xpress_hf import XPressDrafter

ROOT = Path(__file__).parents[2]
MODULE = "tests.training.train_tiny"


def run(output: Path, processes: int, *arguments: str) -> dict:
    launcher = ["-m"]
    if processes > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "-m"]
    done = subprocess.run(
        [sys.executable, *launcher, MODULE, str(output), *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((output / "figures.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "sharded"])
def test_two_processes_learn_what_one_learns(tmp_path, kind):
    manual = {"ddp": ([], []), "sharded": (["--manual", "sharded"], ["--manual", "plain"])}[kind]
    two = run(tmp_path / "two", 2, "--batch", "1", *manual[0])
    one = run(tmp_path / "one", 1, "--batch", "2", *manual[1])
    assert len(one["losses"]) == 20
    assert one["losses"] == pytest.approx(two["losses"], abs=1e-5)
    assert one["losses"][-1] < one["losses"][0]
    left, right = (XPressDrafter.from_pretrained(tmp_path / name) for name in ("one", "two"))
    for (name, parameter), other in zip(left.named_parameters(), right.parameters(), strict=True):
        torch.testing.assert_close(parameter, other, atol=1e-5, rtol=1e-5, msg=name)
