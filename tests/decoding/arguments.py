"""Random valid arguments of generate(), drawn from a seed: what plain generate accepts together."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel, StaticCache, WatermarkingConfig
from transformers.cache_utils import StaticLayer
from transformers.generation import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from tests.conftest import OLD, build_target, letter_tokenizer, plain
from tests.decoding.test_batches import ragged
from tests.decoding.test_hybrids import hybrid

FAMILIES = ("llama", "qwen3", "mistral-window", "gemma3", "gpt2", "lfm2")
# No id of these is among the drawn end ids, so that a text is never left without a token.
ALLOWED = 60
# Families that look back eight tokens in some layers.
WINDOWED = ("mistral-window", "gemma3")
OUTPUTS = ("scores", "logits", "hidden_states", "attentions")


@functools.cache
def tiny_target(family: str, attention: str) -> PreTrainedModel:
    if family == "lfm2":
        return hybrid("lfm2", layer_types=["conv", "full_attention", "conv"], attn_implementation=attention)
    return build_target(family, attn_implementation=attention)


@functools.cache
def tokenizer():
    return letter_tokenizer()


class EndsIn(StoppingCriteria):
    """Stops a row whose last id is one of a few, counted from a given length on."""

    def __init__(self, ids: list[int], start: int):
        self.ids, self.start = torch.tensor(ids), start

    def __call__(self, input_ids, scores, **kwargs):
        return torch.isin(input_ids[:, -1], self.ids) & (input_ids.shape[1] >= self.start)


class Habit(LogitsProcessor):
    """Shifts scores by the sum of the last two ids and by the length: another law at every place."""

    def __call__(self, input_ids, scores):
        chosen = (input_ids[:, -2:].sum(dim=1, keepdim=True) + input_ids.shape[1]) % scores.shape[1]
        return scores.scatter_add(1, chosen, torch.full_like(scores[:, :1], 2.0))


def allowed_tokens(row: int, ids: torch.Tensor) -> list[int]:
    """A third of the vocabulary, which depends on the last id and on the row."""
    return [token for token in range(ALLOWED) if (token + int(ids[-1]) + row) % 3]


@dataclass
class Case:
    """One call.

    options: arguments of generate() that plain generate takes too. fresh: those that a call uses up, built anew.
    prompts: one per returned row, without padding. ours: arguments that plain generate ignores.
    speculation, overrides: how the drafter is run and built.
    """

    family: str
    attention: str
    ids: torch.Tensor
    mask: torch.Tensor
    prompts: list[torch.Tensor]
    options: dict[str, Any]
    fresh: dict[str, Callable[[], Any]] = field(default_factory=dict)
    ours: dict[str, Any] = field(default_factory=dict)
    speculation: dict[str, Any] = field(default_factory=dict)
    overrides: dict[str, Any] = field(default_factory=dict)
    streamed: bool = False

    @property
    def target(self) -> PreTrainedModel:
        return tiny_target(self.family, self.attention)

    def arguments(self) -> dict[str, Any]:
        return {**self.options, **{name: build() for name, build in self.fresh.items()}}

    @property
    def num_rows(self) -> int:
        return len(self.prompts)

    @property
    def num_cached(self) -> int:
        """Tokens that the given cache holds."""
        return self.fresh["past_key_values"]().get_seq_length() if "past_key_values" in self.fresh else 0

    @property
    def has_static_cache(self) -> bool:
        given = self.fresh["past_key_values"]() if "past_key_values" in self.fresh else None
        return isinstance(given, StaticCache) or self.options.get("cache_implementation") == "static"


def draw_case(seed: int, sampled: bool = False) -> Case:
    """`sampled`: real draws at temperature 0.7 or 1; otherwise greedy, or sampling from one candidate."""
    rng = random.Random(seed)
    family = rng.choice(FAMILIES)
    lengths = rng.sample(range(1, 14), rng.choice([1, 1, 1, 2, 3]) if family != "lfm2" else 1)
    ids, mask, prompts = ragged(lengths, pad=rng.choice([0, 7]))
    width, budget = ids.shape[1], rng.randint(1, 20)
    options: dict[str, Any] = {"attention_mask": mask, "pad_token_id": rng.choice([0, 5])}
    options |= {"max_new_tokens": budget} if rng.random() < 0.7 else {"max_length": width + budget}
    case = Case(family, "eager" if rng.random() < 0.4 else "sdpa", ids, mask, prompts, options)
    usual = plain(case.target, prompts[0], max_new_tokens=10)[0, prompts[0].shape[1] :].tolist()
    draw_sampling(rng, case, sampled)
    draw_ends(rng, case, budget, usual)
    draw_processors(rng, case, usual)
    draw_outputs(rng, case)
    draw_inputs(rng, case)
    draw_speculation(rng, case)
    return case


def draw_sampling(rng: random.Random, case: Case, sampled: bool) -> None:
    case.options["do_sample"] = sampled or rng.random() < 0.3
    if not case.options["do_sample"]:
        return
    case.options |= {"temperature": rng.choice([0.7, 1.0]), "top_k": 0 if sampled else 1}
    for name, value in (
        ("top_p", 0.8),
        ("min_p", 0.05),
        ("typical_p", 0.9),
        ("epsilon_cutoff", 1e-3),
        ("eta_cutoff", 1e-3),
    ):
        if rng.random() < 0.15:
            case.options[name] = value
    if rng.random() < 0.3 and case.family != "lfm2":
        case.options["num_return_sequences"] = 2
        case.prompts = [one for one in case.prompts for _ in range(2)]


def draw_ends(rng: random.Random, case: Case, budget: int, usual: list[int]) -> None:
    options, ids = case.options, case.ids
    if rng.random() < 0.6 or (case.num_rows > 1 and rng.random() < 0.8):
        options["eos_token_id"] = rng.choice(
            [rng.choice(usual), rng.sample(range(ALLOWED), 4), [rng.choice(usual), 61]]
        )
        name, value = rng.choice(
            [
                ("min_new_tokens", rng.randint(0, budget)),
                ("min_length", ids.shape[1] + rng.randint(0, budget)),
                ("exponential_decay_length_penalty", (rng.randint(0, 6), 1.3)),
                ("forced_eos_token_id", rng.choice(usual)),
                ("pad_token_id", 5),
                ("pad_token_id", 5),
            ]
        )
        options[name] = value
    if rng.random() < 0.15:
        start = rng.randint(0, len(usual) - 2)
        text = tokenizer().decode(usual[start : start + rng.choice([1, 2])])
        options |= {"stop_strings": rng.choice([text, [text, "zz"]]), "tokenizer": tokenizer()}
    if rng.random() < 0.15:
        rule = EndsIn(rng.sample(usual, 2), ids.shape[1] + rng.randint(1, 8))
        options["stopping_criteria"] = StoppingCriteriaList([rule])
    if rng.random() < 0.05:
        options["max_time"] = rng.choice([0.0, 1e6])


def draw_processors(rng: random.Random, case: Case, usual: list[int]) -> None:
    drawn: dict[str, Callable[[], Any]] = {
        "repetition_penalty": lambda: rng.choice([0.8, 1.2]),
        "encoder_repetition_penalty": lambda: rng.choice([0.8, 1.2]),
        "no_repeat_ngram_size": lambda: rng.choice([2, 3]),
        "encoder_no_repeat_ngram_size": lambda: 2,
        "bad_words_ids": lambda: [[rng.choice(usual)], rng.sample(range(ALLOWED), 2), usual[1:3]],
        "suppress_tokens": lambda: rng.sample(range(ALLOWED), 5),
        "begin_suppress_tokens": lambda: [usual[0], 3],
        "forced_bos_token_id": lambda: 4,
        "sequence_bias": lambda: [[[rng.randint(0, ALLOWED)], 3.0], [usual[2:4], 5.0]],
        "prefix_allowed_tokens_fn": lambda: allowed_tokens,
        "logits_processor": lambda: LogitsProcessorList([Habit()]),
        "renormalize_logits": lambda: True,
        "remove_invalid_values": lambda: True,
        "watermarking_config": lambda: WatermarkingConfig(
            bias=2.0, seeding_scheme=rng.choice(["lefthash", "selfhash"])
        ),
    }
    for name in rng.sample(sorted(drawn), rng.choice([0, 0, 1, 1, 2, 3])):
        case.options[name] = drawn[name]()
    if case.options["do_sample"] and "prefix_allowed_tokens_fn" in case.options:
        # The penalty of an id that is not allowed is not a number.
        case.options.pop("exponential_decay_length_penalty", None)
    forced = {case.options.get("forced_bos_token_id"), case.options.get("forced_eos_token_id")}
    if "suppress_tokens" in case.options:
        case.options["suppress_tokens"] = [token for token in case.options["suppress_tokens"] if token not in forced]


def draw_outputs(rng: random.Random, case: Case) -> None:
    case.streamed = case.num_rows == 1 and rng.random() < 0.5
    if rng.random() < 0.5:
        case.options["return_dict_in_generate"] = True
        for name in OUTPUTS:
            if rng.random() < 0.5 and (name != "attentions" or case.attention == "eager"):
                case.options[f"output_{name}"] = True


def draw_inputs(rng: random.Random, case: Case) -> None:
    """Caches, pieces of the prompt, embeddings, token types and positions."""
    target, ids, options = case.target, case.ids, case.options
    single, width = case.num_rows == 1, ids.shape[1]
    kind = rng.choice(["none"] * 8 + ["prefix", "prefix", "static", "static object", "dynamic"])
    if kind == "static" and case.family in WINDOWED:
        # Within its window a static cache can be rolled back, and generate() sizes its own by earlier calls.
        kind = "static object"
    if kind == "prefix" and single and width > 1:
        with torch.no_grad():
            cached = target(ids[:, : rng.randint(1, width - 1)], use_cache=True).past_key_values
        case.fresh["past_key_values"] = lambda: copy.deepcopy(cached)
    elif kind == "static object" and len(ids) == case.num_rows:
        case.fresh["past_key_values"] = lambda: StaticCache(config=target.config, max_cache_len=64)
    elif kind in ("static", "dynamic"):
        options["cache_implementation"] = kind
    # transformers 5.17 reads a prefix that is cached already once more where the prompt comes in pieces.
    if rng.random() < 0.15 and not (OLD and "past_key_values" in case.fresh):
        options["prefill_chunk_size"] = rng.randint(1, 8)
    if rng.random() < 0.1:
        with torch.no_grad():
            options["inputs_embeds"] = target.get_input_embeddings()(ids)
    if case.family == "gpt2" and rng.random() < 0.4:
        options["token_type_ids"] = (torch.arange(width) > rng.randint(0, width)).long().expand_as(ids)
    if rng.random() < 0.1:
        options["position_ids"] = (case.mask.cumsum(dim=1) - 1).clamp(min=0) + rng.randint(0, 5)


def draw_speculation(rng: random.Random, case: Case) -> None:
    case.overrides = {
        "block_size": rng.choice([2, 4, 8]),
        "slot_layout": rng.choice(["fill", "shift"]),
        "fusion": rng.choice(["concat", "layerwise"]),
        "block_attention": rng.choice(["bidirectional", "causal"]),
    }
    case.speculation = {
        "sweeps": rng.choice([0, 1, 3, None]),
        "draft_length": rng.choice([None, None, 1, 3, "auto"]),
        "verification": rng.choice(["token", "block"]),
        "top_candidates": rng.choice([None, None, 2]),
    }
    if rng.random() < 0.2:
        case.ours["num_assistant_tokens"] = rng.randint(1, 6)
    if rng.random() < 0.2:
        case.ours["assistant_confidence_threshold"] = rng.choice([0.3, 0.9])


# What our loop refuses by name: (words of the error, when).
REFUSED: list[tuple[str, Callable[[Case], bool]]] = [
    (
        "`stopping_criteria`: without an end id",
        lambda case: (
            case.num_rows > 1
            and "eos_token_id" not in case.options
            and ("stop_strings" in case.options or "stopping_criteria" in case.options)
        ),
    ),
    (
        "cannot be rolled back",
        lambda case: case.num_rows == 1 and case.has_static_cache and not StaticLayer.is_croppable,
    ),
    ("`past_key_values`: a static cache with", lambda case: case.has_static_cache and case.family == "lfm2"),
    ("`past_key_values`: a batch with a drafter", lambda case: case.num_rows > 1 and case.has_static_cache),
    (
        "`prefill_chunk_size`: `inputs_embeds`",
        lambda case: (
            {"inputs_embeds", "prefill_chunk_size"} <= set(case.options)
            and (case.num_cached > 0 or case.options["prefill_chunk_size"] < case.ids.shape[1])
        ),
    ),
    ("cannot be rolled back", lambda case: case.has_static_cache and case.family in WINDOWED),
]


def refusal(case: Case) -> str | None:
    return next((words for words, applies in REFUSED if applies(case)), None)
