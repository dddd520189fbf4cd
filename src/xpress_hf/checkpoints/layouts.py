"""Checkpoint layouts as tables: how to recognise one, what its keys and config fields mean. Pure functions on dicts.

Facts: dflash 7, xpress 5, adaflash 5, trees A2 and C1. One row of `LAYOUTS` per layout; the first that matches wins.
What cannot be run faithfully is a row of `REFUSED`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from .fields import (
    Config,
    Shapes,
    Source,
    adaflash_fields,
    deepspec_fields,
    native_fields,
    serving_fields,
    speculators_fields,
    zlab_fields,
)

# (prefix there, prefix here). Reading takes the first row whose left side fits, writing the first whose right side
# does.
KeyTable = tuple[tuple[str, str], ...]

BACKBONE_KEYS: KeyTable = (
    ("fc.", "fusion.fc."),
    ("hidden_norm.", "fusion.norm."),
    ("layers.", "backbone.layers."),
    ("norm.", "backbone.norm."),
)
DFLARE_KEYS: KeyTable = (("layer_fusion_weights", "fusion.mix"), *BACKBONE_KEYS)
NATIVE_KEYS: KeyTable = (
    ("encoder.fc.", "fusion.fc."),
    ("encoder.output_norm_enc.", "fusion.norm."),
    *BACKBONE_KEYS[2:],
)
SERVING_REFINER_KEYS: KeyTable = (
    ("xpress_head.w1.", "refiner.token_embed."),
    ("xpress_head.w2.", "refiner.readout."),
    ("xpress_head.mix.L", "refiner.mixer"),
    ("xpress_head.mlp.gate_proj.", "refiner.gate_proj."),
    ("xpress_head.mlp.up_proj.", "refiner.up_proj."),
    ("xpress_head.mlp.down_proj.", "refiner.down_proj."),
    ("xpress_head.down_h.", "refiner.down_h."),
    ("xpress_head.down_g.", "refiner.down_g."),
    ("xpress_head.in_proj.", "refiner.in_proj."),
)
SPECULATORS_REFINER_KEYS: KeyTable = (
    ("refiner_head.token_embed.", "refiner.token_embed."),
    ("refiner_head.readout.", "refiner.readout."),
    ("refiner_head.mix_l", "refiner.mixer"),
    ("refiner_head.mlp_gate.", "refiner.gate_proj."),
    ("refiner_head.mlp_up.", "refiner.up_proj."),
    ("refiner_head.mlp_down.", "refiner.down_proj."),
    ("refiner_head.down_h.", "refiner.down_h."),
    ("refiner_head.down_g.", "refiner.down_g."),
    ("refiner_head.in_proj.", "refiner.in_proj."),
)
LENGTH_HEAD_KEYS: KeyTable = (
    ("thresh_head_two_model.down.", "length_head.down."),
    ("thresh_head_two_model.res.0.", "length_head.residual."),
    ("thresh_head_two_model.out.", "length_head.out."),
    ("thresh_head.down.", "length_head.down."),
    ("thresh_head.res.0.", "length_head.residual."),
    ("thresh_head.out.", "length_head.out."),
)

# (tensors that are left aside, why)
IGNORED = (
    (r"(embed_tokens|verifier_embed_tokens)\.", "the target's embedding is used"),
    (r"(lm_head|verifier_lm_head|verifier_norm)\.", "the target's output head is used"),
    (r"(d2t|t2d)$", "it maps the whole vocabulary onto itself"),
    (r"(xpress_head\.mix\.tril|refiner_head\.causal_tril)$", "the triangle is a constant"),
    (r"(.*\.)?rotary_emb\.inv_freq$", "it follows from the config"),
    (r"mask_embedding(\.weight)?$", "the mask token's row of the target's embedding is used"),
)

# `None` = no match, else what was seen.
Recogniser = Callable[[Config, Shapes], str | None]


@dataclass(frozen=True)
class Layout:
    """One row: how the layout is recognised, its key names, and the conversion of its config."""

    name: str
    recognise: Recogniser
    keys: KeyTable
    fields: Callable[[Source], Config]


@dataclass(frozen=True)
class Detection:
    """The layout of a checkpoint and what gave it away."""

    layout: Layout
    reason: str


def rename(key: str, table: Iterable[tuple[str, str]]) -> str | None:
    """Our name of a tensor; `None` for tensors that are left aside; unknown keys stay as they are, so that loading
    reports them."""
    key = key.removeprefix("model.")
    if why_ignored(key) is not None:
        return None
    return next((ours + key.removeprefix(theirs) for theirs, ours in table if key.startswith(theirs)), key)


def rename_back(key: str, table: Iterable[tuple[str, str]]) -> str | None:
    """Their name of one of our tensors; `None` when their layout has no place for it."""
    return next((theirs + key.removeprefix(ours) for theirs, ours in table if key.startswith(ours)), None)


def why_ignored(key: str) -> str | None:
    """Why a tensor is left aside; `None` when it is not."""
    return next((reason for pattern, reason in IGNORED if re.match(pattern, key)), None)


def any_key(pattern: str) -> Recogniser:
    def recognise(config: Config, shapes: Shapes) -> str | None:
        found = next((key for key in sorted(shapes) if re.match(pattern, key)), None)
        return None if found is None else f"it has the tensor `{found}`"

    return recognise


def any_architecture(pattern: str) -> Recogniser:
    def recognise(config: Config, shapes: Shapes) -> str | None:
        names = config.get("architectures")
        found = [name for name in names if re.search(pattern, str(name))] if isinstance(names, list) else []
        return f"`architectures` names {found[0]!r}" if found else None

    return recognise


def field_value(name: str, pattern: str) -> Recogniser:
    """A field at the top level or in `dflash_config` whose text matches."""

    def recognise(config: Config, shapes: Shapes) -> str | None:
        inner = config.get("dflash_config")
        values = [config.get(name), inner.get(name) if isinstance(inner, dict) else None]
        found = next((value for value in values if value is not None and re.fullmatch(pattern, str(value))), None)
        return None if found is None else f"`{name}` is {found!r}"

    return recognise


def first_of(*recognisers: Recogniser) -> Recogniser:
    def recognise(config: Config, shapes: Shapes) -> str | None:
        return next((reason for one in recognisers if (reason := one(config, shapes)) is not None), None)

    return recognise


def all_of(*recognisers: Recogniser) -> Recogniser:
    def recognise(config: Config, shapes: Shapes) -> str | None:
        reasons = [one(config, shapes) for one in recognisers]
        return None if None in reasons else " and ".join(str(reason) for reason in reasons)

    return recognise


def has_field(name: str) -> Recogniser:
    return lambda config, shapes: f"its config has `{name}`" if config.get(name) is not None else None


def lacks_field(name: str) -> Recogniser:
    return lambda config, shapes: f"its config has no `{name}`" if config.get(name) is None else None


def reduced_vocabulary(config: Config, shapes: Shapes) -> str | None:
    """A draft vocabulary smaller than the target's: an own head with fewer rows, or a map between the two."""
    nested = config.get("transformer_layer_config")
    rows = (nested if isinstance(nested, dict) else config).get("vocab_size")
    for key in ("lm_head.weight", "d2t", "refiner_head.readout.weight", "xpress_head.w2.weight"):
        if shapes.get(key) and isinstance(rows, int) and shapes[key][0] < rows:
            return f"`{key}` has {shapes[key][0]} rows, the target {rows} tokens"
    if ("d2t" in shapes or "t2d" in shapes) and not ("d2t" in shapes and isinstance(rows, int)):
        return "it has a map between vocabularies (`d2t`, `t2d`)"
    return None


