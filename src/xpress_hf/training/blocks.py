"""Training blocks: anchors in the answers, block inputs and labels, and who sees whom.

In words: a text of S tokens has gone through the frozen target once. From it A blocks of K slots are cut, each behind
its anchor. A block sees the context rows before its anchor (the anchor's own row does not exist yet when a block is
drafted) and itself, nothing of other blocks. Symbols: B batch, A anchors, K slots, S sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..configuration import XPressConfig


@dataclass
class Blocks:
    """Blocks of a batch, all of shape [B, A, K] unless noted.

    input_ids: anchor (or visible prefix), then the mask token.
    previous_ids: true token before the one that each slot predicts; slot 0 of the fill layout has the anchor's
        predecessor (the anchor itself at the start of a text).
    labels: token that each slot predicts; arbitrary where `weights` is 0.
    weights: 1 where a slot is trained: inside the text, supervised, and so are all earlier slots; else 0.
    positions: absolute position of each slot.
    teacher_positions: row of the target whose next-token law belongs to the slot's label.
    anchors: [B, A]; -1 marks a place without a block.
    """

    input_ids: torch.Tensor
    previous_ids: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor
    positions: torch.Tensor
    teacher_positions: torch.Tensor
    anchors: torch.Tensor


def possible_anchors(loss_mask: torch.Tensor, config: XPressConfig) -> torch.Tensor:
    """Places where a block can start. loss_mask [S] -> sorted positions.

    The first predicted token must be supervised: for an answer at places p .. p + n - 1 these are p - 1 .. p + n - 2
    in both slot layouts, so n anchors; place 0 has no context and is left out.
    """
    starts = loss_mask[1:].nonzero().flatten()
    return starts[starts > 0]


def draw_anchors(
    loss_mask: torch.Tensor, num_anchors: int, config: XPressConfig, generator: torch.Generator | None = None
) -> torch.Tensor:
    """Random anchors without repetition, sorted; fewer than `num_anchors` where the answer is short. [S] -> [A]"""
    places = possible_anchors(loss_mask, config)
    chosen = torch.randperm(len(places), generator=generator)[:num_anchors]
    return places[chosen].sort().values


def cut_blocks(
    input_ids: torch.Tensor, loss_mask: torch.Tensor, anchors: torch.Tensor, config: XPressConfig
) -> Blocks:
    """Cuts the blocks behind `anchors` [B, A] (-1 = none) out of `input_ids` [B, S]; `loss_mask` [B, S] is 1 on
    supervised tokens and 0 on prompts and padding."""
    length, size = input_ids.shape[1], config.block_size
    slots = torch.arange(size, device=input_ids.device)
    start = anchors.clamp(min=0)[..., None]  # [B, A, 1]
    shift = 0 if config.slot_layout == "fill" else 1
    label_positions = start + slots + shift  # [B, A, K]
    inside = (label_positions < length) & (anchors >= 0)[..., None]

    def take(values: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        flat = positions.clamp(0, length - 1).flatten(1)
        return values.gather(1, flat).view(positions.shape)

    valid = inside & (take(loss_mask, label_positions) > 0)
    # The visible prefix is given, never predicted; what follows a hole could not be reached in decoding.
    first = 0 if config.slot_layout == "shift" else 1
    valid[..., first:] = valid[..., first:].long().cumprod(dim=-1).bool()
    valid[..., :first] = False
    block_ids = torch.full_like(label_positions, config.mask_token_id)
    block_ids[..., 0] = take(input_ids, start)[..., 0]
    return Blocks(
        input_ids=block_ids,
        previous_ids=take(input_ids, label_positions - 1),
        labels=take(input_ids, label_positions),
        weights=valid.float(),
        positions=start + slots,
        teacher_positions=(label_positions - 1).clamp(0, length - 1),
        anchors=anchors,
    )


def block_visibility(
    anchors: torch.Tensor, attention_mask: torch.Tensor, config: XPressConfig, layer_type: str, causal: bool
) -> torch.Tensor:
    """Visibility of [context ; blocks] for the rows of all blocks, in one kind of layer.

    Queries: A * K block rows. Keys: S context rows, then A * K block rows. Slot k of the block at anchor a sees
    context row p if p < a and p is no padding, in a sliding layer only if also a + k - p < window; it sees slot j of
    its own block, in a causal block only if j <= k, in a sliding layer only if |k - j| < window. A place without a
    block sees itself only, so that no softmax is empty.

    Returns:
        bool [B, 1, A * K, S + A * K], True = visible.
    """
    batch, num_anchors = anchors.shape
    size, length = config.block_size, attention_mask.shape[1]
    device = anchors.device
    window = config.sliding_window if layer_type == "sliding_attention" else None
    rows = torch.arange(length, device=device)
    slots = torch.arange(size, device=device)
    query_positions = anchors[..., None] + slots  # [B, A, K]
    context = (rows < anchors[..., None, None]) & attention_mask[:, None, None, :].bool()  # [B, A, 1, S]
    context = context.expand(-1, -1, size, -1)
    own = torch.ones(size, size, dtype=torch.bool, device=device)
    if causal:
        own = own & (slots[None, :] <= slots[:, None])
    if window is not None:
        context = context & (query_positions[..., None] - rows < window)
        own = own & ((slots[None, :] - slots[:, None]).abs() < window)
    context = context & (anchors >= 0)[..., None, None]
    same = torch.eye(num_anchors, dtype=torch.bool, device=device)
    blocks = same[:, None, :, None] & own[None, :, None, :]  # [A, K, A, K]
    blocks = blocks.reshape(1, num_anchors * size, num_anchors * size).expand(batch, -1, -1)
    return torch.cat([context.flatten(1, 2), blocks], dim=-1)[:, None]
