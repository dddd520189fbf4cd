"""What a checkpoint is, as plain values, without reading its weights."""

from __future__ import annotations

from typing import Any

from ..configuration import XPressConfig
from .loading import Checkpoint


def describe_checkpoint(checkpoint: Checkpoint) -> dict[str, Any]:
    """Layout, sizes, taps, what a target needs, parameter counts, and what is left aside: ready for JSON."""
    config = checkpoint.config
    dtypes = sorted({tensor.dtype for tensor in checkpoint.tensors.values()})
    return {
        "source": checkpoint.source,
        "layout": checkpoint.layout,
        "reason": checkpoint.reason,
        "block_size": config.block_size,
        "num_draft_tokens": config.num_draft_tokens,
        "slot_layout": config.slot_layout,
        "block_attention": config.block_attention,
        "target_layer_ids": list(config.target_layer_ids),
        "mask_token_id": config.mask_token_id,
        "fusion": config.fusion,
        "sizes": sizes(config),
        "refiner": config.refiner,
        "length_head": config.length_head,
        "parameters": parameter_counts(checkpoint),
        "dtypes": dtypes,
        "num_bytes": sum(tensor.num_bytes for tensor in checkpoint.tensors.values()),
        "target": requirements(config),
        "ignored": dict(sorted(checkpoint.ignored.items())),
        "notes": list(checkpoint.notes),
        "has_hashes": checkpoint.hashes is not None,
    }


def sizes(config: XPressConfig) -> dict[str, Any]:
    names = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    values = {name: getattr(config, name) for name in (*names, "head_dim", "vocab_size")}
    return {**values, "layer_types": list(config.layer_types), "sliding_window": config.sliding_window}


def parameter_counts(checkpoint: Checkpoint) -> dict[str, int]:
    """Parameters by part (fusion, backbone, refiner, length head) and in all."""
    counts: dict[str, int] = {}
    for name, tensor in checkpoint.tensors.items():
        part = name.split(".")[0]
        counts[part] = counts.get(part, 0) + tensor.num_elements
    return {**counts, "all": sum(counts.values())}


def requirements(config: XPressConfig) -> dict[str, Any]:
    """What a target must have for this drafter to run, and the target that the files name."""
    lowest = max(config.target_layer_ids) + 2  # the last layer's output cannot be tapped
    return {
        "named": (config.target or {}).get("name"),
        "hidden_size": config.target_hidden_size,
        "embedding_size": config.hidden_size,
        "num_hidden_layers": config.num_target_layers,
        "fewest_layers": lowest,
        "vocab_size": config.vocab_size if config.refiner is not None else None,
        "fewest_tokens": config.mask_token_id + 1,
    }


def misfits(config: XPressConfig, target_config: Any) -> list[str]:
    """Why a target with this config cannot be drafted for; empty when it can."""
    text, needs = target_config.get_text_config(), requirements(config)
    found = []
    for name, key in (("hidden_size", "hidden_size"), ("num_hidden_layers", "num_hidden_layers")):
        if needs[key] is not None and getattr(text, name) != needs[key]:
            found.append(f"`{name}` is {getattr(text, name)}, the drafter needs {needs[key]}")
    if text.num_hidden_layers < needs["fewest_layers"]:
        found.append(f"`num_hidden_layers` is {text.num_hidden_layers}, the taps need {needs['fewest_layers']}")
    if needs["vocab_size"] not in (None, text.vocab_size):
        found.append(f"`vocab_size` is {text.vocab_size}, the refiner needs {needs['vocab_size']}")
    if text.vocab_size < needs["fewest_tokens"]:
        found.append(f"`vocab_size` is {text.vocab_size}, the mask token has id {config.mask_token_id}")
    # Most targets have no such field: their embedding is as wide as their layers.
    width = getattr(text, "word_embed_proj_dim", text.hidden_size)
    if width != needs["embedding_size"]:
        found.append(f"its embedding is {width} wide, the drafter needs {needs['embedding_size']}")
    return found
