"""What is read of a target: taps, and the logits of single tokens."""

import pytest
import torch

from tests.conftest import FAMILIES, build_target, prompt
from xpress_hf.decoding.target import Target, tap_request, taps


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_requested_states_are_outputs_of_the_tapped_layers(family):
    target, ids = build_target(family), prompt()
    outputs = {}
    decoder = target.get_decoder()
    layers = next(child for child in decoder.children() if isinstance(child, torch.nn.ModuleList))
    for index in (0, 1):
        layers[index].register_forward_hook(
            lambda module, args, output, index=index: outputs.update(
                {index: output[0] if isinstance(output, tuple) else output}
            )
        )
    for request in (True, tap_request([0, 1])):
        states = target(ids, output_hidden_states=request).hidden_states
        expected = torch.cat([outputs[0], outputs[1]], dim=-1)
        assert torch.equal(taps(states, [0, 1], 3), expected)
        assert torch.equal(taps(states, [1], 3), outputs[1])


@torch.no_grad()
@pytest.mark.parametrize("family", ["qwen3", "gemma2", "phi3"])
def test_logits_of_single_tokens(family):
    target = Target(build_target(family))
    hidden = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([3, 60, 5])
    assert target.has_linear_head
    torch.testing.assert_close(target.logits(hidden, ids), target.logits(hidden)[..., ids])
