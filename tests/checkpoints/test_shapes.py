"""The table of names and shapes is that of the model."""

import pytest

from tests.conftest import build_drafter
from xpress_hf.checkpoints.shapes import expected_shapes


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"refiner": None},
        {"fusion": "layerwise", "attention_bias": True},
        {"target_hidden_size": 48, "target_layer_ids": [0, 1, 1], "length_head": {"width": 12}},
        {"slot_layout": "shift", "num_hidden_layers": 1, "head_dim": 16},
    ],
)
def test_expected_shapes(overrides):
    """E12: the width of the projection follows from the taps, not from the layers."""
    drafter = build_drafter(**overrides)
    assert expected_shapes(drafter.config) == {key: tuple(value.shape) for key, value in drafter.state_dict().items()}
