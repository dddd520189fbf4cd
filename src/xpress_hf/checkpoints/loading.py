"""Reads a checkpoint in a foreign layout from a folder or the Hub: config.json and safetensors, nothing else."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from ..configuration import XPressConfig
from .layouts import convert_config, detect, rename

HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")


@dataclass
class Checkpoint:
    """A converted checkpoint: our config, tensors under our names, and the name of the layout they came in."""

    config: XPressConfig
    state_dict: dict[str, torch.Tensor]
    layout: str


def find_file(source: str | os.PathLike, name: str, options: dict[str, Any]) -> Path | None:
    """Path of a file of the checkpoint, fetched from the Hub where needed; `None` when the checkpoint lacks it."""
    options = {key: options[key] for key in HUB_OPTIONS if options.get(key) is not None}
    path = cached_file(source, name, _raise_exceptions_for_missing_entries=False, **options)
    return None if path is None else Path(path)


def weight_files(source: str | os.PathLike, options: dict[str, Any]) -> list[Path]:
    """Safetensors files of a checkpoint, sharded or single.

    Raises:
        OSError: there are none, or the index names a file that is missing or outside the checkpoint.
    """
    index = find_file(source, SAFE_WEIGHTS_INDEX_NAME, options)
    if index is None:
        single = find_file(source, SAFE_WEIGHTS_NAME, options)
        if single is None:
            raise OSError(
                f"{str(source)!r} has neither {SAFE_WEIGHTS_NAME} nor {SAFE_WEIGHTS_INDEX_NAME}; only those are read."
            )
        return [single]
    names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    files = []
    for name in names:
        if Path(name).name != name:
            raise OSError(f"The index of {str(source)!r} names {name!r}, which is not a file of the checkpoint.")
        path = find_file(source, name, options)
        if path is None:
            raise OSError(f"{str(source)!r} lacks the shard {name!r} that its index names.")
        files.append(path)
    return files


def read_tensors(files: list[Path]) -> dict[str, torch.Tensor]:
    """All tensors, under their names on disk without a leading `model.`"""
    tensors: dict[str, torch.Tensor] = {}
    for path in files:
        try:
            with safe_open(path, framework="pt") as reader:
                for key in reader.keys():  # noqa: SIM118 (not a dict)
                    tensors[key.removeprefix("model.")] = reader.get_tensor(key)
        except SafetensorError as error:
            raise OSError(f"{path.name!r} is no complete safetensors file ({error}); download it again.") from error
    return tensors


def read_checkpoint(source: str | os.PathLike, options: dict[str, Any]) -> Checkpoint | None:
    """Converts a foreign checkpoint; `None` for our own layout, which transformers loads itself.

    Args:
        source: folder or Hub id.
        options: arguments of `from_pretrained`; those that concern the Hub are used.

    Raises:
        OSError: files are missing or broken.
        ValueError: the layout is unknown, refused, or its config is inconsistent.
    """
    path = find_file(source, "config.json", options)
    if path is None:
        raise OSError(f"{str(source)!r} has no config.json; give a folder or Hub id that holds a drafter.")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise OSError(f"config.json of {str(source)!r} is no valid JSON ({error}).") from error
    if config.get("model_type") == XPressConfig.model_type:
        return None
    tensors = read_tensors(weight_files(source, options))
    layout = detect(config, set(tensors))
    converted = convert_config(layout, config, {key: tuple(value.shape) for key, value in tensors.items()})
    converted._name_or_path = str(source)
    state_dict = {}
    for key, tensor in tensors.items():
        ours = rename(key, layout.keys)
        if ours is not None:
            state_dict[ours] = tensor
    return Checkpoint(converted, state_dict, layout.name)
