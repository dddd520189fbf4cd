"""Names and shapes of a drafter's tensors, from its config alone: checked before a single weight is allocated."""

from __future__ import annotations

import re
from collections.abc import Callable

from ..configuration import XPressConfig
from .fields import Shapes


def expected_shapes(config: XPressConfig) -> Shapes:
    """Every tensor of the drafter that `config` describes, by its name in our own layout."""
    shapes = fusion_shapes(config)
    for index in range(config.num_hidden_layers):
        shapes |= {f"backbone.layers.{index}.{key}": shape for key, shape in layer_shapes(config).items()}
    shapes["backbone.norm.weight"] = (config.hidden_size,)
    if config.refiner is not None:
        shapes |= {f"refiner.{key}": shape for key, shape in refiner_shapes(config).items()}
    if config.length_head is not None:
        shapes |= {f"length_head.{key}": shape for key, shape in length_head_shapes(config).items()}
    return shapes


def fusion_shapes(config: XPressConfig) -> Shapes:
    norm = {"fusion.norm.weight": (config.hidden_size,)}
    taps = len(config.target_layer_ids)
    if config.fusion == "layerwise":
        return {"fusion.mix": (config.num_hidden_layers, taps), **norm}
    return {"fusion.fc.weight": (config.hidden_size, taps * config.target_hidden_size), **norm}


def layer_shapes(config: XPressConfig) -> Shapes:
    hidden, width = config.hidden_size, config.intermediate_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    projections = {"q_proj": (queries, hidden), "k_proj": (keys, hidden), "v_proj": (keys, hidden)}
    projections["o_proj"] = (hidden, queries)
    shapes: Shapes = {f"self_attn.{name}.weight": shape for name, shape in projections.items()}
    if config.attention_bias:
        shapes |= {f"self_attn.{name}.bias": shape[:1] for name, shape in projections.items()}
    if config.fusion == "layerwise":
        shapes |= {f"self_attn.{name}_proj_target.weight": (keys, hidden) for name in ("k", "v")}
    shapes |= {f"self_attn.{name}_norm.weight": (config.head_dim,) for name in ("q", "k")}
    shapes |= {f"mlp.{name}_proj.weight": (width, hidden) for name in ("gate", "up")}
    shapes["mlp.down_proj.weight"] = (hidden, width)
    return shapes | {f"{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}


def refiner_shapes(config: XPressConfig) -> Shapes:
    rank, width, block = config.refiner["rank"], config.refiner["mlp_width"], config.block_size
    return {
        "token_embed.weight": (config.vocab_size, rank),
        "down_h.weight": (rank, config.hidden_size),
        "down_g.weight": (rank, config.hidden_size),
        "in_proj.weight": (rank, 3 * rank),
        "mixer": (rank, block, block),
        "gate_proj.weight": (width, rank),
        "up_proj.weight": (width, rank),
        "down_proj.weight": (rank, width),
        "readout.weight": (config.vocab_size, rank),
    }


def length_head_shapes(config: XPressConfig) -> Shapes:
    width = config.length_head["width"]
    return {
        "down.weight": (width, 2 * config.hidden_size),
        "down.bias": (width,),
        "residual.weight": (width, width),
        "residual.bias": (width,),
        "out.weight": (1, width),
        "out.bias": (1,),
    }


def check_shapes(
    source: str, config: XPressConfig, found: Shapes, spell: Callable[[str], str] = lambda name: name
) -> None:
    """Compares tensors (our names) with what the config describes; `spell` gives their names in the file.

    Raises:
        ValueError: names are missing or unexpected, or shapes differ; all are listed.
    """
    layers = [int(match[1]) for key in found if (match := re.match(r"backbone\.layers\.(\d+)\.", key))]
    count = max(layers) + 1 if layers else 0
    if config.num_hidden_layers > count:
        raise ValueError(
            f"Checkpoint {source!r} does not hold the weights that its config describes: `num_hidden_layers` is "
            f"{config.num_hidden_layers}, the tensors hold {count} layers. missing_keys: "
            f"['{spell(f'backbone.layers.{count}.*')}']."
        )
    expected = expected_shapes(config)
    problems = {
        "missing_keys": sorted(map(spell, set(expected) - set(found))),
        "unexpected_keys": sorted(map(spell, set(found) - set(expected))),
        "mismatched_keys": [
            f"{spell(key)}: {list(found[key])}, expected {list(expected[key])}"
            for key in sorted(set(expected) & set(found))
            if found[key] != expected[key]
        ],
    }
    listed = "; ".join(f"{kind}: {shortened(keys)}" for kind, keys in problems.items() if keys)
    if listed:
        raise ValueError(f"Checkpoint {source!r} does not hold the weights that its config describes. {listed}.")


def shortened(keys: list[str], most: int = 24) -> str:
    return str(keys) if len(keys) <= most else f"{keys[:most]} and {len(keys) - most} more"
