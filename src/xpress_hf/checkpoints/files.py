"""Files of a checkpoint: found in a folder or on the Hub, opened without reading their values."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import pickle
import re
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants
from safetensors import SafetensorError, safe_open
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")
TRAINING_FILE = "refiner_cotrain.pt"
HASHES_NAME = "tensor_hashes.json"
FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file: shape, dtype as safetensors names it, and how to read it."""

    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], torch.Tensor]

    @property
    def num_bytes(self) -> int:
        size = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2}.get(self.dtype, 1)
        return size * self.num_elements

    @property
    def num_elements(self) -> int:
        count = 1
        for length in self.shape:
            count *= length
        return count


def find_file(source: str | os.PathLike, name: str, options: dict[str, Any]) -> Path | None:
    """Path of a file of the checkpoint, fetched from the Hub where needed; `None` when the checkpoint lacks it.

    Raises:
        OSError: `source` is a file or a path to nothing; a Hub id has at most one "/".
    """
    text = str(source)
    if os.path.isfile(text):
        raise OSError(f"{text!r} is a file; give the folder of the checkpoint that it belongs to.")
    if not os.path.exists(text) and (text.startswith(("/", ".", "~")) or text.count("/") > 1):
        raise OSError(f"{text!r} does not exist; give a folder, or a Hub id such as 'owner/name'.")
    options = {key: options[key] for key in HUB_OPTIONS if options.get(key) is not None}
    path = cached_file(source, name, _raise_exceptions_for_missing_entries=False, **options)
    return None if path is None else Path(path)


def looked_in(source: str, options: dict[str, Any]) -> str:
    """Ending of a message about a missing file: offline, only the cache was searched."""
    is_offline = options.get("local_files_only") or constants.HF_HUB_OFFLINE
    return " (offline: only the cache was searched)" if is_offline and not os.path.isdir(source) else ""


