"""A fresh drafter for a target: its config, and a start from copies of the target's last layers, which halves the
first loss against a random start."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from ..configuration import XPressConfig
from ..fingerprint import weights_hash
from ..modeling.drafter import XPressDrafter


def config_for_target(
    model: PreTrainedModel, target_layer_ids: list[int], mask_token_id: int, **overrides: Any
) -> XPressConfig:
    """Config of a drafter with the widths of its target. `overrides` are further fields of `XPressConfig`.

    Raises:
        ValueError: fields contradict each other.
    """
    config = model.config.get_text_config()
    copied = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
    )
    values = {name: getattr(config, name, None) for name in (*copied, "rms_norm_eps", "max_position_embeddings")}
    values |= {name: getattr(config, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    rope = dict(getattr(config, "rope_parameters", None) or {})
    values |= {
        "rope_parameters": {"rope_type": "default", "rope_theta": float(rope.get("rope_theta", 10000.0))},
        "num_target_layers": config.num_hidden_layers,
        "target_layer_ids": list(target_layer_ids),
        "mask_token_id": mask_token_id,
        "target": target_facts(model),
    }
    return XPressConfig(**{key: value for key, value in {**values, **overrides}.items() if value is not None})


def target_facts(model: PreTrainedModel) -> dict[str, Any]:
    """What tells later whether a drafter meets the target that it learned from."""
    facts = {
        "name": model.name_or_path or None,
        "revision": getattr(model.config, "_commit_hash", None),
        "dtype": str(model.dtype).removeprefix("torch."),
        "weights_hash": weights_hash(model),
    }
    return {name: value for name, value in facts.items() if value is not None}


def target_layers(model: PreTrainedModel) -> torch.nn.ModuleList:
    """Decoder layers of a target with separate q/k/v/o and gate/up/down projections (Llama, Qwen, Mistral, ...).

    Raises:
        ValueError: the target's layers are built differently.
    """
    decoder = model.get_decoder()
    layers = getattr(decoder, "layers", None)
    has_projections = layers is not None and hasattr(getattr(layers[0], "self_attn", None), "q_proj")
    if not has_projections or not hasattr(getattr(layers[0], "mlp", None), "gate_proj"):
        raise ValueError(
            f"{type(model).__name__}: its layers have no q/k/v projections to copy; start from random weights."
        )
    return layers


@torch.no_grad()
def initialize_from_target(drafter: XPressDrafter, model: PreTrainedModel, layer_ids: list[int] | None = None) -> None:
    """Copies target layers into the drafter, in place.

    The drafter's layers become copies of `layer_ids` (default: the target's last ones) and its final norm that of the
    target. A concat fusion passes the last tap on, which is close to what these layers read in the target.

    Raises:
        ValueError: sizes differ, or the target's layers cannot be copied.
    """
    layers = target_layers(model)
    count = len(drafter.backbone.layers)
    layer_ids = layer_ids or list(range(len(layers) - count, len(layers)))
    if len(layer_ids) != count:
        raise ValueError(f"`layer_ids` must name {count} target layers, got {layer_ids}.")
    for own, index in zip(drafter.backbone.layers, layer_ids, strict=True):
        theirs = layers[index]
        pairs = [(own.input_layernorm, theirs.input_layernorm)]
        pairs.append((own.post_attention_layernorm, theirs.post_attention_layernorm))
        pairs += [
            (getattr(own.self_attn, n), getattr(theirs.self_attn, n)) for n in ("q_proj", "k_proj", "v_proj", "o_proj")
        ]
        pairs += [(getattr(own.mlp, n), getattr(theirs.mlp, n)) for n in ("gate_proj", "up_proj", "down_proj")]
        if own.self_attn.own_context_projections:
            pairs.append((own.self_attn.k_proj_target, theirs.self_attn.k_proj))
            pairs.append((own.self_attn.v_proj_target, theirs.self_attn.v_proj))
        for mine, source in pairs:
            if mine.weight.shape != source.weight.shape:
                raise ValueError(
                    f"Target layer {index} does not fit the drafter: shapes {tuple(source.weight.shape)} and "
                    f"{tuple(mine.weight.shape)}; give the drafter the target's sizes."
                )
            mine.weight.copy_(source.weight)
    drafter.backbone.norm.weight.copy_(model.get_decoder().norm.weight)
    norms = [layers[index].input_layernorm.weight.float() for index in layer_ids]
    drafter.fusion.norm.weight.copy_(torch.stack(norms).mean(dim=0))
    if drafter.config.fusion == "concat":
        width = drafter.config.target_hidden_size
        last_tap = drafter.fusion.fc.weight[:, -width:]
        drafter.fusion.fc.weight.mul_(0.25)
        last_tap.add_(torch.eye(*last_tap.shape, dtype=last_tap.dtype))
