"""Targets whose layers keep more than keys and values. (D3, D4)"""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.conftest import COMMON, OracleDrafter, build_drafter, plain, prompt, scale_matrices
from tests.decoding.test_outputs import assert_same


def hybrid(model_type: str, **values):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**COMMON, **values})).eval()
    scale_matrices(model, 6.0)
    return model


@pytest.mark.parametrize("loop", ["own", "stock"])
def test_convolution_states_are_rolled_back(loop):
    """D4: LFM2, errors forced at every fifth position."""
    target, ids = hybrid("lfm2", layer_types=["conv", "full_attention", "conv"]), prompt()
    drafter = build_drafter(kind=OracleDrafter)
    drafter.continuation = plain(target, ids, max_new_tokens=60)[0].tolist()
    drafter.is_wrong = lambda position: position % 5 == 0
    drafter.speculation.loop = loop
    out = target.generate(ids, assistant_model=drafter, max_new_tokens=40, do_sample=False)
    assert torch.equal(out, plain(target, ids, max_new_tokens=40))
    assert drafter.last_acceptance.acceptance_length > 3


def test_a_static_cache_of_such_a_target_is_refused():
    """While convolution layers keep the past, single tokens attend to the empty columns of a static cache."""
    target = hybrid("lfm2", layer_types=["conv", "full_attention", "conv"])
    with pytest.raises(ValueError, match=r"static cache with.*LinearAttentionLayer.*`cache_implementation`"):
        target.generate(prompt(1), cache_implementation="static", assistant_model=build_drafter(), max_new_tokens=9)


def test_attentions_of_such_a_target():
    """Convolution layers have none."""
    target = hybrid("lfm2", layer_types=["conv", "full_attention", "conv"], attn_implementation="eager")
    options = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True, "output_attentions": True}
    expected = target.generate(prompt(), **options)
    assert_same(target.generate(prompt(), assistant_model=build_drafter(), **options), expected)
    assert len(expected.attentions[0]) == 1


def test_a_batch_of_such_a_target_is_refused():
    target = hybrid("lfm2", layer_types=["conv", "full_attention", "conv"])
    with pytest.raises(ValueError, match=r"LinearAttention.*row by row"):
        target.generate(
            prompt().expand(2, -1), attention_mask=torch.ones(2, 9), assistant_model=build_drafter(), max_new_tokens=4
        )


def test_recurrent_states_are_refused():
    """D3: Qwen3.5 with one full-attention layer of four."""
    target = hybrid("qwen3_5_text", num_hidden_layers=4, head_dim=8, linear_num_value_heads=4, linear_num_key_heads=2)
    drafter = build_drafter(num_target_layers=4)
    with pytest.raises(ValueError, match="recurrent state"):
        target.generate(prompt(), assistant_model=drafter, max_new_tokens=4)
