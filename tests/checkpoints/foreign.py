"""Foreign checkpoints made from key lists and configs written by hand after the facts."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

# Sizes: hidden 32, 2 layers of 4 heads (2 for keys and values) of width 8, MLP 64, 2 taps, 64 tokens, block 8.
LAYER = {
    "input_layernorm.weight": (32,),
    "post_attention_layernorm.weight": (32,),
    "self_attn.q_proj.weight": (32, 32),
    "self_attn.k_proj.weight": (16, 32),
    "self_attn.v_proj.weight": (16, 32),
    "self_attn.o_proj.weight": (32, 32),
    "self_attn.q_norm.weight": (8,),
    "self_attn.k_norm.weight": (8,),
    "mlp.gate_proj.weight": (64, 32),
    "mlp.up_proj.weight": (64, 32),
    "mlp.down_proj.weight": (32, 64),
}
LAYERS = {f"layers.{index}.{key}": shape for index in range(2) for key, shape in LAYER.items()}
DFLASH = {"fc.weight": (32, 64), "hidden_norm.weight": (32,), "norm.weight": (32,), **LAYERS}
DFLARE = {
    "layer_fusion_weights": (2, 2),
    "hidden_norm.weight": (32,),
    "norm.weight": (32,),
    **LAYERS,
    **{f"layers.{index}.self_attn.{name}_proj_target.weight": (16, 32) for index in range(2) for name in "kv"},
}
NATIVE = {
    "encoder.fc.weight": (32, 64),
    "encoder.output_norm_enc.weight": (32,),
    "norm.weight": (32,),
    **LAYERS,
}
SERVING_HEAD = {
    "xpress_head.w1.weight": (64, 8),
    "xpress_head.w2.weight": (64, 8),
    "xpress_head.down_h.weight": (8, 32),
    "xpress_head.down_g.weight": (8, 32),
    "xpress_head.in_proj.weight": (8, 24),
    "xpress_head.mix.L": (8, 8, 8),
    "xpress_head.mlp.gate_proj.weight": (16, 8),
    "xpress_head.mlp.up_proj.weight": (16, 8),
    "xpress_head.mlp.down_proj.weight": (8, 16),
}
SPECULATORS_HEAD = {
    "refiner_head.token_embed.weight": (64, 8),
    "refiner_head.readout.weight": (64, 8),
    "refiner_head.down_h.weight": (8, 32),
    "refiner_head.down_g.weight": (8, 32),
    "refiner_head.in_proj.weight": (8, 24),
    "refiner_head.mix_l": (8, 8, 8),
    "refiner_head.mlp_gate.weight": (16, 8),
    "refiner_head.mlp_up.weight": (16, 8),
    "refiner_head.mlp_down.weight": (8, 16),
}
LENGTH_HEAD = {
    "thresh_head_two_model.down.weight": (12, 64),
    "thresh_head_two_model.down.bias": (12,),
    "thresh_head_two_model.res.0.weight": (12, 12),
    "thresh_head_two_model.res.0.bias": (12,),
    "thresh_head_two_model.out.weight": (1, 12),
    "thresh_head_two_model.out.bias": (1,),
}
TARGETS_OWN = {"embed_tokens.weight": (64, 32), "lm_head.weight": (64, 32)}

LAYER_CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "max_position_embeddings": 512,
    "max_window_layers": 2,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "sliding_window": None,
    "use_sliding_window": False,
    "layer_types": ["full_attention", "full_attention"],
    "tie_word_embeddings": False,
    "dtype": "float32",
}
ZLAB = {
    **LAYER_CONFIG,
    "architectures": ["DFlashDraftModel"],
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "block_size": 8,
    "num_target_layers": 3,
    "dflash_config": {"mask_token_id": 63, "target_layer_ids": [0, 1]},
}
SERVING = {
    **ZLAB,
    "architectures": ["Qwen3XPressModel"],
    "xpress_rank": 8,
    "xpress_mlp_hidden": 16,
    "xpress_block_size": 8,
    "xpress_num_passes": 6,
    "sample_from_anchor": False,
}
SPECULATORS = {
    "architectures": ["DFlashSpeculator"],
    "speculators_model_type": "dflash",
    "speculators_version": "0.5.0",
    "transformer_layer_config": LAYER_CONFIG,
    "draft_vocab_size": 64,
    "block_size": 8,
    "target_hidden_size": None,
    "aux_hidden_state_layer_ids": [1, 2],
    "mask_token_id": 63,
    "sliding_window_non_causal": False,
    "sample_from_anchor": False,
    "speculators_config": {
        "algorithm": "dflash",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 7}],
        "verifier": {"name_or_path": "maker/target", "architectures": ["Qwen3ForCausalLM"]},
    },
}
SPECULATORS_XPRESS = {
    **SPECULATORS,
    "architectures": ["XPressSpeculator"],
    "speculators_model_type": "xpress",
    "xpress_rank": 8,
    "xpress_mlp_ratio": 2,
    "num_jacobi_passes": 5,
    "xpress_backbone": "dflash",
}
ADAFLASH = {
    **ZLAB,
    "dflash_config": {
        **ZLAB["dflash_config"],
        "use_thresh_head_two_model": True,
        "thresh_head_bottleneck_dim": 12,
        "thresh_head_direct_len": True,
    },
}
DEEPSPEC = {
    **LAYER_CONFIG,
    "architectures": ["Qwen3DSparkModel"],
    "block_size": 8,
    "mask_token_id": 63,
    "target_layer_ids": [0, 1],
    "num_anchors": 512,
    "markov_rank": 0,
    "enable_confidence_head": False,
}
MUSE = {
    "model_type": "muse_glimmer_assistant",
    "architectures": ["MuseGlimmerAssistantModel"],
    **{key: LAYER_CONFIG[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "head_dim")},
    **{key: LAYER_CONFIG[key] for key in ("num_attention_heads", "num_key_value_heads", "layer_types", "dtype")},
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "block_size": 8,
    "mask_token_id": 63,
    "target_layer_ids": [0, 1],
}


def values(shapes: dict[str, tuple[int, ...]], seed: int = 3) -> dict[str, torch.Tensor]:
    """Random tensors of these shapes; norms near one, so that outputs stay tame."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for key, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        found[key] = 1 + 0.1 * noise if "norm" in key else 0.2 * noise
    return found


def write(folder: Path, config: dict, tensors: dict[str, torch.Tensor]) -> Path:
    """A checkpoint folder of these contents."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({key: value.contiguous() for key, value in tensors.items()}, folder / "model.safetensors")
    return folder
