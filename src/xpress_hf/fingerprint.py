"""What tells one target from another: config fields, samples of all weights, vocabulary and chat template."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

CONFIG_FIELDS = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "rope_parameters",
    "sliding_window",
)
SAMPLES = 8


def config_fields(model: PreTrainedModel) -> dict[str, Any]:
    """Config fields that decide what hidden states mean, as JSON holds them."""
    config = model.config.get_text_config()
    values = {name: getattr(config, name, None) for name in CONFIG_FIELDS}
    return json.loads(json.dumps(values, default=str))


@torch.no_grad()
def weights_hash(model: PreTrainedModel) -> str:
    """Hash over a few elements of every parameter, rounded to bfloat16, so that a target has the same one in float32
    and in bfloat16. Parameters without data on this machine are left out."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        if parameter.device.type == "meta" or not parameter.numel():
            continue
        places = torch.linspace(0, parameter.numel() - 1, SAMPLES, dtype=torch.float64).long()
        values = parameter.detach().reshape(-1)[places.to(parameter.device)].cpu().to(torch.bfloat16)
        digest.update(name.encode())
        digest.update(values.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash over the vocabulary and the chat template."""
    parts = [sorted(tokenizer.get_vocab().items()), tokenizer.chat_template]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
