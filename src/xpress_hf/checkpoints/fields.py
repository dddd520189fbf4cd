"""Config fields of foreign layouts in terms of `XPressConfig`. Pure functions on dicts.

Fields that a file leaves out are read from the tensors where they can be; fields that it gives are kept and compared
with the tensors when the checkpoint is opened. Sizes that config files are known to get wrong (width, rank and block
of the refiner) always come from the tensors.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from transformers import AutoConfig

from ..rotary import is_positive

Config = dict[str, Any]
Shapes = dict[str, tuple[int, ...]]

# Fields that mean the same in every layout derived from Qwen3.
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
    "num_target_layers",
    "target_hidden_size",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "dtype",
)

# (field, values that change nothing, what another value would need)
UNSUPPORTED_FIELDS = (
    ("logit_scale", (None, 1, 1.0), "a factor on the draft logits that the target itself does not apply"),
    ("output_multiplier", (None, 1, 1.0), "a factor on the draft logits that the target itself does not apply"),
    ("attention_value_scale", (None, 1, 1.0), "scaled attention values"),
    ("partial_rotary_factor", (None, 1, 1.0), "rotary embedding of a part of each head"),
    ("attention_k_eq_v", (None, False), "attention with shared keys and values"),
    ("use_swa", (None, False), "attention sinks and windows given by `swa_window_size`"),
    ("xpress_backbone", (None, "dflash"), "the convolutions of DFlash2"),
    ("xpress_selector", (None, False), "the candidate selector of DFlash2"),
)


@dataclass
class Source:
    """A foreign checkpoint without its values: config, shapes by name (without a leading `model.`), and what the user
    said about it. Conversions append to `notes` what the user should know."""

    config: Config
    shapes: Shapes
    tap_offset: int | None = None
    notes: list[str] = field(default_factory=list)

    def nested(self, name: str) -> Config:
        value = self.config.get(name) or {}
        if not isinstance(value, dict):
            raise ValueError(f"`{name}` must be a dict in config.json, got {value!r}.")
        return value


def either(source: Source, key: str, nested: str = "dflash_config") -> Any:
    """A field that files carry at the top level or in `dflash_config`; two different values are an error."""
    top, inner = source.config.get(key), source.nested(nested).get(key)
    if top is not None and inner is not None and top != inner:
        raise ValueError(f"`{key}` is {top!r} at the top level and {inner!r} in `{nested}`; keep the right one.")
    return top if top is not None else inner


def required(source: Source, key: str) -> Any:
    value = either(source, key)
    if value is None:
        raise ValueError(f"`{key}` is missing, at the top level and in `dflash_config`; add it to config.json.")
    return value


def flag(value: Any, name: str) -> bool | None:
    """A switch of a config file; anything but true, false and null is an error, since a text would count as true."""
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"`{name}` must be true or false, got {value!r}.")
    return value


def check_supported(config: Config) -> None:
    """Raises `ValueError` for a field that changes what the drafter computes in a way that is not built here."""
    for name, neutral, needed in UNSUPPORTED_FIELDS:
        if (value := config.get(name)) not in neutral:
            raise ValueError(f"`{name}` is {value!r}: this checkpoint cannot be run faithfully without {needed}.")


def layer_fields(source: Source, config: Config) -> Config:
    """Sizes of the decoder layers: as the config says, and where it is silent, as the tensors are."""
    check_supported(config)
    found = {key: config[key] for key in SHARED_FIELDS if config.get(key) is not None}
    if "dtype" not in found and config.get("torch_dtype") is not None:
        found["dtype"] = config["torch_dtype"]
    for key, value in sizes_from_tensors(source.shapes).items():
        found.setdefault(key, value)
    found["rope_parameters"] = rope_parameters(source, config)
    types = layer_types(config, found)
    if types is not None:
        found["layer_types"] = types
        if "sliding_attention" in types:
            found["sliding_window"] = config.get("sliding_window")
    return found


def sizes_from_tensors(shapes: Shapes) -> Config:
    """What the tensors alone tell about the decoder layers; names that are missing tell nothing."""
    layers = [int(match[1]) for key in shapes if (match := re.match(r"layers\.(\d+)\.", key))]
    found: Config = {"num_hidden_layers": max(layers) + 1} if layers else {}
    for key, name in (
        ("hidden_size", "norm.weight"),
        ("head_dim", "layers.0.self_attn.q_norm.weight"),
        ("intermediate_size", "layers.0.mlp.gate_proj.weight"),
    ):
        if shapes.get(name):
            found[key] = shapes[name][0]
    for key, name in (("num_attention_heads", "q_proj"), ("num_key_value_heads", "k_proj")):
        shape = shapes.get(f"layers.0.self_attn.{name}.weight")
        if shape and found.get("head_dim") and shape[0] >= found["head_dim"]:
            found[key] = shape[0] // found["head_dim"]
    return found


def layer_types(config: Config, sizes: Config) -> list[str] | None:
    """Explicit types, else what `use_sliding_window` and `max_window_layers` of a Qwen3 config mean; `None` = full."""
    if config.get("layer_types"):
        return config["layer_types"]
    if not flag(config.get("use_sliding_window"), "use_sliding_window") or config.get("sliding_window") is None:
        return None
    first = config.get("max_window_layers", 28)  # the default of Qwen3's config
    if not isinstance(first, int):
        raise ValueError(f"`max_window_layers` must be an integer, got {first!r}.")
    count = sizes.get("num_hidden_layers", 0)
    return ["sliding_attention" if index >= first else "full_attention" for index in range(count)]


def rope_parameters(source: Source, config: Config) -> Config:
    """Old form (`rope_theta`, `rope_scaling` at the top level) and new form (`rope_parameters`) -> new form."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(given, dict):
        raise ValueError(f"`rope_parameters` must be a dict, got {given!r}.")
    parameters = {key: value for key, value in given.items() if value is not None}
    if parameters and all(isinstance(value, dict) for value in parameters.values()):
        distinct = list(parameters.values())
        if any(value != distinct[0] for value in distinct):
            raise ValueError("`rope_parameters` differ by layer type; one rotary table serves all layers here.")
        parameters = dict(distinct[0])
    check_supported(parameters)
    if "mrope_section" in parameters:
        # All axes count the same positions in text, where the sections make no difference.
        source.notes.append("`mrope_section` is left out: a drafter counts text positions only.")
        parameters = {key: value for key, value in parameters.items() if not key.startswith("mrope_")}
        if parameters.get("rope_type", parameters.get("type")) == "mrope":
            parameters["rope_type"] = "default"
    kind = parameters.pop("type", "default")
    parameters.setdefault("rope_type", kind)
    theta = parameters.get("rope_theta", config.get("rope_theta"))
    if config.get("rope_theta") not in (None, theta):
        raise ValueError(
            f"`rope_theta` is {config['rope_theta']!r} at the top level and {theta!r} in the rotary parameters; keep "
            "the right one."
        )
    if not is_positive(theta):
        raise ValueError(
            f"`rope_theta` must be a number > 0, at the top level or in `rope_parameters`, got {theta!r}; add it to "
            "config.json."
        )
    parameters["rope_theta"] = float(theta)
    return parameters


