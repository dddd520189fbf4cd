"""Several texts in one row: fewer padded places, and the same loss as the texts one by one.

A block sees context rows of its own document only, positions are counted anew in each document (`blocks`), and the
target reads every document as a row of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from .features import target_states

Text = dict[str, torch.Tensor]


def pack(texts: Sequence[Text], max_length: int) -> list[Text]:
    """First-fit packing, the longest text first; equal lengths keep their order.

    Args:
        texts: `input_ids` [S_i], `loss_mask` [S_i], and features [S_i, ...] where all texts have them. Texts of length
            0 are left out.
        max_length: longest row.

    Returns:
        Rows with the keys of the texts and `document_ids` [S] (0, 1, 2, ... inside a row; a collator pads with -1) and
        `position_ids` [S], which start at 0 in each document.

    Raises:
        ValueError: a text is longer than `max_length`.
    """
    present = (index for index, text in enumerate(texts) if _length(text))
    order = sorted(present, key=lambda index: -_length(texts[index]))
    rows: list[list[int]] = []
    room: list[int] = []
    for index in order:
        length = _length(texts[index])
        if length > max_length:
            raise ValueError(
                f"Text {index} has {length} tokens, more than `max_length`={max_length}; cut texts when they are "
                "encoded (`max_length` of `ConversationDataset`), or pack longer rows."
            )
        row = next((number for number, free in enumerate(room) if free >= length), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(max_length)
        rows[row].append(index)
        room[row] -= length
    return [_join([texts[index] for index in row]) for row in rows]


def _length(text: Text) -> int:
    return len(text["input_ids"])


def _join(texts: list[Text]) -> Text:
    lengths = torch.tensor([_length(text) for text in texts])
    positions = torch.cat([torch.arange(length) for length in lengths.tolist()])
    row = {key: torch.cat([text[key] for text in texts]) for key in texts[0]}
    return {
        **row,
        "document_ids": torch.arange(len(texts)).repeat_interleave(lengths),
        "position_ids": positions,
    }


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
