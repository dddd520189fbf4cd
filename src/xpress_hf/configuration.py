"""What a drafter checkpoint is (`XPressConfig`) and how it is run (`SpeculationConfig`)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

from .rotary import check_rope, is_positive

SLOT_LAYOUTS = ("fill", "shift")
FUSIONS = ("concat", "layerwise")
BLOCK_ATTENTIONS = ("bidirectional", "causal")
LAYER_TYPES = ("full_attention", "sliding_attention")

# Types that a drafter computes in; others are storage only, and torch builds no model in them.
DTYPES = ("float64", "float32", "float16", "bfloat16")

# Far above any drafter; a larger number in a file is damage, and lists of that length would be built from it.
MOST_LAYERS = 1000

_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "sliding_window",
    "num_target_layers",
    "target_hidden_size",
    "block_size",
    "min_visible_prefix",
)

# Keys that `PreTrainedConfig` reads or writes beside its declared fields.
_TRANSFORMERS_KEYS = {
    "architectures",
    "attn_implementation",
    "auto_map",
    "dtype",
    "experts_implementation",
    "model_type",
    "name_or_path",
    "rope_scaling",
    "rope_theta",
    "torch_dtype",
    "transformers_version",
    "use_cache",
    "_attn_implementation",
    "_commit_hash",
}


def is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass
class SpeculationConfig:
    """How a drafter is run; `None` means the checkpoint's default. Set on `drafter.speculation`, saved with it.

    Args:
        sweeps: Jacobi sweeps of the refiner per block. 0 = the bare drafter.
        draft_length: drafted tokens verified per cycle, at most `config.num_draft_tokens`. The whole block is always
            drafted, since backbone and refiner were trained on it; only the head of the draft is then verified. "auto"
            picks the length with the most tokens per second from times and acceptance that are measured while
            decoding, and drafts nothing where that is fastest (our loop; the same seed may then give another text).
        top_candidates: number C of base candidates per slot that the refiner may choose from (facts: top-C readout).
            `None` = exact readout over the whole vocabulary.
        loop: "own" runs our loop, for one sequence or many; "stock" runs the assisted-decoding loop of transformers,
            for one sequence. `None` = "own".
        verification: how drafts of a sampled text are judged. "token": one by one (arXiv 2211.17192); "block": as a
            whole (arXiv 2403.10444), which keeps at least as many on average at the same law and takes our loop.
            `None` = "token". Greedy decoding keeps matching drafts either way.
        compile: whether verifications of the target and blocks of the drafter run through `torch.compile`, with the
            `compile_config` of the call, on caches of fixed length (our loop, one sequence). `None` = no.
    """

    sweeps: int | None = None
    draft_length: int | str | None = None
    top_candidates: int | None = None
    loop: str | None = None
    verification: str | None = None
    compile: bool | None = None

    def __post_init__(self):
        for name, choices in (("loop", ("own", "stock")), ("verification", ("token", "block"))):
            if (value := getattr(self, name)) not in (None, *choices):
                raise ValueError(f"`{name}` must be {choices[0]!r}, {choices[1]!r} or None, got {value!r}.")
        if not isinstance(self.compile, bool | None):
            raise ValueError(f"`compile` must be True, False or None, got {self.compile!r}.")
        for name, lowest in (("sweeps", 0), ("draft_length", 1), ("top_candidates", 1)):
            value = getattr(self, name)
            if name == "draft_length" and value == "auto":
                continue
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < lowest):
                other = "'auto' or None" if name == "draft_length" else "None"
                raise ValueError(f"`{name}` must be an integer >= {lowest}, {other}, got {value!r}.")

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> SpeculationConfig:
        known = {field.name for field in dataclasses.fields(cls)}
        if unknown := sorted(set(values) - known):
            raise ValueError(f"`speculation` has unknown keys {unknown}; known keys are {sorted(known)}.")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """The fields that were set, so that a saved checkpoint keeps `None` = default."""
        return {key: value for key, value in dataclasses.asdict(self).items() if value is not None}


class XPressConfig(PreTrainedConfig):
    """Configuration of an [`XPressDrafter`]: a block-diffusion backbone and, optionally, a causal refiner.

    Symbols: L taps, H drafter hidden size, B `block_size` (anchor included), V target vocabulary, r refiner rank.

    Args:
        vocab_size: rows V of the target's output head.
        hidden_size: width H of the drafter; must equal the target's embedding width, whose table it borrows.
        intermediate_size: width of the SwiGLU MLP.
        num_hidden_layers: drafter layers.
        num_attention_heads, num_key_value_heads, head_dim: attention sizes.
        hidden_act: activation of the MLP.
        rms_norm_eps: epsilon of every RMSNorm.
        attention_bias: whether q/k/v/o projections carry biases.
        attention_dropout: dropout of attention weights in training.
        max_position_embeddings: longest context in tokens that the drafter was made for.
        rope_parameters: rotary parameters as in transformers, for example `{"rope_type": "default", "rope_theta":
            1e6}`.
        layer_types: one of "full_attention" | "sliding_attention" per layer.
        sliding_window: visible rows of a sliding layer, the current row included.
        block_attention: "bidirectional" | "causal" inside the block, for all layers or as a list, one per layer.
        target_layer_ids: zero-based decoder layers of the target that are tapped, read at `hidden_states[i + 1]`;
            their order is the order of concatenation. Required: a guessed list loads cleanly and drafts badly.
        num_target_layers: decoder layers of the target.
        target_hidden_size: width of each tap. Default: `hidden_size`.
        block_size: slots of a block, anchor included.
        mask_token_id: id that fills the slots to be drafted. Required.
        slot_layout: "fill" (slot k predicts position anchor + k, slot 0 is given) or "shift" (slot k predicts
            anchor + k + 1, all slots predict).
        fusion: "concat" (DFlash: one projection of all taps) or "layerwise" (DFlare: a learned mix per layer and own
            context key/value projections).
        min_visible_prefix: tokens at the head of a block that are visible to the drafter: 1 = the anchor alone.
        refiner: `None` (bare DFlash) or `{"rank": r, "mlp_width": m, "sweeps": default sweeps}`.
        length_head: `None` or `{"width": bottleneck width}`: the adaptive length head of AdaFlash.
        target: facts about the target that the drafter was trained with (name, revision, dtype, template switches).
            `{"embedding_scale": s}` there overrides the factor that the target itself applies to its embeddings.
        speculation: default [`SpeculationConfig`] of this checkpoint, as a dict.

    Raises:
        ValueError: a required key is missing, a key is unknown, or values contradict each other.
    """

    model_type = "xpress"
    keys_to_ignore_at_inference = ["cache", "past_key_values"]

    vocab_size: int | None = None
    hidden_size: int = 1024
    intermediate_size: int = 3072
    num_hidden_layers: int = 5
    num_attention_heads: int = 16
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    attention_dropout: float = 0.0
    max_position_embeddings: int = 40960
    initializer_range: float = 0.02
    rope_parameters: dict | None = None
    layer_types: list[str] | None = None
    sliding_window: int | None = None
    block_attention: str | list[str] = "bidirectional"
    target_layer_ids: list[int] | None = None
    num_target_layers: int | None = None
    target_hidden_size: int | None = None
    block_size: int = 16
    mask_token_id: int | None = None
    slot_layout: str = "fill"
    fusion: str = "concat"
    min_visible_prefix: int = 1
    refiner: dict | None = None
    length_head: dict | None = None
    target: dict | None = None
    speculation: dict | None = None
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs):
        known = {field.name for field in dataclasses.fields(self)} | _TRANSFORMERS_KEYS
        if unknown := sorted(set(kwargs) - known):
            raise ValueError(f"`XPressConfig` got unknown keys {unknown}; remove them or correct their spelling.")
        older_name = kwargs.pop("torch_dtype", None)
        self.dtype: str | torch.dtype | None = older_name if self.dtype is None else self.dtype
        self._check_types()
        if isinstance(self.dtype, str):
            self.dtype = self.dtype.removeprefix("torch.")
        self.num_key_value_heads = self.num_key_value_heads or self.num_attention_heads
        self.head_dim = self.head_dim or self.hidden_size // self.num_attention_heads
        self.target_hidden_size = self.target_hidden_size or self.hidden_size
        if self.layer_types is None:
            self.layer_types = ["full_attention"] * self.num_hidden_layers
        super().__post_init__(**kwargs)
        # `AutoConfig` probes classes without arguments; anything given is checked whole.
        if self.target_layer_ids is not None or self.mask_token_id is not None or self.vocab_size is not None:
            self.check()

    def check(self) -> None:
        """Raises `ValueError` naming the first field that breaks a rule."""
        for name in ("target_layer_ids", "mask_token_id"):
            if getattr(self, name) is None:
                raise ValueError(
                    f"`{name}` is missing: it cannot be guessed from other keys; add it to the drafter's config.json."
                )
        self._check_choices()
        self._check_sizes()
        self._check_dtype()
        check_rope(self.rope_parameters or {}, self.head_dim)
        if self.refiner is not None:
            self._check_refiner()
        if self.length_head is not None:
            self._check_length_head()
        if self.speculation is not None:
            SpeculationConfig.from_dict(self.speculation)

    def _check_types(self) -> None:
        """Numbers and lists as they come from a JSON file written by others, before anything is computed from them."""
        self._check_dtype()
        for name in _SIZES:
            value = getattr(self, name)
            if value is not None and (not is_integer(value) or value < 1):
                raise ValueError(f"`{name}` must be an integer >= 1, got {value!r}.")
        if self.num_hidden_layers > MOST_LAYERS:
            raise ValueError(f"`num_hidden_layers` must be at most {MOST_LAYERS}, got {self.num_hidden_layers}.")
        if self.mask_token_id is not None and not is_integer(self.mask_token_id):
            raise ValueError(f"`mask_token_id` must be an integer, got {self.mask_token_id!r}.")
        if not is_positive(self.rms_norm_eps):
            raise ValueError(f"`rms_norm_eps` must be a number > 0, got {self.rms_norm_eps!r}.")
        for name in ("attention_dropout", "initializer_range"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0 <= value < 1:
                raise ValueError(f"`{name}` must be a number in [0, 1), got {value!r}.")
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            value = getattr(self, name)
            if value is not None and not all(
                is_integer(one) for one in (value if isinstance(value, list) else [value])
            ):
                raise ValueError(f"`{name}` must be an integer, a list of them, or null, got {value!r}.")
        for name in ("attention_bias", "tie_word_embeddings"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"`{name}` must be true or false, got {getattr(self, name)!r}.")
        for name, kind in (("target_layer_ids", int), ("layer_types", str)):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, list | tuple) and all(isinstance(v, kind) for v in value)):
                raise ValueError(f"`{name}` must be a list of {kind.__name__}, got {value!r}.")
        for name in ("rope_parameters", "refiner", "length_head", "target", "speculation"):
            if getattr(self, name) is not None and not isinstance(getattr(self, name), dict):
                raise ValueError(f"`{name}` must be a dict or null, got {getattr(self, name)!r}.")
        if self.hidden_act not in ACT2FN:
            raise ValueError(f"`hidden_act` must be an activation of transformers, got {self.hidden_act!r}.")

    def _check_dtype(self) -> None:
        if self.dtype is not None and str(self.dtype).removeprefix("torch.") not in DTYPES:
            raise ValueError(f"`dtype` must be one of {list(DTYPES)} or null, got {self.dtype!r}.")

    def _check_choices(self) -> None:
        choices = [("slot_layout", [self.slot_layout], SLOT_LAYOUTS), ("fusion", [self.fusion], FUSIONS)]
        choices.append(("layer_types", self.layer_types, LAYER_TYPES))
        choices.append(("block_attention", self.block_attention_per_layer, BLOCK_ATTENTIONS))
        for name, values, allowed in choices:
            for value in values:
                if value not in allowed:
                    raise ValueError(f"`{name}` must be one of {list(allowed)}, got {value!r}.")

    def _check_sizes(self) -> None:
        for name in ("layer_types", "block_attention"):
            value = getattr(self, name)
            if isinstance(value, list) and len(value) != self.num_hidden_layers:
                raise ValueError(
                    f"`{name}` needs one entry per layer (num_hidden_layers={self.num_hidden_layers}), got {value}."
                )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"`num_attention_heads` ({self.num_attention_heads}) must be a multiple of "
                f"`num_key_value_heads` ({self.num_key_value_heads})."
            )
        if self.block_size < 2:
            raise ValueError(f"`block_size` counts the anchor and must be >= 2, got {self.block_size}.")
        if not self.target_layer_ids or min(self.target_layer_ids) < 0:
            raise ValueError(f"`target_layer_ids` must hold layer numbers >= 0, got {self.target_layer_ids}.")
        if self.num_target_layers is not None and max(self.target_layer_ids) >= self.num_target_layers:
            raise ValueError(
                f"`target_layer_ids` {self.target_layer_ids} must be below `num_target_layers` "
                f"({self.num_target_layers})."
            )
        if self.vocab_size is not None and not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"`mask_token_id` must lie in [0, vocab_size={self.vocab_size}), got {self.mask_token_id}."
            )
        if "sliding_attention" in self.layer_types and not self.sliding_window:
            raise ValueError("`sliding_window` is missing although `layer_types` has sliding layers.")
        if not 1 <= self.min_visible_prefix < self.block_size:
            raise ValueError(
                f"`min_visible_prefix` must lie in [1, block_size - 1 = {self.block_size - 1}], "
                f"got {self.min_visible_prefix}."
            )
        if self.fusion == "layerwise" and self.target_hidden_size != self.hidden_size:
            raise ValueError(
                "`fusion`='layerwise' mixes taps without a projection: `target_hidden_size` must equal `hidden_size`, "
                f"got {self.target_hidden_size} and {self.hidden_size}."
            )

    def _check_refiner(self) -> None:
        known = {"rank", "mlp_width", "sweeps"}
        if unknown := sorted(set(self.refiner) - known):
            raise ValueError(f"`refiner` has unknown keys {unknown}; known keys are {sorted(known)}.")
        for name, lowest in (("rank", 1), ("mlp_width", 1), ("sweeps", 0)):
            value = self.refiner.get(name)
            if not isinstance(value, int) or value < lowest:
                raise ValueError(f"`refiner.{name}` must be an integer >= {lowest}, got {value!r}.")
        if self.vocab_size is None:
            raise ValueError("`vocab_size` is missing: a refiner owns [vocab_size, rank] tables.")

    def _check_length_head(self) -> None:
        width = self.length_head.get("width")
        if set(self.length_head) != {"width"} or not is_integer(width) or width < 1:
            raise ValueError(f'`length_head` must be {{"width": integer >= 1}} or null, got {self.length_head!r}.')

    @property
    def num_draft_tokens(self) -> int:
        """D: tokens drafted per block."""
        return self.block_size - 1 if self.slot_layout == "fill" else self.block_size

    @property
    def block_attention_per_layer(self) -> list[str]:
        if isinstance(self.block_attention, list):
            return self.block_attention
        return [self.block_attention] * self.num_hidden_layers