def block_attention(source: Source, types: list[str] | None) -> str | list[str]:
    """Direction inside the block: JetSpec's `causal_head`, then `is_causal`, then `dflash_config.causal`, then by
    layer: sliding layers are causal, full ones bidirectional, the rule that serving engines and the trainers of these
    files share (facts/dflash 1.7)."""
    inner = source.nested("dflash_config")
    places = ((inner, "causal_head"), (source.config, "is_causal"), (inner, "causal"))
    for place, name in places:
        if (causal := flag(place.get(name), name)) is not None:
            return "causal" if causal else "bidirectional"
    return by_layer_type(types)


def by_layer_type(types: list[str] | None) -> str | list[str]:
    if not types or "sliding_attention" not in types:
        return "bidirectional"
    return ["causal" if kind == "sliding_attention" else "bidirectional" for kind in types]


def slot_layout(source: Source, default: str = "fill") -> str:
    """Whether slots predict their own place or the next one, by either of the switches that say so."""
    shifts = [flag(either(source, name), name) for name in ("sample_from_anchor", "shift_label")]
    if True in shifts and False in shifts:
        raise ValueError("`sample_from_anchor` and `shift_label` must agree, got {} and {}.".format(*shifts))
    return "shift" if True in shifts else "fill" if False in shifts else default


