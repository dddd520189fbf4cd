"""`XPressConfig` in terms of foreign layouts: the other direction of `fields`. Pure functions.

Each raises `ValueError` naming the field when the layout cannot say what the drafter is.
"""

from __future__ import annotations

from ..configuration import XPressConfig
from .fields import Config, by_layer_type


def own_config(config: XPressConfig) -> Config:
    values = {key: value for key, value in config.to_diff_dict().items() if not key.startswith("_")}
    return {**values, "architectures": ["XPressDrafter"]}


def layer_config(config: XPressConfig) -> Config:
    """The decoder layers as a Qwen3 config, rotary parameters in the old form that all readers know."""
    rope = dict(config.rope_parameters)
    theta = rope.pop("rope_theta")
    fields = (
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
        "sliding_window",
        "initializer_range",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
    )
    values = {name: getattr(config, name) for name in fields}
    slides = "sliding_attention" in config.layer_types
    values = {key: value for key, value in values.items() if value is not None or key == "sliding_window"}
    return {
        "model_type": "qwen3",
        **values,
        "use_sliding_window": slides,
        "max_window_layers": config.num_hidden_layers,
        "rope_theta": theta,
        "rope_scaling": None if rope.get("rope_type", "default") == "default" else rope,
        "tie_word_embeddings": False,
    }


def require_fill(config: XPressConfig) -> None:
    if config.slot_layout != "fill":
        raise ValueError(
            f"`slot_layout` is {config.slot_layout!r}: readers of this layout expect the anchor in slot 0 to predict "
            "nothing, and would read every slot one place early; use the layout 'speculators'."
        )


def zlab_config(config: XPressConfig) -> Config:
    require_fill(config)
    if config.target_hidden_size != config.hidden_size:
        raise ValueError(
            f"`target_hidden_size` is {config.target_hidden_size}: readers of this layout size the projection by "
            f"`hidden_size` ({config.hidden_size})."
        )
    inner: Config = {"mask_token_id": config.mask_token_id, "target_layer_ids": list(config.target_layer_ids)}
    direction: Config = {}
    per_layer = config.block_attention_per_layer
    if per_layer != default_directions(config):
        if len(set(per_layer)) > 1:
            raise ValueError(f"`block_attention` {per_layer}: this layout has one direction for all layers.")
        direction["is_causal"] = per_layer[0] == "causal"
        if direction["is_causal"]:
            inner["causal_head"] = True
    if config.min_visible_prefix > 1:
        inner["training_mode"] = "vp_drafter"
    if scale := (config.target or {}).get("embedding_scale"):
        inner["input_embedding_scale"] = scale
    known = {} if config.num_target_layers is None else {"num_target_layers": config.num_target_layers}
    return {
        "architectures": ["DFlashDraftModel"],
        **layer_config(config),
        **direction,
        **known,
        "block_size": config.block_size,
        "dflash_config": inner,
    }


def default_directions(config: XPressConfig) -> list[str]:
    directions = by_layer_type(config.layer_types)
    return directions if isinstance(directions, list) else [directions] * config.num_hidden_layers


def dflare_config(config: XPressConfig) -> Config:
    return {**zlab_config(config), "architectures": ["QwenDFlareDraftModel"]}


def adaflash_config(config: XPressConfig) -> Config:
    values = zlab_config(config)
    head = {
        "use_thresh_head_two_model": True,
        "thresh_head_bottleneck_dim": config.length_head["width"],
        "thresh_head_direct_len": True,
    }
    return {**values, "dflash_config": {**values["dflash_config"], **head}}


def serving_config(config: XPressConfig) -> Config:
    return {
        **zlab_config(config),
        "architectures": ["Qwen3XPressModel"],
        "xpress_rank": config.refiner["rank"],
        "xpress_mlp_hidden": config.refiner["mlp_width"],
        "xpress_block_size": config.block_size,
        "xpress_num_passes": default_sweeps(config),
        "sample_from_anchor": False,
    }


def default_sweeps(config: XPressConfig) -> int:
    chosen = (config.speculation or {}).get("sweeps")
    return config.refiner["sweeps"] if chosen is None else chosen


def speculators_config(config: XPressConfig) -> Config:
    if config.vocab_size is None:
        raise ValueError("`vocab_size` is missing, but this layout needs it; load the drafter with `vocab_size=...`.")
    if (config.target or {}).get("embedding_scale"):
        raise ValueError("`target.embedding_scale` has no place in this layout.")
    if config.target_hidden_size != config.hidden_size:
        raise ValueError(
            f"`target_hidden_size` is {config.target_hidden_size}: the library sizes the projection by `hidden_size` "
            f"({config.hidden_size})."
        )
    directions = config.block_attention_per_layer
    free = set(directions) == {"bidirectional"}
    if not free and directions != default_directions(config):
        raise ValueError(
            f"`block_attention` {directions}: in this layout full layers are bidirectional, and sliding layers are "
            "all causal or all bidirectional."
        )
    kind = "dflash" if config.refiner is None else "xpress"
    layer = layer_config(config)
    return {
        "architectures": ["DFlashSpeculator" if kind == "dflash" else "XPressSpeculator"],
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "transformer_layer_config": layer,
        "draft_vocab_size": config.vocab_size,
        "block_size": config.block_size,
        "target_hidden_size": config.target_hidden_size,
        "aux_hidden_state_layer_ids": [layer_id + 1 for layer_id in config.target_layer_ids],
        "mask_token_id": config.mask_token_id,
        "sliding_window_non_causal": free and "sliding_attention" in config.layer_types,
        "sample_from_anchor": config.slot_layout == "shift",
        **({} if kind == "dflash" else speculators_refiner(config)),
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": config.num_draft_tokens}],
            "verifier": {"name_or_path": (config.target or {}).get("name"), "architectures": []},
        },
    }


def speculators_refiner(config: XPressConfig) -> Config:
    rank, width = config.refiner["rank"], config.refiner["mlp_width"]
    if width % rank:
        raise ValueError(
            f"`refiner.mlp_width` ({width}) must be a multiple of `refiner.rank` ({rank}): this layout stores their "
            "ratio."
        )
    return {
        "xpress_rank": rank,
        "xpress_mlp_ratio": width // rank,
        "num_jacobi_passes": default_sweeps(config),
        "xpress_backbone": "dflash",
    }
