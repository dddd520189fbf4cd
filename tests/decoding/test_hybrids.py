"""Targets whose layers keep more than keys and values, or none: lossless or refused before the first token. (D3)"""

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.conftest import COMMON, OLD, OracleDrafter, build_drafter, plain, prompt, scale_matrices
from tests.decoding.test_outputs import assert_same

MIXED = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
DELTA = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
CONV = {"layer_types": ["conv", "full_attention", "conv"], "rope_parameters": {"rope_type": "default"}}
CONV["rope_parameters"]["rope_theta"] = 10000.0
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ROUTED = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {"num_key_value_heads": 4, "kv_lora_rank": 8, "q_lora_rank": 8, "head_dim": 4, "n_shared_experts": 1}
LATENT |= {"qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "first_k_dense_replace": 1, **ROUTED}
# With few heads many scores of the index are exactly zero, and top-k breaks such ties by the shape of the call.
INDEXED = {**LATENT, "index_topk": 6, "index_n_heads": 8, "index_head_dim": 8}
SSM = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}

# Recurrent states, which nothing can roll back.
RECURRENT = {
    "bailing_hybrid": MIXED | MOE | LATENT,
    "bamba": {"attn_layer_indices": [1], **SSM},
    "deepseek_v4": LATENT,
    "falcon_h1": {"mamba_d_ssm": 64, **SSM},
    "falcon_mamba": {},
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "mamba"], "num_local_experts": 4, **SSM},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 4, "mamba_d_state": 8},
    "kimi_linear": MIXED | LATENT,
    "mamba": {},
    "mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1},
    "nemotron_h": {"layers_block_type": ["mamba", "attention", "mamba"], "mamba_num_heads": 4, "mamba_head_dim": 16},
    "olmo_hybrid": DELTA,
    "qwen3_5_moe_text": MIXED | DELTA | MOE | {"shared_expert_intermediate_size": 16},
    "qwen3_5_text": MIXED | DELTA | {"head_dim": 8},
    "qwen3_next": MIXED | DELTA | MOE | {"shared_expert_intermediate_size": 16, "head_dim": 8},
    "recurrent_gemma": {},
    "rwkv": {},
    "xlstm": {"num_heads": 4},
    "zamba": {},
    "zamba2": {"layer_types": ["mamba", "hybrid", "mamba"]},
    "zaya": {"num_experts": 4, "num_experts_per_tok": 1},
}
# Newer transformers no longer marks models as stateful; what these keep their state in says no more than this.
NO_CACHE = "`use_cache`.*no cache"
OTHER_WORDS = {"deepseek_v4": "cannot be rolled back", "rwkv": NO_CACHE, "xlstm": NO_CACHE}
# Short convolutions, and keys of an index of tokens worth attending to.
ROLLED_BACK = {
    "lfm2": CONV,
    "lfm2_moe": CONV | MOE | {"num_dense_layers": 1},
    "lfm3": {},
    "inkling_text": {"head_dim": 8, "sliding_window": 8, **ROUTED},
    "deepseek_v32": INDEXED,
    "glm_moe_dsa": INDEXED,
}
# Keys and values only, of another shape than usual.
LATENT_ATTENTION = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")


def hybrid(model_type: str, **values):
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {model_type}")
    torch.manual_seed(0)
    if OLD and model_type == "zamba2":
        pytest.skip("transformers 5.17 does not build this family from these layer types")
    config = AutoConfig.for_model(model_type, **{**COMMON, "bos_token_id": 0, "pad_token_id": 0, **values})
    model = AutoModelForCausalLM.from_config(config).eval()
    model.generation_config.eos_token_id = None
    scale_matrices(model, 6.0)
    return model


def refused(target, ids, match):
    """The call is refused, and without a forward of the target."""
    forwards = []
    handle = target.register_forward_pre_hook(lambda module, args: forwards.append(module))
    mask = torch.ones_like(ids)
    with pytest.raises(ValueError, match=match):
        target.generate(ids, attention_mask=mask, assistant_model=build_drafter(), max_new_tokens=4, pad_token_id=0)
    handle.remove()
    assert not forwards