def zlab_fields(source: Source, default_slot_layout: str = "fill") -> Config:
    """z-lab DFlash and what descends from it: Qwen3 fields, `dflash_config`, `block_size` in either place."""
    found = layer_fields(source, source.config)
    check_supported(source.nested("dflash_config"))
    for key in ("block_size", "mask_token_id", "target_layer_ids"):
        found[key] = required(source, key)
    for key in ("num_target_layers", "input_embedding_scale"):
        value = either(source, key)
        if value is not None and key == "input_embedding_scale":
            found["target"] = {"embedding_scale": value}
        elif value is not None:
            found[key] = value
    found["slot_layout"] = slot_layout(source, default_slot_layout)
    found["block_attention"] = block_attention(source, found.get("layer_types"))
    found["fusion"] = "layerwise" if "layer_fusion_weights" in source.shapes else "concat"
    if either(source, "training_mode") == "vp_drafter":
        # Blocks are trained with at least two visible tokens (facts/trees A2).
        found["min_visible_prefix"] = min(2, found["block_size"] - 1)
    return found


def deepspec_fields(source: Source) -> Config:
    """DeepSpec's DFlash: keys at the top level; every slot predicts the token behind it unless the file denies it."""
    return zlab_fields(source, "shift")


def native_fields(source: Source) -> Config:
    """The block drafter of transformers itself: keys at the top level, all layers bidirectional. Its saved configs
    leave out what equals the class's defaults, so they are completed by that class."""
    given = {key: value for key, value in source.config.items() if key != "model_type"}
    complete = AutoConfig.for_model("muse_glimmer_assistant", **given).to_dict()
    if source.config.get("target_layer_ids") is None:
        source.notes.append(f"`target_layer_ids` are the defaults of the class, {complete['target_layer_ids']}.")
    found = layer_fields(source, complete)
    for key in ("block_size", "mask_token_id", "target_layer_ids"):
        found[key] = complete[key]
    return {**found, "block_attention": "bidirectional"}


def adaflash_fields(source: Source) -> Config:
    """z-lab DFlash with a length head, whose width comes from its tensors."""
    if not flag(either(source, "thresh_head_direct_len"), "thresh_head_direct_len"):
        raise ValueError(
            "`thresh_head_direct_len` is not true: this length head predicts a confidence threshold, not a length, "
            "and cannot be used here; remove its tensors to load the drafter alone."
        )
    key = next(
        (name for name in ("thresh_head_two_model.down.bias", "thresh_head.down.bias") if name in source.shapes), None
    )
    if key is None:
        raise ValueError("The length head is incomplete; missing key: 'thresh_head_two_model.down.bias'.")
    return {**zlab_fields(source), "length_head": {"width": source.shapes[key][0]}}


def refiner_fields(source: Source, mixer: str, gate: str, table: str, sweeps: Any, stated_block: Any) -> Config:
    """Rank, width, block and vocabulary of a refiner from the tensors of these names; a note where the config states
    another block."""
    if missing := [key for key in (mixer, gate, table) if len(source.shapes.get(key, ())) < 2]:
        raise ValueError(f"The xPress head is incomplete; missing keys: {missing}.")
    if len(source.shapes[mixer]) != 3:
        raise ValueError(f"`{mixer}` must have shape [rank, block, block], got {list(source.shapes[mixer])}.")
    rank, block_size, _ = source.shapes[mixer]
    if stated_block not in (None, block_size):
        source.notes.append(
            f"`block_size` is {stated_block} in the config; the mixer was trained for {block_size} slots."
        )
    return {
        "block_size": block_size,
        "vocab_size": source.shapes[table][0],
        "refiner": {
            "rank": rank,
            "mlp_width": source.shapes[gate][0],
            "sweeps": 6 if sweeps is None else sweeps,
        },
    }


