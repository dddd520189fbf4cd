"""Adaptive length head (AdaFlash, arXiv 2607.19223): how much of a block is worth verifying."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from ..configuration import XPressConfig


class AdaptiveLengthHead(nn.Module):
    """Predicts from the drafter's hidden states which share of the block will be accepted, anchor and bonus included.

    It reads no drafted tokens, so a cut by it does not depend on what was drawn, and verification stays lossless.
    """

    def __init__(self, config: XPressConfig):
        super().__init__()
        width = config.length_head["width"]
        self.down = nn.Linear(2 * config.hidden_size, width)
        self.residual = nn.Linear(width, width)
        self.out = nn.Linear(width, 1)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Hidden states of whole blocks after the final norm, [N, B, H] -> share r in (0, 1), [N, 1]."""
        features = torch.cat([hidden_states.mean(dim=1), hidden_states[:, -1]], dim=-1)  # [N, 2H]
        latent = F.silu(self.down(features))
        latent = latent + F.silu(self.residual(latent))
        return torch.sigmoid(self.out(latent))


def verified_length(share: torch.Tensor, block_size: int, rate: float = 1.0, shortest: int = 1) -> torch.Tensor:
    """Slots to verify, anchor included: round(r * B * rate), half to even, within [shortest, B]. [N, 1] -> [N, 1]"""
    return (share * block_size * rate).round().clamp(shortest, block_size).long()
