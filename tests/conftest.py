"""Tiny targets and drafters built from configs, in float32 on the CPU, and the folder of reference fixtures."""

from __future__ import annotations

import os
import string

# Threads of two busy processes wait for each other on small machines: one each for test workers side by side, whatever
# they inherit from the process that started them.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"
else:
    os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from packaging.version import Version
from tokenizers import Tokenizer, decoders, models
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from xpress_hf import XPressConfig, XPressDrafter
from xpress_hf.modeling.drafter import BlockDraft

# Versions of transformers with faults of their own, which tests name where they step around them.
OLD = Version(transformers.__version__) < Version("5.24")

VOCAB = 64
HIDDEN = 32
SHARED = Path(__file__).parents[2] / "shared"

COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": None,
    "pad_token_id": None,
    "bos_token_id": None,
    "tie_word_embeddings": False,
}

# name -> (model type, config on top of COMMON, keys of COMMON that the family does not know)
FAMILIES = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 8}),
    "qwen2": ("qwen2", {}),
    "mistral-window": ("mistral", {"sliding_window": 8}),
    "gemma2": (
        "gemma2",
        {"head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8, "tie_word_embeddings": True},
    ),
    "gemma3": (
        "gemma3_text",
        {"head_dim": 8, "sliding_window": 8, "sliding_window_pattern": 2, "query_pre_attn_scalar": 8},
    ),
    "gpt2": ("gpt2", {"n_embd": HIDDEN, "n_layer": 3, "n_head": 4, "n_positions": 512, "tie_word_embeddings": True}),
    "gpt-neox": ("gpt_neox", {}),
    "phi3": ("phi3", {}),
    "granite": ("granite", {"embedding_multiplier": 2.0, "logits_scaling": 2.0, "residual_multiplier": 0.5}),
    "qwen3-moe": (
        "qwen3_moe",
        {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
}


def scale_matrices(model: torch.nn.Module, factor: float) -> None:
    """Random models repeat one token unless their matrices are large; repetition hides most faults."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(factor)


def build_target(family: str = "qwen3", seed: int = 0, factor: float = 6.0, **overrides) -> PreTrainedModel:
    """A tiny random causal LM of a family (fixture T1 of the facts)."""
    model_type, extra = FAMILIES[family]
    values = {**COMMON, **extra, **overrides}
    if model_type == "gpt2":
        sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
        for key in (*sizes, "num_key_value_heads"):
            values.pop(key)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **values)).eval()
    scale_matrices(model, factor)
    return model


def build_cycle_target(vocab: int = 16, period: int | None = None) -> PreTrainedModel:
    """Greedy successor of i is i + 1 modulo `period` (fixture T2): one-hot rows, no attention, permuted head."""
    period = period or vocab
    model = build_target("llama", vocab_size=vocab, hidden_size=HIDDEN)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                parameter.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(vocab, HIDDEN))
        model.lm_head.weight.zero_()
        for token in range(vocab):
            model.lm_head.weight[(token + 1) % period, token] = 1.0
    return model


def build_config(**overrides) -> XPressConfig:
    values = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "block_size": 8,
        "mask_token_id": VOCAB - 1,
        "target_layer_ids": [0, 1],
        "num_target_layers": 3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "refiner": {"rank": 8, "mlp_width": 16, "sweeps": 2},
    }
    return XPressConfig(**{**values, **overrides})


def build_drafter(
    seed: int = 1, factor: float = 6.0, kind: type[XPressDrafter] = XPressDrafter, **overrides
) -> XPressDrafter:
    torch.manual_seed(seed)
    drafter = kind(build_config(**overrides)).eval()
    scale_matrices(drafter, factor)
    if drafter.refiner is not None:
        torch.nn.init.normal_(drafter.refiner.mixer, std=0.3)
    return drafter


class OracleDrafter(XPressDrafter):
    """The product's drafter with only the block prediction replaced by a known continuation (fixture T3).

    `continuation`: ids from position 0 on, prompt included. `is_wrong(position)`: where a wrong id is drafted.
    """

    continuation: list[int]
    is_wrong: Callable[[int], bool] = staticmethod(lambda position: False)

    def draft_block(self, target, known_ids, context_hidden_states, cache, choose=None, **kwargs):
        super().draft_block(target, known_ids, context_hidden_states, cache, **kwargs)
        anchor = cache.get_seq_length()
        logits = torch.full((1, self.config.num_draft_tokens, target.config.vocab_size), -20.0)
        for slot in range(self.config.num_draft_tokens):
            position = anchor + 1 + slot
            token = self.continuation[position] if position < len(self.continuation) else 0
            if self.is_wrong(position):
                token = (token + 1) % (target.config.vocab_size - 1)
            logits[0, slot, token] = 20.0
        return BlockDraft(choose(logits, None), logits)


def letter_tokenizer() -> PreTrainedTokenizerFast:
    """64 tokens of one letter each: texts decode to strings of the same length."""
    letters = string.ascii_letters + string.digits + "+-"
    tokenizer = Tokenizer(models.BPE({letter: token for token, letter in enumerate(letters)}, []))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def fuzz_seeds(usual: int) -> range:
    """Seeds of a fuzz test: `usual` ones, or as many as the variable XPRESS_HF_FUZZ_CASES asks for."""
    return range(int(os.environ.get("XPRESS_HF_FUZZ_CASES", usual)))


def plain(target: PreTrainedModel, ids: torch.Tensor, **kwargs) -> torch.Tensor:
    return target.generate(ids, do_sample=kwargs.pop("do_sample", False), **kwargs)


def prompt(length: int = 9, seed: int = 5, vocab: int = VOCAB - 1) -> torch.Tensor:
    return torch.randint(0, vocab, (1, length), generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def target() -> PreTrainedModel:
    return build_target()


@pytest.fixture
def drafter() -> XPressDrafter:
    return build_drafter()


@pytest.fixture(scope="session")
def golden() -> Path:
    folder = SHARED / "golden" / "dev"
    if not folder.is_dir():
        pytest.skip(f"reference fixtures are not on this machine ({folder.name} folder of the golden set)")
    return folder


@pytest.fixture(scope="session")
def demo_targets():
    """(float32 target, bfloat16 target, tokenizer) of the embedded default."""
    from xpress_hf.demo import load_demo_target

    try:
        exact, tokenizer = load_demo_target(dtype=torch.float32)
    except RuntimeError as error:
        pytest.skip(f"the demo target is not on this machine: {error}")
    return exact, load_demo_target()[0], tokenizer


@pytest.fixture(scope="session")
def prompt_files() -> Path:
    folder = SHARED / "data"
    if not folder.is_dir():
        pytest.skip("benchmark prompts are not on this machine")
    return folder
