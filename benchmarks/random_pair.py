"""A random target of a known size and a drafter on it: times of a cycle without any download.

The target repeats the last token of its prompt for ever: what its layers compute is added with weight zero, so that
every product is taken in full and the text is known. The drafter runs in full too; then the hidden state of each slot
is replaced by the embedding of the anchor, which is a right draft, or of the mask token, which is a wrong one.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, ByT5Tokenizer, PreTrainedModel, PreTrainedTokenizerBase, Qwen3Config

from xpress_hf import XPressDrafter
from xpress_hf.training.initialization import config_for_target, target_layers

# Target, and what of the drafter does not follow from it.
SIZES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen3-0.6b": (
        {
            "vocab_size": 151936,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 40960,
        },
        {
            "target_layer_ids": [1, 7, 13, 19, 25],
            "num_hidden_layers": 5,
            "block_size": 16,
            "refiner": {"rank": 256, "mlp_width": 512, "sweeps": 6},
        },
    ),
    "tiny": (
        {
            "vocab_size": 512,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 4096,
        },
        {
            "target_layer_ids": [0, 1, 2],
            "num_hidden_layers": 2,
            "block_size": 6,
            "refiner": {"rank": 8, "mlp_width": 16, "sweeps": 2},
        },
    ),
}


class ScriptedDrafter(XPressDrafter):
    """Drafts as a random network does, at a chosen rate of right ones.

    acceptance: share of positions with a right draft. Which ones depends on the position alone, so that all arms and
    loops meet the same.
    """

    acceptance: float = 0.8

    def forward(self, noise_embeds: torch.Tensor, *, position_ids: torch.Tensor, **kwargs: Any) -> Any:
        output = super().forward(noise_embeds, position_ids=position_ids, **kwargs)
        block = position_ids[:, -noise_embeds.shape[1] :, None]
        # Multiples of the golden ratio are spread evenly over the unit interval.
        right = (block * 40503) % 65536 < self.acceptance * 65536
        output.last_hidden_state = torch.where(right, noise_embeds[:, :1], noise_embeds).to(self.dtype)
        return output


def random_pair(
    size: str, dtype: torch.dtype, device: str, acceptance: float
) -> tuple[PreTrainedModel, XPressDrafter, PreTrainedTokenizerBase]:
    """Target, drafter, and a tokenizer of bytes."""
    own, drafter_fields = SIZES[size]
    torch.manual_seed(0)
    config = Qwen3Config(**own, tie_word_embeddings=True, bos_token_id=None, eos_token_id=None, pad_token_id=0)
    with torch.device(device):
        target = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for layer in target_layers(target):
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    fields = config_for_target(target, mask_token_id=own["vocab_size"] - 1, dtype=dtype, **drafter_fields)
    drafter = ScriptedDrafter(fields).to(device, dtype).eval()
    drafter.acceptance = acceptance
    return target, drafter, ByT5Tokenizer()
