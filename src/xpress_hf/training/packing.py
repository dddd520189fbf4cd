"""Several texts in one row: fewer padded places, and the same loss as the texts one by one.

What the rest of training must keep to: a block sees context rows of its own document only, and all rows and slots take
their positions from `position_ids`. Anchors and labels need no care: the first two tokens of a document are not
supervised in a packed row, so no anchor stands at the start of a document and no block reaches into the next one. They
never are in a row of its own either, where the first label stands behind an anchor that has context.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

Text = dict[str, torch.Tensor]

# A label is at place 2 or later: place 0 has no context, so the first anchor is at place 1.
FIRST_LABEL = 2


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
    row["loss_mask"] = row["loss_mask"] * (positions >= FIRST_LABEL)
    return {
        **row,
        "document_ids": torch.arange(len(texts)).repeat_interleave(lengths),
        "position_ids": positions,
    }
