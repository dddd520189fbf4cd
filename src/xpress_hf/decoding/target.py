"""What a drafter needs of its target: embeddings, output head with its scaling and soft cap, and taps."""

from __future__ import annotations

import torch
from accelerate.utils import align_module_device
from torch import nn
from transformers import PreTrainedModel

from ..configuration import XPressConfig


class Target:
    """Borrowed parts of a frozen causal LM. Holds references for one call or one training run, owns nothing.

    Args:
        model: any causal LM of transformers, PEFT-wrapped or not.
        embedding_scale: factor on the output of the input embedding module. `None` = none beyond what the module
            itself applies, as Gemma's scaled embedding does.
    """

    def __init__(self, model: PreTrainedModel, embedding_scale: float | None = None):
        self.model = model
        self.config = model.config.get_text_config()
        self.num_layers = self.config.num_hidden_layers
        self.embedding = model.get_input_embeddings()
        self.head = model.get_output_embeddings()
        if embedding_scale is None:
            # Granite and its relatives scale in the forward pass, outside the embedding module.
            embedding_scale = getattr(self.config, "embedding_multiplier", None)
        self.embedding_scale = 1.0 if embedding_scale is None else float(embedding_scale)

    @classmethod
    def for_drafter(cls, model: PreTrainedModel, config: XPressConfig) -> Target:
        return cls(model, (config.target or {}).get("embedding_scale"))

    @property
    def head_dtype(self) -> torch.dtype:
        """What the output head computes in."""
        weight = dense_weight(self.head)
        return self.model.dtype if weight is None else weight.dtype

    @property
    def has_linear_head(self) -> bool:
        """Whether single rows of the output head can be read, as no quantised or wrapped head allows."""
        return type(self.head) is nn.Linear and self.head.weight.is_floating_point()

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """[B, K] ids -> [B, K, H] as the first decoder layer of the target would see them.

        Additive position tables (GPT-2) are left out, since the drafter rotates positions itself, and so is a norm on
        the embeddings that belongs to the target's own stream (Muse).
        """
        ids = ids.to(device_of(self.embedding, ids.device))
        if isinstance(getattr(self.embedding, "embed_norm", None), nn.Module):
            with align_module_device(self.embedding):
                embeds = nn.functional.embedding(ids, self.embedding.weight)
        else:
            embeds = self.embedding(ids)
        return embeds if self.embedding_scale == 1.0 else embeds * self.embedding_scale

    def logits(self, hidden_states: torch.Tensor, token_ids: torch.Tensor | None = None) -> torch.Tensor:
        """Drafter hidden states [..., H] -> logits [..., V] by the target's head, scaled and capped as it does.

        The target's final norm is not applied: the drafter has its own. With `token_ids` [W] only these tokens' logits
        [..., W] are computed, which takes a head that is a plain linear layer.
        """
        # 3-D slices leave the fast bf16 path of CPU kernels; contiguous 2-D rows do not.
        rows = hidden_states.reshape(-1, hidden_states.shape[-1]).contiguous()
        rows = rows.to(device_of(self.head, self.model.device), self.head_dtype)
        if token_ids is None:
            logits = self.head(rows)
        else:
            token_ids = token_ids.to(rows.device)
            with align_module_device(self.head):
                weight, bias = self.head.weight[token_ids], self.head.bias
                logits = nn.functional.linear(rows, weight, None if bias is None else bias[token_ids])
        if (scale := getattr(self.config, "logit_scale", None)) is not None:
            logits = logits * scale
        if (divisor := getattr(self.config, "logits_scaling", None)) is not None:
            logits = logits / divisor
        if (cap := getattr(self.config, "final_logit_softcapping", None)) is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits.unflatten(0, hidden_states.shape[:-1])


def dense_weight(module: nn.Module) -> torch.Tensor | None:
    """The weight of a module if it is a matrix of real numbers; quantised modules pack it, wrap it in a method or have
    none."""
    weight = getattr(module, "weight", None)
    return weight if isinstance(weight, torch.Tensor) and weight.is_floating_point() else None


def device_of(module: nn.Module, default: torch.device) -> torch.device:
    """Where a module computes: weights that accelerate has offloaded lie elsewhere until it runs, quantised ones may
    be no tensors at all (`default`)."""
    hook = getattr(module, "_hf_hook", None)
    for one in (hook, *getattr(hook, "hooks", ())):
        if (device := getattr(one, "execution_device", None)) is not None:
            return torch.device(device)
    return next((tensor.device for tensor in (*module.parameters(), *module.buffers())), default)


