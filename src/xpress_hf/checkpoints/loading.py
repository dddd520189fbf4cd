"""Opens a checkpoint in any layout from a folder or the Hub: config, layout and tensors, no values read yet."""

from __future__ import annotations

import copy
import dataclasses
import logging
import os
from dataclasses import dataclass, field
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME
from transformers.utils.hub import extract_commit_hash

from ..configuration import XPressConfig
from .fields import Config, Source
from .files import (
    FLOATS,
    HASHES_NAME,
    TRAINING_FILE,
    StoredTensor,
    check_hashes,
    find_file,
    looked_in,
    open_tensors,
    open_training_file,
    read_json,
    weight_files,
)
from .layouts import Detection, Layout, detect, rename, rename_back, why_ignored
from .shapes import check_shapes

logger = logging.getLogger(__name__)

OWN = Layout("own", lambda config, shapes: None, (), lambda source: source.config)


@dataclass
class Checkpoint:
    """An opened checkpoint: config and tensors in our terms.

    Attributes:
        source: folder or Hub id.
        layout, reason: the layout it is stored in, and what gave it away.
        tensors: by our names; values are read on demand.
        ignored: tensors that are left aside (their names) and why.
        notes: what the user should know about the conversion.
        hashes: content of the file of hashes; `None` where there is none.
    """

    source: str
    config: XPressConfig
    layout: str
    reason: str
    tensors: dict[str, StoredTensor]
    ignored: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    hashes: dict[str, Any] | None = None

    @property
    def is_own(self) -> bool:
        return self.layout == OWN.name

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Copies of all values: views of the file would change with it, and are not aligned as kernels like it."""
        return {name: tensor.read().clone() for name, tensor in self.tensors.items()}

    def check_hashes(self) -> None:
        """Raises `ValueError` when values are not those that were saved; without a file of hashes nothing is read."""
        if self.hashes is not None:
            check_hashes(self.source, self.tensors, self.hashes)

    def remarks(self) -> list[str]:
        """What was noted and what was left aside, as sentences."""
        if not self.ignored:
            return list(self.notes)
        reasons = sorted(set(self.ignored.values()))
        return [*self.notes, f"ignored {sorted(self.ignored)}: {'; '.join(reasons)}."]

    def report(self) -> None:
        for line in self.remarks():
            logger.warning("%s (%s): %s", self.source, self.layout, line)


def open_checkpoint(
    source: str | os.PathLike,
    options: dict[str, Any] | None = None,
    config: XPressConfig | None = None,
    overrides: Config | None = None,
    tap_offset: int | None = None,
    allow_pickle: bool = False,
) -> Checkpoint:
    """Opens a checkpoint and checks that names and shapes of its tensors are those that its config describes.

    Args:
        source: folder or Hub id.
        options: arguments of `from_pretrained`; those that concern the Hub are used.
        config: used in place of the checkpoint's own config.
        overrides: fields of `XPressConfig` that replace those of the checkpoint.
        tap_offset: stored tap ids minus zero-based layers, for speculators files; 1 by default.
        allow_pickle: whether an xPress training file may be read.

    Raises:
        OSError: files are missing or broken.
        ValueError: the layout is unknown or refused, or config and tensors contradict each other.
    """
    source, options = str(source), options or {}
    stored_config, commit = read_config(source, options, config is not None)
    tensors, is_training_file = read_weights(source, options, allow_pickle)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    kind = stored_config.get("model_type")
    is_own = kind == XPressConfig.model_type if stored_config else "backbone.norm.weight" in shapes
    detection = Detection(OWN, "`model_type` is 'xpress'") if is_own else detect(stored_config, shapes)
    if is_training_file:
        layout = dataclasses.replace(detection.layout, name="xPress training file")
        detection = Detection(layout, f"its weights are the pickle {TRAINING_FILE!r}")
    facts = Source(stored_config, shapes, tap_offset, [])
    if config is None:
        config = build_config(detection.layout, facts, overrides or {})
    else:
        config = copy.deepcopy(config)
    config.check()
    if is_own:
        check_own_index(source, options)
    else:
        check_maps(tensors)
    ours, ignored = sort_tensors(tensors, detection.layout)
    stored_names = {rename(key, detection.layout.keys): key for key in tensors}

    def spell(name: str) -> str:
        return stored_names.get(name) or rename_back(name, detection.layout.keys) or name

    check_shapes(source, config, {name: tensor.shape for name, tensor in ours.items()}, spell)
    check_dtypes(source, {spell(name): tensor for name, tensor in ours.items()})
    config._name_or_path = source
    if commit is not None:
        config._commit_hash = commit
    path = find_file(source, HASHES_NAME, options) if is_own else None
    hashes = None if path is None else read_json(path, source)
    return Checkpoint(source, config, detection.layout.name, detection.reason, ours, ignored, facts.notes, hashes)


def read_config(source: str, options: dict[str, Any], is_optional: bool) -> tuple[Config, str | None]:
    """config.json and, from the Hub, the commit it belongs to."""
    path = find_file(source, "config.json", options)
    if path is None and is_optional:
        return {}, None
    if path is None:
        raise OSError(
            f"{source!r} has no config.json{looked_in(source, options)}; give a folder or Hub id that holds a drafter."
        )
    return read_json(path, source), extract_commit_hash(str(path), None)


def read_weights(source: str, options: dict[str, Any], allow_pickle: bool) -> tuple[dict[str, StoredTensor], bool]:
    """Tensors of the safetensors files, else of an xPress training file; whether it was the latter."""
    if files := weight_files(source, options):
        return open_tensors(files), False
    path = find_file(source, TRAINING_FILE, options)
    if path is None:
        raise OSError(
            f"{source!r} has neither model.safetensors nor model.safetensors.index.json"
            f"{looked_in(source, options)}; only those are read."
        )
    return open_training_file(path, allow_pickle), True


def check_own_index(source: str, options: dict[str, Any]) -> None:
    """Our own layout is loaded by transformers, which reads the sizes in an index."""
    path = find_file(source, SAFE_WEIGHTS_INDEX_NAME, options)
    if path is not None and not isinstance(read_json(path, source).get("metadata"), dict):
        raise OSError(f"{path.name} of {source!r} has no `metadata`; save the checkpoint again.")


def build_config(layout: Layout, source: Source, overrides: Config) -> XPressConfig:
    if source.tap_offset is not None and not layout.name.startswith("speculators"):
        raise ValueError(
            f"`tap_offset` is {source.tap_offset}, but the layout {layout.name!r} stores zero-based layers; leave it "
            "out."
        )
    try:
        return XPressConfig(**{**layout.fields(source), **overrides})
    except (StrictDataclassError, TypeError, AttributeError, KeyError, IndexError, OverflowError) as error:
        raise ValueError(f"config.json holds a value of the wrong kind ({error}); correct it.") from error


def sort_tensors(tensors: dict[str, StoredTensor], layout: Layout) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """(tensors under our names, ignored tensors with the reason)."""
    if layout is OWN:
        return dict(tensors), {}
    ours: dict[str, StoredTensor] = {}
    ignored: dict[str, str] = {}
    for key, tensor in tensors.items():
        name = rename(key, layout.keys)
        if name is None:
            ignored[key] = str(why_ignored(key))
        elif name in ours:
            raise ValueError(f"`{key}` is stored twice, under two names of the same tensor.")
        else:
            ours[name] = tensor
    return ours, ignored


def check_maps(tensors: dict[str, StoredTensor]) -> None:
    """A map between vocabularies of equal size must be the identity (offsets of zero)."""
    if "d2t" in tensors and bool(tensors["d2t"].read().any()):
        raise ValueError("`d2t` reorders the vocabulary; drafters with an own vocabulary cannot be run.")


def check_dtypes(source: str, tensors: dict[str, StoredTensor]) -> None:
    if bad := {name: tensor.dtype for name, tensor in tensors.items() if tensor.dtype not in FLOATS}:
        raise ValueError(
            f"Checkpoint {source!r} is quantised or damaged: weights must be one of {list(FLOATS)}, got {bad}."
        )
