"""Block-diffusion backbone: queries come from the block, keys and values from context and block (DFlash, section 3).

Symbols: B batch, K block rows, S new context rows, T all visible rows (cached context, new context, block), H hidden.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3MLP,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    eager_attention_forward,
    rotate_half,
)

from ..configuration import XPressConfig

Rotary = tuple[torch.Tensor, torch.Tensor]


def rotate(states: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """Rotary embedding of [B, heads, rows, head_dim] by the last `rows` rows of cos and sin [B, >= rows, dim]."""
    rows = states.shape[-2]
    cos, sin = (table[:, None, -rows:] for table in rotary)
    return states * cos + rotate_half(states) * sin


class ContextAttention(nn.Module):
    """Attention of the block over [cached context ; new context ; block].

    The same key/value projections serve context and block, unless the fusion is layer-wise (DFlare), which gives the
    context its own. Context rows enter as the fusion left them, without the layer's input norm.
    """

    def __init__(self, config: XPressConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.scaling = config.head_dim**-0.5
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.attention_dropout = config.attention_dropout
        # Attention kernels read this flag when no mask is given; the mask alone decides here.
        self.is_causal = False
        bias = config.attention_bias
        query_width = config.num_attention_heads * config.head_dim
        kv_width = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_width, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=bias)
        self.o_proj = nn.Linear(query_width, config.hidden_size, bias=bias)
        self.q_norm = Qwen3RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.own_context_projections = config.fusion == "layerwise"
        if self.own_context_projections:
            self.k_proj_target = nn.Linear(config.hidden_size, kv_width, bias=False)
            self.v_proj_target = nn.Linear(config.hidden_size, kv_width, bias=False)

    def _keys_values(self, hidden_states: torch.Tensor, context: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[B, S, H] and [B, K, H] -> keys and values [B, kv_heads, S + K, head_dim], keys not rotated yet."""
        if self.own_context_projections:
            keys = torch.cat([self.k_proj_target(context), self.k_proj(hidden_states)], dim=1)
            values = torch.cat([self.v_proj_target(context), self.v_proj(hidden_states)], dim=1)
        else:
            # One product per weight for context and block: one over the contexts of all layers would come on top.
            rows = torch.cat([context, hidden_states], dim=1)
            keys, values = self.k_proj(rows), self.v_proj(rows)
        shape = (*keys.shape[:2], -1, self.head_dim)
        return self.k_norm(keys.view(shape)).transpose(1, 2), values.view(shape).transpose(1, 2)

    def forward(
        self,
        hidden_states: torch.Tensor,
        context: torch.Tensor,
        rotary: Rotary,
        attention_mask: torch.Tensor | None,
        cache: Cache | None,
    ) -> torch.Tensor:
        """hidden_states [B, K, H], context [B, S, H], additive mask [B, 1, K, T] -> [B, K, H]."""
        shape = (*hidden_states.shape[:2], -1, self.head_dim)
        queries = rotate(self.q_norm(self.q_proj(hidden_states).view(shape)).transpose(1, 2), rotary)
        keys, values = self._keys_values(hidden_states, context)
        keys = rotate(keys, rotary)
        if cache is not None:
            keys, values = cache.update(keys, values, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        dropout = self.attention_dropout if self.training else 0.0
        output, _ = attend(
            self, queries, keys, values, attention_mask, dropout=dropout, scaling=self.scaling, is_causal=False
        )
        return self.o_proj(output.reshape(*hidden_states.shape[:2], -1))


class BackboneLayer(GradientCheckpointingLayer):
    """Pre-norm decoder layer around `ContextAttention` and a SwiGLU MLP."""

    def __init__(self, config: XPressConfig, layer_idx: int):
        super().__init__()
        self.self_attn = ContextAttention(config, layer_idx)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self,
        hidden_states: torch.Tensor,
        context: torch.Tensor,
        rotary: Rotary,
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
    ) -> torch.Tensor:
        attended = self.self_attn(self.input_layernorm(hidden_states), context, rotary, attention_mask, cache)
        hidden_states = hidden_states + attended
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