def own_mask_embedding(config: Config, shapes: Shapes) -> str | None:
    # Servers of xPress leave this tensor aside.
    if any(key.startswith("xpress_head.") for key in shapes):
        return None
    return any_key(r"mask_embedding")(config, shapes)


DFLASH_CONFIG = first_of(has_field("dflash_config"), any_architecture("DFlash|DFlare"))
LENGTH_HEAD = first_of(any_key(r"thresh_head(_two_model)?\."), field_value("use_thresh_head_two_model", "True"))

LAYOUTS = (
    Layout(
        "speculators XPress",
        field_value("speculators_model_type", "xpress"),
        BACKBONE_KEYS + SPECULATORS_REFINER_KEYS,
        speculators_fields,
    ),
    Layout("speculators DFlash", field_value("speculators_model_type", "dflash"), BACKBONE_KEYS, speculators_fields),
    Layout(
        "xPress serving",
        first_of(any_key(r"xpress_head\."), any_architecture("XPress")),
        BACKBONE_KEYS + SERVING_REFINER_KEYS,
        serving_fields,
    ),
    Layout("transformers-native", field_value("model_type", "muse_glimmer_assistant"), NATIVE_KEYS, native_fields),
    Layout("AdaFlash", LENGTH_HEAD, BACKBONE_KEYS + LENGTH_HEAD_KEYS, adaflash_fields),
    Layout(
        "AngelSlim DFlare",
        first_of(any_key("layer_fusion_weights$"), any_architecture("DFlare")),
        DFLARE_KEYS,
        zlab_fields,
    ),
    Layout("DeepSpec DFlash", any_architecture("DSpark"), BACKBONE_KEYS, deepspec_fields),
    Layout("JetSpec", all_of(DFLASH_CONFIG, field_value("causal_head", "True")), BACKBONE_KEYS, zlab_fields),
    Layout(
        "variable-prefix DFlash",
        all_of(DFLASH_CONFIG, field_value("training_mode", "vp_drafter")),
        BACKBONE_KEYS,
        zlab_fields,
    ),
    Layout("SpecForge DFlash", all_of(DFLASH_CONFIG, lacks_field("auto_map")), BACKBONE_KEYS, zlab_fields),
    Layout("z-lab DFlash", DFLASH_CONFIG, BACKBONE_KEYS, zlab_fields),
)

