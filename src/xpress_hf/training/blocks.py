"""Training blocks: anchors in the answers, block inputs and labels, and who sees whom.

In words: a text of S tokens has gone through the frozen target once. From it A blocks of K slots are cut, each behind
its anchor. A block sees the context rows before its anchor (the anchor's own row does not exist yet when a block is
drafted) and itself, nothing of other blocks. Symbols: B batch, A anchors, K slots, S sequence.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

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
    positions: position of each slot in its text.
    teacher_positions: row of the target whose next-token law belongs to the slot's label.
    anchors: [B, A]; -1 marks a place without a block.
    context_positions: [B, S], position of each context row; counted anew in each document of a packed row.
    """

    input_ids: torch.Tensor
    previous_ids: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor
    positions: torch.Tensor
    teacher_positions: torch.Tensor
    anchors: torch.Tensor
    context_positions: torch.Tensor


def document_starts(document_ids: torch.Tensor) -> torch.Tensor:
    """Place where the document of each place begins; documents of a row are contiguous. [B, S] -> [B, S]"""
    places = torch.arange(document_ids.shape[1], device=document_ids.device).expand_as(document_ids)
    begins = torch.ones_like(document_ids, dtype=torch.bool)
    begins[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    return torch.where(begins, places, 0).cummax(dim=1).values


def possible_anchors(loss_mask: torch.Tensor, document_ids: torch.Tensor | None = None) -> torch.Tensor:
    """Places where a block can start. loss_mask [S], document_ids [S] of a packed row -> sorted positions.

    The first predicted token must be supervised: for an answer at places p .. p + n - 1 these are p - 1 .. p + n - 2
    in both slot layouts, so n anchors; the first place of a document has no context and is left out.
    """
    starts = loss_mask[1:].nonzero().flatten()
    if document_ids is None:
        return starts[starts > 0]
    begins = document_starts(document_ids[None])[0]
    return starts[(starts > begins[starts]) & (begins[starts] == begins[starts + 1])]


def seeded_generator(seeds: tuple[int, ...], content: torch.Tensor) -> torch.Generator:
    """A generator that depends on numbers and a tensor of ids alone, so that what it draws is the same however texts
    are split into batches and ranks, and after a resumed run."""
    digest = zlib.crc32(content.cpu().contiguous().numpy().tobytes(), zlib.crc32(repr(seeds).encode()))
    return torch.Generator().manual_seed(digest)


def draw_anchors(places: torch.Tensor, num_anchors: int, generator: torch.Generator | None = None) -> torch.Tensor:
    """Random anchors out of `places` without repetition, sorted; fewer than `num_anchors` where there are fewer."""
    chosen = torch.randperm(len(places), generator=generator)[:num_anchors]
    return places[chosen.to(places.device)].sort().values


def draw_batch_anchors(batch: dict[str, Any], num_anchors: int, seeds: tuple[int, ...]) -> torch.Tensor:
    """Anchors [B, A] of a batch with `input_ids`, `loss_mask`, `attention_mask` [B, S] and, where it is packed,
    `document_ids`; -1 for none. Each row's anchors depend on `seeds` and the row's own ids."""
    drawn = []
    for row, mask in enumerate(batch["attention_mask"].bool()):
        documents = batch["document_ids"][row][mask] if "document_ids" in batch else None
        places = possible_anchors(batch["loss_mask"][row][mask], documents)
        drawn.append(draw_anchors(places, num_anchors, seeded_generator(seeds, batch["input_ids"][row][mask])))
    # A batch whose texts have no anchor at all still holds one place for a block, an empty one.
    drawn[0] = torch.nn.functional.pad(drawn[0], (0, int(not any(len(one) for one in drawn))), value=-1)
    return torch.nn.utils.rnn.pad_sequence(drawn, batch_first=True, padding_value=-1)


def cut_blocks(
    input_ids: torch.Tensor,
    loss_mask: torch.Tensor,
    anchors: torch.Tensor,
    config: XPressConfig,
    document_ids: torch.Tensor | None = None,
) -> Blocks:
    """Cuts the blocks behind `anchors` [B, A] (-1 = none) out of `input_ids` [B, S]; `loss_mask` [B, S] is 1 on
    supervised tokens and 0 on prompts and padding; `document_ids` [B, S] tells the texts of packed rows apart."""
    length, size = input_ids.shape[1], config.block_size
    if document_ids is None:
        document_ids = torch.zeros_like(input_ids)
    begins = document_starts(document_ids)
    slots = torch.arange(size, device=input_ids.device)
    start = anchors.clamp(min=0)[..., None]  # [B, A, 1]
    shift = 0 if config.slot_layout == "fill" else 1
    label_positions = start + slots + shift  # [B, A, K]
    inside = (label_positions < length) & (anchors >= 0)[..., None]

    def take(values: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        flat = positions.clamp(0, length - 1).flatten(1)
        return values.gather(1, flat).view(positions.shape)

    valid = inside & (take(loss_mask, label_positions) > 0)
    valid &= take(document_ids, label_positions) == take(document_ids, start)
    # The visible prefix is given, never predicted; what follows a hole could not be reached in decoding.
    first = 0 if config.slot_layout == "shift" else 1
    valid[..., first:] = valid[..., first:].long().cumprod(dim=-1).bool()
    valid[..., :first] = False
    block_ids = torch.full_like(label_positions, config.mask_token_id)
    block_ids[..., 0] = take(input_ids, start)[..., 0]
    places = torch.arange(length, device=input_ids.device)
    return Blocks(
        input_ids=block_ids,
        previous_ids=take(input_ids, torch.maximum(label_positions - 1, take(begins, start))),
        labels=take(input_ids, label_positions),
        weights=valid.float(),
        positions=start + slots - take(begins, start),
        teacher_positions=(label_positions - 1).clamp(0, length - 1),
        anchors=anchors,
        context_positions=places - begins,
    )


def block_visibility(
    anchors: torch.Tensor,
    attention_mask: torch.Tensor,
    config: XPressConfig,
    layer_type: str,
    causal: bool,
    document_ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """Visibility of [context ; blocks] for the rows of all blocks, in one kind of layer.

    Queries: A * K block rows. Keys: S context rows, then A * K block rows. Slot k of the block at anchor a sees
    context row p if p < a, p is no padding and, in a packed row, belongs to the anchor's document; in a sliding layer
    only if also a + k - p < window. It sees slot j of its own block, in a causal block only if j <= k, in a sliding
    layer only if |k - j| < window. A place without a block sees itself only, so that no softmax is empty.

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
    if document_ids is not None:
        own_documents = document_ids.gather(1, anchors.clamp(min=0))  # [B, A]
        context = context & (document_ids[:, None, None, :] == own_documents[..., None, None])
    same = torch.eye(num_anchors, dtype=torch.bool, device=device)
    blocks = same[:, None, :, None] & own[None, :, None, :]  # [A, K, A, K]
    blocks = blocks.reshape(1, num_anchors * size, num_anchors * size).expand(batch, -1, -1)
    return torch.cat([context.flatten(1, 2), blocks], dim=-1)[:, None]
