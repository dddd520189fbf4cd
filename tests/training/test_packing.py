"""Packed rows hold the texts as they are, and their anchors and labels (H10)."""

import pytest
import torch

from tests.conftest import build_config, prompt
from xpress_hf.training.blocks import cut_blocks, possible_anchors
from xpress_hf.training.data import TextCollator
from xpress_hf.training.packing import pack


def text_of(length: int, *runs: tuple[int, int]) -> dict[str, torch.Tensor]:
    ids = prompt(length, seed=length)[0]
    loss_mask = torch.zeros_like(ids)
    for start, stop in runs:
        loss_mask[start:stop] = 1
    return {"input_ids": ids, "loss_mask": loss_mask}


def test_first_fit_by_length():
    rows = pack([text_of(length, (2, length)) for length in (3, 10, 7, 2, 6)], max_length=10)
    lengths = [torch.bincount(row["document_ids"]).tolist() for row in rows]
    assert lengths == [[10], [7, 3], [6, 2]]


def test_a_row_holds_its_texts_as_they_are():
    texts = [{**text_of(length, (2, length)), "context_hidden_states": torch.randn(length, 3)} for length in (4, 6)]
    (row,) = pack(texts, max_length=12)
    assert row["document_ids"].tolist() == [0] * 6 + [1] * 4
    assert row["position_ids"].tolist() == [*range(6), *range(4)]
    for document, text in enumerate(reversed(texts)):
        inside = row["document_ids"] == document
        for key, value in text.items():
            assert torch.equal(row[key][inside], value), key
    batch = TextCollator()([row, *pack(texts[:1], 12)])
    assert batch["document_ids"][1].tolist() == [0] * 4 + [-1] * 6
    assert batch["input_ids"].shape == batch["position_ids"].shape == (2, 10)


@pytest.mark.parametrize("layout", ["fill", "shift"])
def test_anchors_and_labels_are_those_of_the_texts_alone(layout):
    """H10: the same blocks with the same weights, also where a text is supervised from its first to its last token."""
    config = build_config(block_size=4, slot_layout=layout)
    texts = [text_of(20, (0, 20)), text_of(30, (5, 9), (20, 30)), text_of(11, (1, 3))]
    (row,) = pack(texts, max_length=64)

    def blocks_of(text):
        """Position in its text, labels and weights of every block; (document, ...) in a packed row."""
        documents = text.get("document_ids")
        anchors = possible_anchors(text["loss_mask"], documents)
        rows = [
            None if one is None else one[None] for one in (text["input_ids"], text["loss_mask"], anchors, documents)
        ]
        blocks = cut_blocks(*rows[:3], config, rows[3])
        trained = [
            [label if weight else None for label, weight in zip(labels, weights, strict=True)]
            for labels, weights in zip(blocks.labels[0].tolist(), blocks.weights[0].tolist(), strict=True)
        ]
        return anchors, trained, blocks.previous_ids[0].tolist()

    anchors, labels, previous = blocks_of(row)
    documents, places = row["document_ids"][anchors], row["position_ids"][anchors]
    # Longest first.
    for document, text in enumerate((texts[1], texts[0], texts[2])):
        expected_anchors, expected_labels, expected_previous = blocks_of(text)
        mine = (documents == document).nonzero().flatten().tolist()
        assert places[mine].tolist() == expected_anchors.tolist()
        assert [labels[one] for one in mine] == expected_labels
        assert [previous[one][0] for one in mine] == [before[0] for before in expected_previous]


def test_empty_and_too_long_texts():
    empty = {"input_ids": torch.tensor([]), "loss_mask": torch.tensor([])}
    assert pack([empty], 8) == []
    (row,) = pack([empty, text_of(3, (2, 3))], 8)
    assert row["input_ids"].dtype == torch.long
    assert len(row["input_ids"]) == 3
    with pytest.raises(ValueError, match="Text 1 has 9 tokens, more than `max_length`=8"):
        pack([text_of(3), text_of(9)], 8)