def read_json(path: Path, source: str) -> dict[str, Any]:
    """A JSON file that must hold an object.

    Raises:
        OSError: it is no valid JSON or holds something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise OSError(f"{path.name} of {source!r} is no valid JSON ({error}).") from error
    if not isinstance(value, dict):
        raise OSError(f"{path.name} of {source!r} must hold a JSON object, got {type(value).__name__}.")
    return value


def weight_files(source: str, options: dict[str, Any]) -> list[Path]:
    """Safetensors files of a checkpoint, single or sharded; empty when there are none.

    Raises:
        OSError: the index is broken or names a file that is missing or outside the checkpoint.
    """
    single = find_file(source, SAFE_WEIGHTS_NAME, options)
    if single is not None:
        return [single]
    index = find_file(source, SAFE_WEIGHTS_INDEX_NAME, options)
    if index is None:
        return []
    shards = read_json(index, source).get("weight_map")
    if not isinstance(shards, dict) or not shards or not all(isinstance(name, str) for name in shards.values()):
        raise OSError(f"{index.name} of {source!r} has no `weight_map` from tensor names to file names.")
    files = []
    for name in sorted(set(shards.values())):
        if name != os.path.basename(name.replace("\\", "/")) or not name.endswith(".safetensors"):
            raise OSError(f"The index of {source!r} names {name!r}, which is no safetensors file of the checkpoint.")
        path = find_file(source, name, options)
        if path is None:
            raise OSError(f"{source!r} lacks the shard {name!r} that its index names.")
        files.append(path)
    return files


def open_tensors(files: list[Path]) -> dict[str, StoredTensor]:
    """Tensors of safetensors files under their names without a leading `model.`; only headers are read.

    Raises:
        OSError: a file is damaged or two tensors share a name.
    """
    tensors: dict[str, StoredTensor] = {}
    for path in files:
        try:
            with safe_open(path, framework="pt") as reader:
                for key in reader.keys():  # noqa: SIM118 (not a dict)
                    part = reader.get_slice(key)
                    name = key.removeprefix("model.")
                    if name in tensors:
                        raise OSError(f"The checkpoint holds `{name}` twice, the second time in {path.name!r}.")
                    tensors[name] = StoredTensor(
                        tuple(part.get_shape()), part.get_dtype(), partial(read_tensor, path, key)
                    )
        except SafetensorError as error:
            raise OSError(f"{path.name!r} is no complete safetensors file ({error}); download it again.") from error
    return tensors


def read_tensor(path: Path, key: str) -> torch.Tensor:
    # Opened anew for every tensor: pages of a closed file are given back, so memory does not grow with the file.
    with safe_open(path, framework="pt") as reader:
        return reader.get_tensor(key)


def open_training_file(path: Path, allow_pickle: bool) -> dict[str, StoredTensor]:
    """Tensors of an xPress training file under the names of the serving layout.

    Raises:
        ValueError: pickles were not allowed, the file holds anything but tensors and plain values, or it belongs to
            another model.
        OSError: the file is damaged.
    """
    if not allow_pickle:
        raise ValueError(
            f"`allow_pickle` is False, and the only weights here are the pickle {path.name!r}. Prefer safetensors; if "
            "you trust the file, pass `allow_pickle=True` (it is read by an unpickler that builds tensors and plain "
            "values only)."
        )
    is_zip = zipfile.is_zipfile(path)  # files of old versions of torch are not, and cannot be mapped
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except (RuntimeError, EOFError, KeyError, AttributeError, TypeError, pickle.UnpicklingError) as error:
        asked = re.search(r"GLOBAL (\S+)", str(error))
        if asked or (is_zip and isinstance(error, pickle.UnpicklingError)):
            raise ValueError(
                f"{path.name!r} holds objects other than tensors and plain values and was not loaded"
                f"{f': it asks for {asked[1]}' if asked else ''}."
            ) from error
        cause = f"{type(error).__name__} {str(error).partition(chr(10))[0]}".strip()
        raise OSError(f"{path.name!r} is no complete training file ({cause}); fetch it again.") from error
    return join_state_dicts(content, path.name)


def join_state_dicts(content: Any, name: str) -> dict[str, StoredTensor]:
    content = content if isinstance(content, dict) else {}
    parts = {key: content.get(f"{key}_state_dict") for key in ("draft", "refiner")}
    if not all(isinstance(part, dict) for part in parts.values()):
        raise ValueError(
            f"{name!r} has no `draft_state_dict` and `refiner_state_dict`; it is no xPress training file."
        )
    if content.get("base_readout_state_dict") is not None:
        raise ValueError(f"`base_readout_state_dict` is set in {name!r}: low-rank base logits cannot be run.")
    if getattr(content.get("args"), "input_relu", False):
        raise ValueError(f"`args.input_relu` is set in {name!r}: the released head has no activation there.")
    tensors = {**parts["draft"], **{f"xpress_head.{key}": value for key, value in parts["refiner"].items()}}
    kinds = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
    stored = {}
    for key, value in tensors.items():
        if not isinstance(value, torch.Tensor):
            raise ValueError(f"`{key}` in {name!r} is no tensor but {type(value).__name__}.")
        # Slices of larger storages would drag these along when saved again.
        stored[key.removeprefix("model.")] = StoredTensor(
            tuple(value.shape), kinds.get(value.dtype, "other"), value.clone
        )
    return stored


def tensor_hash(tensor: torch.Tensor) -> str:
    """SHA-256 of dtype, shape and bytes."""
    digest = hashlib.sha256(f"{tensor.dtype}{list(tensor.shape)}".encode())
    digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def write_hashes(folder: str | os.PathLike) -> None:
    """Writes the hash of every tensor of a saved checkpoint beside it."""
    files = weight_files(str(folder), {})
    hashes = {name: tensor_hash(tensor.read()) for name, tensor in open_tensors(files).items()}
    text = json.dumps({"algorithm": "sha256", "tensors": dict(sorted(hashes.items()))}, indent=1)
    (Path(folder) / HASHES_NAME).write_text(text + "\n", encoding="utf-8")


def check_hashes(source: str, tensors: dict[str, StoredTensor], hashes: dict[str, Any]) -> None:
    """Raises `ValueError` naming the tensors whose values are not those that were saved."""
    stored = hashes.get("tensors")
    if hashes.get("algorithm") != "sha256" or not isinstance(stored, dict):
        raise ValueError(f"{HASHES_NAME} of {source!r} is damaged; delete it if you trust the weights.")
    changed = sorted(
        name for name in set(tensors) | set(stored) if name not in tensors or not _matches(tensors, stored, name)
    )
    if changed:
        raise ValueError(
            f"Checkpoint {source!r}: {changed} are not the tensors that were saved with it. Fetch it again; if the "
            f"change was meant, delete {HASHES_NAME}."
        )


def _matches(tensors: dict[str, StoredTensor], stored: dict[str, Any], name: str) -> bool:
    return stored.get(name) == tensor_hash(tensors[name].read())