def tap_request(target_layer_ids: list[int]) -> list[int]:
    """Value of `output_hidden_states` that makes the target keep what `taps` reads, and not the states of all layers.

    Versions of transformers disagree whether the numbers count layers or entries of the full tuple: both are asked.
    """
    return sorted({index for layer in target_layer_ids for index in (layer, layer + 1)})


def taps(hidden_states: tuple[torch.Tensor | None, ...], target_layer_ids: list[int], num_layers: int) -> torch.Tensor:
    """Concatenated outputs of the tapped decoder layers, [B, S, L * H].

    `hidden_states` is the full tuple of `num_layers` + 1 entries, the embeddings first, or what `tap_request` gives:
    that tuple with holes or, in older versions, one entry per layer.

    Raises:
        ValueError: the target keeps another number of states, or states that are not [B, S, H], so that it cannot be
            told which of them a drafter reads.
    """
    first = len(hidden_states) - num_layers
    tapped = [hidden_states[layer + first] for layer in target_layer_ids] if first in (0, 1) else []
    if not tapped or any(states.ndim != 3 for states in tapped):
        shapes = sorted({tuple(states.shape) for states in tapped})
        raise ValueError(
            f"`target_layer_ids`: one state [B, S, H] per layer is read, the target of {num_layers} layers gives "
            f"{len(hidden_states)} states{f' of shape {shapes}' if shapes else ''}. "
            "Generate without `assistant_model`."
        )
    # Layers of a target may lie on several devices.
    return torch.cat([states.to(tapped[-1].device) for states in tapped], dim=-1)


def check_kind(model: PreTrainedModel) -> None:
    """Raises `ValueError` for kinds of models that no block drafter can serve. Runs before any forward."""
    text_config = model.config.get_text_config()
    if model.config.is_encoder_decoder:
        raise ValueError(
            f"`assistant_model`: {type(model).__name__} is an encoder-decoder model; block drafters need a causal LM."
        )
    # GPT-NeoX leaves the flag of its config alone: what the layers were built as counts.
    encodes = getattr(text_config, "is_decoder", None) is False
    if encodes and any(getattr(module, "is_decoder", None) is False for module in model.get_decoder().modules()):
        raise ValueError(
            f"`is_decoder`: {type(model).__name__} attends in both directions, so that no token can be verified "
            "before the ones behind it are known. Load it with `is_decoder=True`, or generate without "
            "`assistant_model`."
        )
    if getattr(text_config, "cross_attention_layers", None):
        raise ValueError(
            f"`assistant_model`: {type(model).__name__} attends to images in layers of their own, whose cached keys "
            "do not follow the text and cannot be rolled back after a rejected draft. Generate without "
            "`assistant_model`."
        )
    if model.get_output_embeddings() is None:
        raise ValueError(
            f"`assistant_model`: {type(model).__name__} has no output head to borrow; load it as a causal LM."
        )


def check_pair(model: PreTrainedModel, config: XPressConfig) -> None:
    """Raises `ValueError`, naming both sides, when a drafter cannot read this target. Runs before any forward."""
    check_kind(model)
    text_config = model.config.get_text_config()
    width, layers, rows = text_config.hidden_size, text_config.num_hidden_layers, text_config.vocab_size
    embedding_width = getattr(model.get_input_embeddings(), "embedding_dim", width)
    for name, expected, found in (
        ("target_hidden_size", config.target_hidden_size, width),
        ("hidden_size", config.hidden_size, embedding_width),
    ):
        if expected != found:
            raise ValueError(
                f"`{name}`: the drafter was made for a target of width {expected}, this target has {found}. "
                "Load the drafter that belongs to this target."
            )
    # Entry N of the hidden states is replaced by the normed state, so the last layer's raw output cannot be read.
    if max(config.target_layer_ids) >= layers - 1:
        raise ValueError(
            f"`target_layer_ids` {config.target_layer_ids}: layer {max(config.target_layer_ids)} is out of range; the "
            f"target has {layers} layers and the last one cannot be tapped (highest allowed: {layers - 2})."
        )
    if config.num_target_layers is not None and config.num_target_layers != layers:
        raise ValueError(
            f"`num_target_layers`: the drafter was made for a target of {config.num_target_layers} layers, this one "
            f"has {layers}. Load the drafter that belongs to this target."
        )
    if config.vocab_size is not None and config.refiner is not None and config.vocab_size != rows:
        raise ValueError(
            f"`vocab_size`: the refiner was trained for {config.vocab_size} tokens, the target has {rows}."
        )
    if not 0 <= config.mask_token_id < rows:
        raise ValueError(
            f"`mask_token_id` {config.mask_token_id} lies outside the target's vocabulary of {rows} tokens."
        )
