"""Packed rows: several texts in one row, which the target must read apart."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from .features import target_states


def packed_target_states(
    model: PreTrainedModel, input_ids: torch.Tensor, document_ids: torch.Tensor, target_layer_ids: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """`target_states` of packed rows: every document goes through the target as a row of its own, since no mask keeps
    documents apart in every architecture and attention backend.

    Args:
        input_ids: [B, S]. document_ids: [B, S], -1 on padding; the places of a document are contiguous.

    Returns:
        taps [B, S, L * H] and post-norm hidden states [B, S, H]; zeros on padding.
    """
    places = [
        (row, (ids == number).nonzero()[:, 0])
        for row, ids in enumerate(document_ids)
        for number in ids.unique()
        if number >= 0
    ]
    texts = [input_ids[row, where] for row, where in places]
    ids = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
    lengths = torch.tensor([len(text) for text in texts], device=ids.device)
    mask = (torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]).long()
    apart = target_states(model, ids, mask, target_layer_ids)
    packed = tuple(states.new_zeros(*input_ids.shape, states.shape[-1]) for states in apart)
    for number, (row, where) in enumerate(places):
        for whole, states in zip(packed, apart, strict=True):
            whole[row, where] = states[number, : len(where)]
    return packed