def layer_visibility(
    config: XPressConfig, layer_idx: int, num_block_rows: int, num_rows: int, device: torch.device
) -> torch.Tensor | None:
    """Who sees whom in one layer, for one block whose rows are the last of `num_rows` rows.

    Queries: the K block rows. Keys: context rows, then the block. A full layer sees every context row, a sliding one
    only the last `sliding_window` rows, the query's own row included. Inside the block all rows see each other
    ("bidirectional", the window symmetric) or only earlier rows and themselves ("causal").

    Returns:
        bool [K, T], True = visible; `None` when everything is visible, which spares the kernels a mask.
    """
    window = config.sliding_window if config.layer_types[layer_idx] == "sliding_attention" else None
    causal = config.block_attention_per_layer[layer_idx] == "causal"
    if not causal and (window is None or num_rows <= window):
        return None
    queries = torch.arange(num_rows - num_block_rows, num_rows, device=device)[:, None]
    distance = queries - torch.arange(num_rows, device=device)[None, :]  # positive: key is older
    visible = torch.ones_like(distance, dtype=torch.bool)
    if causal:
        visible &= distance >= 0
    if window is not None:
        visible &= distance.abs() < window
    return visible


def context_visibility(
    positions: torch.Tensor,
    valid: torch.Tensor,
    block_positions: torch.Tensor,
    config: XPressConfig,
    layer_type: str,
    causal: bool,
) -> torch.Tensor:
    """Who sees whom in one kind of layer when the context rows of a batch have holes or different lengths.

    Queries: the K block rows at `block_positions` [B, K]. Keys: context rows at `positions` [B, T] that count where
    `valid` [B, T], then the block. The rules are those of `layer_visibility`. -> bool [B, 1, K, T + K], True = visible
    """
    window = config.sliding_window if layer_type == "sliding_attention" else None
    distance = block_positions[:, :, None] - positions[:, None, :]
    context = valid[:, None, :].expand_as(distance)
    own = block_positions[:, :, None] - block_positions[:, None, :]
    block = own >= 0 if causal else torch.ones_like(own, dtype=torch.bool)
    if window is not None:
        context = context & (distance < window)
        block = block & (own.abs() < window)
    return torch.cat([context, block], dim=-1)[:, None]


def additive_mask(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """bool, True = visible -> additive mask of `dtype`, 0 or the lowest finite value."""
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, torch.finfo(dtype).min)


class Backbone(nn.Module):
    """Stack of `BackboneLayer`s and the drafter's own final norm."""

    def __init__(self, config: XPressConfig):
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(BackboneLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary = Qwen3RotaryEmbedding(config)

    def _masks(
        self, noise_embeds: torch.Tensor, attention_mask: torch.Tensor | dict | None, num_rows: int
    ) -> list[torch.Tensor | None]:
        """One additive mask [B, 1, K, T] (or None) per layer."""
        if isinstance(attention_mask, dict):
            return [attention_mask[layer_type] for layer_type in self.config.layer_types]
        padding = None
        if attention_mask is not None and not bool(attention_mask.all()):
            padding = attention_mask[:, None, None, -num_rows:].bool()
        masks = []
        for index in range(len(self.layers)):
            visible = layer_visibility(self.config, index, noise_embeds.shape[1], num_rows, noise_embeds.device)
            if padding is not None:
                visible = padding if visible is None else visible[None, None] & padding
            if visible is not None:
                visible = additive_mask(
                    visible.expand(noise_embeds.shape[0], 1, noise_embeds.shape[1], -1), noise_embeds.dtype
                )
            masks.append(visible)
        return masks

    def forward(
        self,
        noise_embeds: torch.Tensor,
        contexts: list[torch.Tensor],
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor | dict[str, torch.Tensor] | None = None,
        cache: Cache | None = None,
    ) -> torch.Tensor:
        """
        Args:
            noise_embeds: [B, K, H] embeddings of the block.
            contexts: one [B, S, H] per layer, the rows that the cache does not hold yet.
            position_ids: [B, S + K] absolute positions of new context and block.
            attention_mask: `None`; [B, T] with 0 for padding; or, for training, a dict from layer type to an additive
                mask [B, 1, K, S + K].
            cache: receives context and block rows; the caller crops the block rows afterwards.

        Returns:
            [B, K, H], after the final norm.
        """
        rotary = self.rotary(noise_embeds, position_ids)
        cached = cache.get_seq_length() if cache is not None else 0
        masks = self._masks(noise_embeds, attention_mask, cached + position_ids.shape[1])
        hidden_states = noise_embeds
        for layer, context, mask in zip(self.layers, contexts, masks, strict=True):
            hidden_states = layer(hidden_states, context, rotary, mask, cache)
        return self.norm(hidden_states)