@pytest.mark.parametrize("loop", ["own", "stock"])
@pytest.mark.parametrize("family", [*ROLLED_BACK, *LATENT_ATTENTION])
def test_what_can_be_rolled_back_is(family, loop):
    """D4: errors forced at every fifth position."""
    target, ids = hybrid(family, **ROLLED_BACK.get(family, LATENT)), prompt()
    drafter = build_drafter(kind=OracleDrafter)
    drafter.continuation = plain(target, ids, max_new_tokens=60)[0].tolist()
    drafter.is_wrong = lambda position: position % 5 == 0
    drafter.speculation.loop = loop
    out = target.generate(ids, assistant_model=drafter, max_new_tokens=40, do_sample=False)
    assert torch.equal(out, plain(target, ids, max_new_tokens=40))
    assert drafter.last_acceptance.acceptance_length > 3


def test_a_static_cache_of_such_a_target_is_refused():
    """While convolution layers keep the past, single tokens attend to the empty columns of a static cache."""
    target = hybrid("lfm2", **CONV)
    with pytest.raises(ValueError, match=r"static cache with.*LinearAttentionLayer|StaticCache of Lfm2"):
        target.generate(prompt(1), cache_implementation="static", assistant_model=build_drafter(), max_new_tokens=9)


def test_attentions_of_such_a_target():
    """Convolution layers have none."""
    target = hybrid("lfm2", **CONV, attn_implementation="eager")
    options = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True, "output_attentions": True}
    expected = target.generate(prompt(), **options)
    assert_same(target.generate(prompt(), assistant_model=build_drafter(), **options), expected)
    assert len(expected.attentions[0]) == 1


@pytest.mark.parametrize("family", ROLLED_BACK)
def test_a_batch_of_such_a_target_is_refused(family):
    refused(hybrid(family, **ROLLED_BACK[family]), prompt().expand(2, -1), r"Layer.*row by row")


@pytest.mark.parametrize("family", RECURRENT)
def test_recurrent_states_are_refused(family):
    """D3"""
    marked = hasattr(PreTrainedModel, "_is_stateful")
    words = "recurrent state" if marked else OTHER_WORDS.get(family, "recurrent state")
    refused(hybrid(family, **RECURRENT[family]), prompt(), words)


def test_a_target_without_a_cache_of_transformers_is_refused():
    """MiniMax makes a cache of its own within the model."""
    refused(hybrid("minimax", **MIXED), prompt(), NO_CACHE)


def test_a_target_that_leaves_the_cache_empty_is_refused_before_the_first_token():
    streamed = []

    class Streamer:
        put, end = streamed.append, staticmethod(lambda: None)

    target = hybrid("openai-gpt")
    with pytest.raises(ValueError, match=r"`past_key_values`.*9 tokens.*holds 0"):
        target.generate(prompt(), assistant_model=build_drafter(), max_new_tokens=4, streamer=Streamer())
    # The prompt is streamed by generate() itself.
    assert len(streamed) == 1


def test_a_target_with_several_streams_of_hidden_states_is_refused_before_the_first_token():
    """Hyper-connections: a layer's output has one more axis, and no drafter says which stream it reads."""
    target = hybrid("hy_v4", **INDEXED)
    with pytest.raises(ValueError, match=r"`target_layer_ids`.*\(1, 9, 4, 32\)"):
        target.generate(prompt(), assistant_model=build_drafter(), max_new_tokens=4)


@pytest.mark.parametrize("family", ["bert", "roformer"])
def test_attention_in_both_directions_is_refused(family):
    refused(hybrid(family), prompt(), "`is_decoder`.*both directions")
    if OLD and family == "roformer":
        pytest.skip("RoFormer of transformers 5.17 gives other logits with its cache than without")
    causal, ids = hybrid(family, is_decoder=True), prompt()
    out = causal.generate(ids, assistant_model=build_drafter(), max_new_tokens=12, do_sample=False)
    assert torch.equal(out, plain(causal, ids, max_new_tokens=12))
