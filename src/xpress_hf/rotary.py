"""Rules of rotary parameters as config files state them."""

from __future__ import annotations

import math
from typing import Any

# Types of rotary embeddings, with the parameters that each cannot do without.
ROPE_TYPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor"),
}

ROPE_NUMBERS = {"rope_theta", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"}
ROPE_NUMBERS |= {"factor", "low_freq_factor", "high_freq_factor"}


def is_positive(value: Any) -> bool:
    """Whether a value of a JSON file is a finite number above zero."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def check_rope(rope: dict[str, Any], head_dim: int) -> None:
    """Raises `ValueError` naming the first parameter that is unknown, missing or of the wrong kind."""
    kind = rope.get("rope_type", "default")
    if not isinstance(kind, str) or kind not in ROPE_TYPES:
        raise ValueError(f"`rope_parameters.rope_type` must be one of {sorted(ROPE_TYPES)}, got {kind!r}.")
    if missing := [name for name in ROPE_TYPES[kind] if name not in rope]:
        raise ValueError(f"`rope_parameters` of type {kind!r} lacks {missing}.")
    for name in sorted(ROPE_NUMBERS & rope.keys()):
        if not is_positive(rope[name]):
            raise ValueError(f"`rope_parameters.{name}` must be a number > 0, got {rope[name]!r}.")
    for name in sorted({"short_factor", "long_factor"} & rope.keys()):
        value = rope[name]
        if not isinstance(value, list) or len(value) != head_dim // 2 or not all(map(is_positive, value)):
            raise ValueError(f"`rope_parameters.{name}` must be a list of {head_dim // 2} numbers > 0, got {value!r}.")