# (what it is, how it is recognised, what would be needed)
REFUSED: tuple[tuple[str, Recogniser, str], ...] = (
    (
        "quantised",
        first_of(
            has_field("quantization_config"),
            has_field("compression_config"),
            any_key(r".*\.(qweight|qzeros|scales|weight_scale\w*|weight_packed|weight_zero_point|g_idx|input_scale)$"),
        ),
        "a kernel for quantised weights; export it in bfloat16",
    ),
    (
        "DFlash2",
        first_of(
            any_key(r"(candidate_selector\.|layers\.\d+\.(attention|mlp)_conv\.)"),
            any_architecture("DFlash2"),
            field_value("speculators_model_type", "dflash2"),
        ),
        "its convolutions and its candidate selector",
    ),
    (
        "Domino",
        first_of(
            any_key(r"(prefix_gru|embed_proj)\."),
            any_architecture("Domino"),
            field_value("projector_type", "domino"),
            field_value("speculators_model_type", "domino"),
        ),
        "its recurrent correction of the logits",
    ),
    (
        "DSpark (Markov or confidence head)",
        first_of(
            any_key(r"(markov_head|logit_head|confidence_head|markov_w[12]|confidence_proj)\."),
            field_value("markov_rank", r"[1-9]\d*"),
            field_value("enable_confidence_head", "True"),
            field_value("speculators_model_type", "dspark"),
            field_value("projector_type", "dspark"),
        ),
        "its sequential Markov head",
    ),
    (
        "EAGLE",
        first_of(
            any_architecture("(?i)eagle"),
            field_value("model_type", "(?i)eagle.*"),
            field_value("speculators_model_type", "(?i).*eagle.*"),
            any_key(r"midlayer\."),
        ),
        "its autoregressive draft layer, which is no block drafter",
    ),
    (
        "DeepSpec for Gemma",
        first_of(any_architecture("Gemma4"), any_key(r"layers\.\d+\.(pre_feedforward_layernorm\.|layer_scalar$)")),
        "Gemma's own decoder layers",
    ),
    ("a drafter with a reduced vocabulary", reduced_vocabulary, "an own output head with a draft-to-target map"),
    (
        "a drafter with an own mask embedding",
        own_mask_embedding,
        "a vector for the mask slots that the target's embedding does not hold",
    ),
    (
        "an AdaFlash with other heads",
        first_of(any_key(r"(thresh_head_subsequent|prob_head)\."), field_value("use_prob_head", "True")),
        "heads that judge single tokens",
    ),
    (
        "a research variant of the xPress head",
        any_key(
            r"(xpress_head|refiner_head)\.(layers|lowrank\w*|res_gate|input_norm|post_norm|out_norm|mix_out|down_hg|"
            r"ro_down|base_down|base_up|conf_head)(\.|$)"
        ),
        "tensors that the released head does not have",
    ),
)


def detect(config: Config, shapes: Shapes) -> Detection:
    """The layout of a checkpoint that is not our own, from its config and shapes (names without `model.`).

    Raises:
        ValueError: the layout is known but cannot be run faithfully, or is unknown.
    """
    for name, recognise, needed in REFUSED:
        if (reason := recognise(config, shapes)) is not None:
            raise ValueError(f"This checkpoint is {name} ({reason}); it cannot be run faithfully without {needed}.")
    algorithm = config.get("speculators_model_type")
    for layout in LAYOUTS:
        # A file that names an algorithm of speculators is that or nothing, whatever else it looks like.
        if algorithm is not None and not layout.name.startswith("speculators"):
            continue
        if (reason := layout.recognise(config, shapes)) is not None:
            return Detection(layout, reason)
    known = ", ".join(["own (model_type 'xpress')", *[layout.name for layout in LAYOUTS]])
    kind = f"model_type {config.get('model_type')!r}"
    if algorithm is not None:
        kind = f"speculators_model_type {algorithm!r}"
    raise ValueError(
        f"No known drafter layout: {kind}, architectures {config.get('architectures')}. Known layouts: {known}."
    )
