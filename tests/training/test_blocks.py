"""Training blocks against slow, obvious twins."""

import pytest
import torch

from tests.conftest import build_config
from xpress_hf.training.blocks import block_visibility, cut_blocks, draw_anchors, possible_anchors


def slow_visibility(anchors, attention_mask, size, window, causal):
    """Who sees whom, one pair at a time, straight from the words."""
    batch, count = anchors.shape
    length = attention_mask.shape[1]
    visible = torch.zeros(batch, 1, count * size, length + count * size, dtype=torch.bool)
    for text in range(batch):
        for block in range(count):
            anchor = int(anchors[text, block])
            for slot in range(size):
                row = block * size + slot
                for place in range(length):
                    near = window is None or anchor + slot - place < window
                    before = anchor >= 0 and place < anchor
                    visible[text, 0, row, place] = before and bool(attention_mask[text, place]) and near
                for other in range(size):
                    near = window is None or abs(slot - other) < window
                    visible[text, 0, row, length + block * size + other] = near and (not causal or other <= slot)
    return visible


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 1, 3, 5, 100])
@pytest.mark.parametrize("size", [2, 5])
def test_block_mask_equals_the_double_loop(causal, window, size):
    config = build_config(
        block_size=size, layer_types=["sliding_attention", "full_attention"], sliding_window=window or 7
    )
    anchors = torch.tensor([[1, 4, 5, 9], [2, 3, -1, -1]])
    attention_mask = torch.tensor([[1] * 12, [1] * 7 + [0] * 5])
    kind = "full_attention" if window is None else "sliding_attention"
    found = block_visibility(anchors, attention_mask, config, kind, causal)
    assert torch.equal(found, slow_visibility(anchors, attention_mask, size, window, causal))
    assert found.any(dim=-1).all(), "a row that sees nothing has no softmax"


def test_the_mask_of_a_block_is_the_one_of_decoding():
    """A block behind anchor a sees exactly what a block drafted after a committed tokens sees."""
    from xpress_hf.modeling.backbone import layer_visibility

    config = build_config(
        block_size=4, layer_types=["sliding_attention"] * 2, sliding_window=3, block_attention="causal"
    )
    for anchor in (1, 2, 5, 8):
        decoding = layer_visibility(config, 0, 4, anchor + 4, torch.device("cpu"))
        training = block_visibility(torch.tensor([[anchor]]), torch.ones(1, 10), config, "sliding_attention", True)[
            0, 0
        ]
        assert torch.equal(training[:, :anchor], decoding[:, :anchor])
        assert torch.equal(training[:, 10:], decoding[:, anchor:])
        assert not training[:, anchor:10].any()


@pytest.mark.parametrize("layout", ["fill", "shift"])
def test_blocks_equal_a_slow_twin(layout):
    config = build_config(block_size=4, slot_layout=layout)
    ids = torch.randint(0, 60, (2, 12), generator=torch.Generator().manual_seed(0))
    loss_mask = torch.tensor([[0] * 4 + [1] * 8, [0] * 3 + [1, 1, 0, 1, 1] + [0] * 4])
    anchors = torch.tensor([[3, 6, 10], [2, 5, -1]])
    blocks = cut_blocks(ids, loss_mask, anchors, config)
    shift = int(layout == "shift")
    for text in range(2):
        for block in range(3):
            anchor = int(anchors[text, block])
            if anchor < 0:
                assert not blocks.weights[text, block].any()
                continue
            assert blocks.input_ids[text, block].tolist() == [int(ids[text, anchor])] + [config.mask_token_id] * 3
            alive = True
            for slot in range(4):
                place = anchor + slot + shift
                given = layout == "fill" and slot == 0
                alive = alive and (given or (place < 12 and bool(loss_mask[text, place])))
                assert bool(blocks.weights[text, block, slot]) == (alive and not given), (text, block, slot)
                assert blocks.positions[text, block, slot] == anchor + slot
                if alive and not given:
                    assert blocks.labels[text, block, slot] == ids[text, place]
                    assert blocks.previous_ids[text, block, slot] == ids[text, place - 1]
                    assert blocks.teacher_positions[text, block, slot] == place - 1


def test_anchors_lie_before_supervised_tokens_and_never_at_the_start():
    loss_mask = torch.tensor([1, 1, 0, 0, 1, 1, 1])
    assert possible_anchors(loss_mask).tolist() == [3, 4, 5]
    generator = torch.Generator().manual_seed(0)
    seen = {tuple(draw_anchors(possible_anchors(loss_mask), 2, generator).tolist()) for _ in range(50)}
    assert seen == {(3, 4), (3, 5), (4, 5)}
    assert draw_anchors(possible_anchors(loss_mask), 10).tolist() == [3, 4, 5]
    assert len(draw_anchors(possible_anchors(torch.zeros(5)), 3)) == 0
