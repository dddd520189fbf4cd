"""Writes drafters in the layouts that other projects read: z-lab, AdaFlash, AngelSlim, speculators, vLLM serving.

Tensors are read and written one shard at a time, so memory stays near the size of a shard.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers.utils.hub import convert_file_size_to_int

from ..configuration import XPressConfig
from ..modeling.drafter import XPressDrafter, is_drafter, unwrap_drafter
from .exported_fields import (
    adaflash_config,
    dflare_config,
    own_config,
    serving_config,
    speculators_config,
    zlab_config,
)
from .fields import Config
from .files import StoredTensor, write_hashes
from .layouts import (
    BACKBONE_KEYS,
    DFLARE_KEYS,
    LENGTH_HEAD_KEYS,
    SERVING_REFINER_KEYS,
    SPECULATORS_REFINER_KEYS,
    KeyTable,
    rename_back,
)
from .loading import Checkpoint, open_checkpoint
from .shapes import check_shapes
from .writing import complete_folder, write_shards

SAFETENSORS_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}


@dataclass(frozen=True)
class LayoutOut:
    """One layout out: its key names, its config, and which parts of a drafter it has a place for."""

    keys: KeyTable
    config: Callable[[XPressConfig], Config]
    fusion: str | None = "concat"
    holds_refiner: bool = False
    holds_length_head: bool = False
    needs: str | None = None


LAYOUTS_OUT = {
    "own": LayoutOut((("", ""),), own_config, None, True, True),
    "zlab": LayoutOut(BACKBONE_KEYS, zlab_config),
    "adaflash": LayoutOut(
        BACKBONE_KEYS + LENGTH_HEAD_KEYS, adaflash_config, holds_length_head=True, needs="length_head"
    ),
    "dflare": LayoutOut(DFLARE_KEYS, dflare_config, fusion="layerwise"),
    "serving": LayoutOut(BACKBONE_KEYS + SERVING_REFINER_KEYS, serving_config, holds_refiner=True, needs="refiner"),
    "speculators": LayoutOut(BACKBONE_KEYS + SPECULATORS_REFINER_KEYS, speculators_config, holds_refiner=True),
}


def export(
    source: str | os.PathLike | Checkpoint | XPressDrafter,
    folder: str | os.PathLike,
    to: str,
    drop_refiner: bool = False,
    drop_length_head: bool = False,
    max_shard_size: int | str = "2GB",
) -> list[str]:
    """Writes a drafter to `folder` in the layout `to`, one of `LAYOUTS_OUT`.

    Args:
        source: a checkpoint in any layout (folder or Hub id, read shard by shard), or a loaded drafter.
        folder: must not exist or be empty; appears only when it is complete.
        drop_refiner, drop_length_head: leave these parts out where the layout has no place for them.
        max_shard_size: longest file of weights, as a number of bytes or like "2GB".

    Returns:
        what the written files no longer say.

    Raises:
        ValueError: the layout has no place for something that the drafter has, or weights are not finite.
        OSError: files are missing or broken, or the folder is not empty.
    """
    if to not in LAYOUTS_OUT:
        raise ValueError(f"`to` must be one of {sorted(LAYOUTS_OUT)}, got {to!r}.")
    longest = shard_size(max_shard_size)
    checkpoint = as_checkpoint(source)
    shapes = {name: tensor.shape for name, tensor in checkpoint.tensors.items()}
    # A loaded drafter may carry adapters, which have to be merged first.
    check_shapes(checkpoint.source, checkpoint.config, shapes)
    config, lost = reduced_config(checkpoint.config, to, drop_refiner, drop_length_head)
    values = LAYOUTS_OUT[to].config(config)
    tensors = {}
    for name, tensor in checkpoint.tensors.items():
        if name.split(".")[0] in ("refiner", "length_head") and getattr(config, name.split(".")[0]) is None:
            continue
        tensors[str(rename_back(name, LAYOUTS_OUT[to].keys))] = tensor
    values["dtype"] = dtype_name(tensors)
    checkpoint.check_hashes()
    with complete_folder(Path(folder)) as unfinished:
        text = json.dumps(values, indent=2, sort_keys=True)
        (unfinished / "config.json").write_text(text + "\n", encoding="utf-8")
        write_shards(tensors, unfinished, longest)
        if to == "own":
            write_hashes(unfinished)
    return lost


def shard_size(size: int | str) -> int:
    """Bytes of a size given as a number or like "2GB"."""
    text = str(size)
    try:
        length = int(text) if text.isdecimal() else convert_file_size_to_int(text)
    except ValueError:
        length = 0
    if length <= 0:
        raise ValueError(f"`max_shard_size` must be a number of bytes > 0 or like '2GB', got {size!r}.")
    return length


def as_checkpoint(source: Any) -> Checkpoint:
    """An opened checkpoint, a folder, a Hub id, or a loaded drafter (wrapped or not) -> an opened checkpoint."""
    if isinstance(source, Checkpoint):
        return source
    if not is_drafter(source):
        return open_checkpoint(source)
    source = unwrap_drafter(source)
    config = copy.deepcopy(source.config)
    config.speculation = source.speculation.to_dict() or None
    tensors = {
        name: StoredTensor(tuple(value.shape), SAFETENSORS_NAMES[value.dtype], partial(plain_copy, value))
        for name, value in source.state_dict().items()
    }
    name = source.config._name_or_path or "the loaded drafter"
    return Checkpoint(name, config, "own", "it is loaded", tensors)


def plain_copy(value: torch.Tensor) -> torch.Tensor:
    return value.detach().to("cpu", copy=True).contiguous()


def dtype_name(tensors: dict[str, StoredTensor]) -> str:
    """The dtype that most values are stored in, as torch names it."""
    sizes: dict[str, int] = {}
    for tensor in tensors.values():
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.num_elements
    names = {short: str(dtype).removeprefix("torch.") for dtype, short in SAFETENSORS_NAMES.items()}
    return names[max(sizes, key=sizes.__getitem__)]


def reduced_config(
    config: XPressConfig, to: str, drop_refiner: bool, drop_length_head: bool
) -> tuple[XPressConfig, list[str]]:
    """(config of what is written, what is lost): parts without a place go only when that was asked for."""
    layout = LAYOUTS_OUT[to]
    config = copy.deepcopy(config)
    lost = []
    if layout.fusion not in (None, config.fusion):
        fit = "dflare" if config.fusion == "layerwise" else "zlab"
        raise ValueError(f"`fusion` is {config.fusion!r}, which the layout {to!r} cannot hold; use {fit!r}.")
    for name, holds, drop in (
        ("refiner", layout.holds_refiner, drop_refiner),
        ("length_head", layout.holds_length_head, drop_length_head),
    ):
        if getattr(config, name) is None or (holds and not drop):
            continue
        if not drop:
            raise ValueError(
                f"The drafter has a {name}, for which the layout {to!r} has no place; pass `drop_{name}=True` "
                f"(`--drop-{name.replace('_', '-')}`) to write the drafter without it."
            )
        setattr(config, name, None)
        lost.append(f"the {name.replace('_', ' ')}")
    if layout.needs is not None and getattr(config, layout.needs) is None:
        raise ValueError(f"The layout {to!r} is for drafters with a {layout.needs}, which this one lacks; use 'zlab'.")
    return config, lost + lost_fields(config, to)


def lost_fields(config: XPressConfig, to: str) -> list[str]:
    if to == "own":
        return []
    lost = []
    kept = {"embedding_scale"} if to != "speculators" else {"name"}
    if facts := sorted(set(config.target or {}) - kept):
        lost.append(f"facts about the target: {', '.join(facts)}")
    if defaults := sorted(set(config.speculation or {}) - ({"sweeps"} if config.refiner else set())):
        lost.append(f"defaults of speculation: {', '.join(defaults)}")
    if to == "speculators" and config.num_target_layers is not None:
        lost.append("num_target_layers")
    if config.min_visible_prefix > 1 and (to == "speculators" or config.min_visible_prefix != 2):
        lost.append(f"min_visible_prefix {config.min_visible_prefix}")
    if config.vocab_size is None:
        lost.append("nothing, but `vocab_size` is unknown and left out: readers may assume a default")
    return lost
