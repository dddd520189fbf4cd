"""Taps of the target -> context rows of the drafter. Symbols: B batch, S rows, L taps, H hidden, N drafter layers."""

from __future__ import annotations

import torch
from torch import nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from ..configuration import XPressConfig


class ConcatFusion(nn.Module):
    """DFlash: one projection of the concatenated taps, normed; every layer reads the same context (2602.06036, 3)."""

    def __init__(self, config: XPressConfig):
        super().__init__()
        self.num_layers = config.num_hidden_layers
        width = len(config.target_layer_ids) * config.target_hidden_size
        self.fc = nn.Linear(width, config.hidden_size, bias=False)
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, context_hidden_states: torch.Tensor) -> list[torch.Tensor]:
        """[B, S, L * H_target] -> N times the same [B, S, H]."""
        context = self.norm(self.fc(context_hidden_states))
        return [context] * self.num_layers


class LayerwiseFusion(nn.Module):
    """DFlare: each drafter layer mixes the taps with its own softmax weights, then one shared norm (2606.02091)."""

    def __init__(self, config: XPressConfig):
        super().__init__()
        self.num_taps = len(config.target_layer_ids)
        self.mix = nn.Parameter(torch.empty(config.num_hidden_layers, self.num_taps))
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def initial_mix(self) -> torch.Tensor:
        """A soft diagonal: early drafter layers lean on early taps, late ones on late taps. [N, L]"""
        num_layers = self.mix.shape[0]
        mix = torch.zeros(num_layers, self.num_taps)
        for layer in range(num_layers):
            mix[layer, min(self.num_taps - 1, layer * self.num_taps // num_layers)] = 2.0
        return mix

    def forward(self, context_hidden_states: torch.Tensor) -> list[torch.Tensor]:
        """[B, S, L * H] -> one [B, S, H] per layer."""
        taps = context_hidden_states.unflatten(-1, (self.num_taps, -1))  # [B, S, L, H]
        weights = self.mix.softmax(dim=-1).to(taps.dtype)  # [N, L]
        mixed = torch.einsum("bslh,nl->nbsh", taps, weights)
        return list(self.norm(mixed))


def build_fusion(config: XPressConfig) -> nn.Module:
    return LayerwiseFusion(config) if config.fusion == "layerwise" else ConcatFusion(config)