def serving_fields(source: Source) -> Config:
    """Published xPress layout, and the training file once its two state dicts are joined under these names."""
    config = source.config
    if slot_layout(source) == "shift":
        raise ValueError(
            "`sample_from_anchor` or `shift_label` is true: the serving layout of xPress is for the fill layout only."
        )
    if config.get("xpress_mixer_format", "raw") != "raw":
        raise ValueError(
            f"`xpress_mixer_format` is {config['xpress_mixer_format']!r}; only the raw mixer can be loaded, since a "
            "folded one would be folded twice."
        )
    names = ("xpress_head.mix.L", "xpress_head.mlp.gate_proj.weight", "xpress_head.w1.weight")
    refiner = refiner_fields(source, *names, config.get("xpress_num_passes"), either(source, "block_size"))
    block = {"block_size": refiner["block_size"]}
    inner = {**source.nested("dflash_config"), **block}
    view = Source({**config, **block, "dflash_config": inner}, source.shapes, source.tap_offset, source.notes)
    return {**zlab_fields(view), **refiner}


def speculators_fields(source: Source) -> Config:
    """The layout of the speculators library: nested layer config, tap ids that count the embedding output as 0."""
    config = source.config
    check_supported(config)
    layers = source.nested("transformer_layer_config")
    if not layers:
        raise ValueError("`transformer_layer_config` is missing; add it to config.json.")
    # The nested config is often a copy of the target's, whose dtype need not be that of these weights.
    dtype = config.get("dtype") or config.get("torch_dtype")
    found = layer_fields(source, layers if dtype is None else {**layers, "dtype": dtype})
    for key in ("block_size", "mask_token_id"):
        if config.get(key) is None:
            raise ValueError(f"`{key}` is missing; add it to config.json.")
        found[key] = config[key]
    if config.get("target_hidden_size") is not None:
        found["target_hidden_size"] = config["target_hidden_size"]
    offset = 1 if source.tap_offset is None else source.tap_offset
    found["target_layer_ids"] = shifted_taps(config.get("aux_hidden_state_layer_ids"), offset)
    found["slot_layout"] = "shift" if flag(config.get("sample_from_anchor"), "sample_from_anchor") else "fill"
    types = found.get("layer_types")
    free = flag(config.get("sliding_window_non_causal"), "sliding_window_non_causal")
    found["block_attention"] = "bidirectional" if free else by_layer_type(types)
    if verifier := Source(source.nested("speculators_config"), {}).nested("verifier").get("name_or_path"):
        found["target"] = {"name": verifier}
    if config["speculators_model_type"] == "xpress":
        names = ("refiner_head.mix_l", "refiner_head.mlp_gate.weight", "refiner_head.token_embed.weight")
        found.update(refiner_fields(source, *names, config.get("num_jacobi_passes"), found["block_size"]))
    return found


def shifted_taps(ids: Any, offset: int) -> list[int]:
    """Stored tap ids minus `offset` = zero-based decoder layers."""
    if not isinstance(ids, list) or not all(isinstance(one, int) for one in ids) or not ids:
        raise ValueError(
            f"`aux_hidden_state_layer_ids` must be a list of layer numbers, got {ids!r}: taps cannot be guessed."
        )
    taps = [one - offset for one in ids]
    if min(taps) < 0:
        raise ValueError(
            f"`aux_hidden_state_layer_ids` {ids} with `tap_offset` {offset} gives layer {min(taps)}: the output of "
            "the embedding cannot be tapped. Pass `tap_offset=0` if the file holds zero-based layers."
        )
    return taps
