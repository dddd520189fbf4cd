"""Checkpoint folders: written shard by shard, and there only when they are complete."""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from .files import StoredTensor


@contextmanager
def complete_folder(folder: Path) -> Iterator[Path]:
    """A folder beside `folder` to write into, which takes its place at the end and vanishes after an error, as do
    parents that were made for it."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise OSError(f"{str(folder)!r} exists and is not empty; give a new folder.")
    folder = folder.absolute()
    if folder.exists() and folder.samefile(Path.cwd()):
        raise OSError(f"{str(folder)!r} is the working folder and cannot be replaced; give a new folder.")
    made = [parent for parent in folder.parents if not parent.exists()]
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = folder.parent / f".{folder.name}-{uuid.uuid4().hex[:8]}"
    unfinished.mkdir()
    try:
        yield unfinished
        if folder.exists():
            folder.rmdir()
        unfinished.replace(folder)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        with suppress(OSError):  # another program may have put something there
            for parent in made:
                parent.rmdir()
        raise


def write_shards(tensors: dict[str, StoredTensor], folder: Path, longest: int) -> None:
    """Safetensors files of at most `longest` bytes (a longer tensor gets a file of its own), with an index if several.

    Raises:
        ValueError: a tensor holds values that are not finite.
    """
    shards: list[dict[str, StoredTensor]] = [{}]
    size = 0
    for name in sorted(tensors):
        size += tensors[name].num_bytes
        if size > longest and shards[-1]:
            shards.append({})
            size = tensors[name].num_bytes
        shards[-1][name] = tensors[name]
    names = [f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors" for index in range(len(shards))]
    if len(shards) == 1:
        names = [SAFE_WEIGHTS_NAME]
    for file_name, shard in zip(names, shards, strict=True):
        write_shard(shard, folder / file_name)
    if len(shards) > 1:
        total = sum(tensor.num_bytes for tensor in tensors.values())
        placed = {name: file_name for file_name, shard in zip(names, shards, strict=True) for name in shard}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(placed.items()))}
        (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def write_shard(shard: dict[str, StoredTensor], path: Path) -> None:
    values = {name: tensor.read() for name, tensor in shard.items()}
    for name, value in values.items():
        if not torch.isfinite(value).all():
            raise ValueError(f"`{name}` holds values that are not finite; nothing was written.")
    save_file(values, path, metadata={"format": "pt"})
