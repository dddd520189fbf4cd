"""Checkpoint layouts as tables: how to recognise one, what its keys and config fields mean. Pure functions on dicts.

Facts: dflash 7 (layouts), xpress 5 (serving layout). One row of `LAYOUTS` per layout; the first that matches wins.
Further layouts are further rows; what cannot be run faithfully is a row of `REFUSED`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ..configuration import XPressConfig

Config = dict[str, Any]

# A leading `model.` is tolerated everywhere; these tensors belong to the target and are borrowed from it.
BORROWED = re.compile(r"^(embed_tokens|lm_head)\.")

BACKBONE_KEYS = (
    (r"^fc\.", "fusion.fc."),
    (r"^hidden_norm\.", "fusion.norm."),
    (r"^layer_fusion_weights$", "fusion.mix"),
    (r"^layers\.", "backbone.layers."),
    (r"^norm\.", "backbone.norm."),
)

SERVING_REFINER_KEYS = (
    (r"^xpress_head\.w1\.", "refiner.token_embed."),
    (r"^xpress_head\.w2\.", "refiner.readout."),
    (r"^xpress_head\.mix\.L$", "refiner.mixer"),
    (r"^xpress_head\.mlp\.", "refiner."),
    (r"^xpress_head\.(down_h|down_g|in_proj)\.", r"refiner.\1."),
)

# Config fields that mean the same in every layout derived from Qwen3.
SHARED_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "attention_bias",
    "attention_dropout",
    "max_position_embeddings",
    "layer_types",
    "num_target_layers",
    "target_hidden_size",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "dtype",
)


@dataclass(frozen=True)
class Layout:
    """One row: `matches(config, keys)`, the key renames in order, and the config conversion."""

    name: str
    matches: Callable[[Config, set[str]], bool]
    keys: tuple[tuple[str, str], ...]
    config: Callable[[Config, dict[str, tuple[int, ...]]], Config]


def rename(key: str, table: Iterable[tuple[str, str]]) -> str | None:
    """Our name of a tensor; `None` for tensors borrowed from the target; unknown keys stay as they are, so that
    loading reports them."""
    key = key.removeprefix("model.")
    if BORROWED.match(key):
        return None
    for pattern, replacement in table:
        if re.match(pattern, key):
            return re.sub(pattern, replacement, key)
    return key


def either(config: Config, key: str, nested: str = "dflash_config") -> Any:
    """A field that files carry at the top level or in `dflash_config`; two different values are an error."""
    top, inner = config.get(key), (config.get(nested) or {}).get(key)
    if top is not None and inner is not None and top != inner:
        raise ValueError(f"`{key}` is {top!r} at the top level and {inner!r} in `{nested}`; keep the right one.")
    return top if top is not None else inner


def block_attention(config: Config) -> str | list[str]:
    """Direction inside the block: `is_causal`, then `dflash_config.causal`, then by layer: sliding layers are causal,
    full ones bidirectional, the rule that serving engines and the trainers of these files share (facts/dflash 1.7)."""
    causal = config.get("is_causal")
    if causal is None:
        causal = (config.get("dflash_config") or {}).get("causal")
    if causal is not None:
        return "causal" if causal else "bidirectional"
    layer_types = config.get("layer_types") or []
    if "sliding_attention" not in layer_types:
        return "bidirectional"
    return ["causal" if kind == "sliding_attention" else "bidirectional" for kind in layer_types]


def rope_parameters(config: Config) -> dict[str, Any]:
    """Old form (`rope_theta`, `rope_scaling` at the top level) and new form (`rope_parameters`) -> new form."""
    parameters = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    parameters.setdefault("rope_type", parameters.pop("type", "default"))
    theta = parameters.get("rope_theta", config.get("rope_theta"))
    if theta is None:
        raise ValueError("`rope_theta` is missing, at the top level and in `rope_parameters`; add it to config.json.")
    parameters["rope_theta"] = float(theta)
    return parameters


def zlab_config(config: Config, shapes: dict[str, tuple[int, ...]]) -> Config:
    """z-lab DFlash and AngelSlim DFlare: Qwen3 fields, `dflash_config`, `block_size` in either place."""
    converted = {key: config[key] for key in SHARED_FIELDS if config.get(key) is not None}
    if "dtype" not in converted and config.get("torch_dtype") is not None:
        converted["dtype"] = config["torch_dtype"]
    for key in ("block_size", "mask_token_id", "target_layer_ids"):
        value = either(config, key)
        if value is None:
            raise ValueError(f"`{key}` is missing, at the top level and in `dflash_config`; add it to config.json.")
        converted[key] = value
    if "sliding_attention" in (config.get("layer_types") or []):
        converted["sliding_window"] = config.get("sliding_window")
    converted["rope_parameters"] = rope_parameters(config)
    converted["block_attention"] = block_attention(config)
    converted["fusion"] = "layerwise" if "layer_fusion_weights" in shapes else "concat"
    return converted


def serving_config(config: Config, shapes: dict[str, tuple[int, ...]]) -> Config:
    """Published xPress layout. Rank, width and block come from the tensors: config files are known to differ."""
    if config.get("sample_from_anchor"):
        raise ValueError("`sample_from_anchor` is true: the serving layout of xPress exists for the fill layout only.")
    if config.get("xpress_mixer_format", "raw") != "raw":
        raise ValueError(
            f"`xpress_mixer_format` is {config['xpress_mixer_format']!r}; only the raw mixer can be loaded, since a "
            "folded one would be folded twice."
        )
    converted = zlab_config(config, shapes)
    needed = ("xpress_head.mix.L", "xpress_head.mlp.gate_proj.weight", "xpress_head.w1.weight")
    if missing := [key for key in needed if key not in shapes]:
        raise ValueError(f"The xPress head is incomplete; missing keys: {missing}.")
    rank, block_size, _ = shapes["xpress_head.mix.L"]
    if block_size != converted["block_size"]:
        raise ValueError(
            f"`block_size` is {converted['block_size']}, but the mixer was trained for {block_size} slots."
        )
    converted["vocab_size"] = shapes["xpress_head.w1.weight"][0]
    converted["refiner"] = {
        "rank": rank,
        "mlp_width": shapes["xpress_head.mlp.gate_proj.weight"][0],
        "sweeps": config.get("xpress_num_passes", 6),
    }
    return converted


def has_key(pattern: str) -> Callable[[Config, set[str]], bool]:
    return lambda config, keys: any(re.match(pattern, key.removeprefix("model.")) for key in keys)


def has_dflash_config(config: Config, keys: set[str]) -> bool:
    names = " ".join(config.get("architectures") or [])
    return "dflash_config" in config or "DFlash" in names or "DFlare" in names


LAYOUTS = (
    Layout("xPress serving", has_key(r"xpress_head\."), BACKBONE_KEYS + SERVING_REFINER_KEYS, serving_config),
    Layout("z-lab DFlash / AngelSlim DFlare", has_dflash_config, BACKBONE_KEYS, zlab_config),
)

# (what it is, how it is recognised, what would be needed)
REFUSED = (
    ("DSpark / Markov head", has_key(r"markov_head\."), "its sequential Markov head"),
    (
        "DFlash2",
        has_key(r"(candidate_selector\.|layers\.\d+\.(attention|mlp)_conv\.)"),
        "its convolutions and selector",
    ),
    ("a reduced draft vocabulary", has_key(r"(d2t|t2d)$"), "an own output head with a draft-to-target map"),
    (
        "speculators",
        lambda config, keys: "speculators_model_type" in config,
        "a reader for the layout of the speculators library",
    ),
)


def detect(config: Config, keys: set[str]) -> Layout:
    """The layout of a checkpoint that is not our own.

    Raises:
        ValueError: the layout is known but cannot be run faithfully, or is unknown.
    """
    for name, matches, needed in REFUSED:
        if matches(config, keys):
            raise ValueError(f"This checkpoint is {name}; it cannot be run faithfully without {needed}.")
    for layout in LAYOUTS:
        if layout.matches(config, keys):
            return layout
    known = ", ".join(["own (model_type 'xpress')", *[layout.name for layout in LAYOUTS]])
    raise ValueError(
        f"No known drafter layout: model_type {config.get('model_type')!r}, architectures "
        f"{config.get('architectures')}. Known layouts: {known}."
    )


def convert_config(layout: Layout, config: Config, shapes: dict[str, tuple[int, ...]]) -> XPressConfig:
    """Foreign config and tensor shapes (foreign names, without `model.`) -> `XPressConfig`."""
    return XPressConfig(**layout.config(config, shapes))
