"""The one place that touches private names of transformers: makes generate() use an `XPressDrafter`.

Wrapped on `GenerationMixin`, once per process: `_validate_generation_mode` (our checks instead of those for a causal
assistant), `_assisted_decoding` (call state, acceptance record) and `_get_candidate_generator`. With any other
assistant, or with `speculation_type="dflash"`, the originals run unchanged. Pipelines compare special ids of target
and assistant; a drafter has no tokenizer of its own, so there that comparison is left out.
"""

from __future__ import annotations

import functools
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers.cache_utils import Cache, StaticLayer
from transformers.generation import (
    GenerationMixin,
    LogitsProcessorList,
    StoppingCriteriaList,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.generation.configuration_utils import GenerationConfig, GenerationMode
from transformers.pipelines import base as pipelines
from transformers.utils import logging

from ..modeling.drafter import XPressDrafter, is_drafter, unwrap_drafter
from .caches import cache_name, check_cache, cropped_by_numbers, is_replaceable, recurrent_state
from .candidates import XPressCandidateGenerator
from .loop import DecodingLoop
from .outputs import build_output
from .static_shapes import dynamic_copy
from .target import check_pair

logger = logging.get_logger(__name__)


@dataclass
class _Call:
    """State of one generate() call."""

    drafter: XPressDrafter
    stopping_criteria: StoppingCriteriaList
    generator: XPressCandidateGenerator | None = None


_current_call: ContextVar[_Call | None] = ContextVar("xpress_hf_call", default=None)


class _CommittedOnly(StoppingCriteriaList):
    """Judges committed ids only. Some versions of the loop also judge the candidate, before it is verified, and drop
    a token when it says stop; our drafts never contain a stop, so only the prompt itself could say so."""

    def __init__(self, criteria: StoppingCriteriaList, call: _Call):
        super().__init__(criteria)
        self._call = call

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        generator = self._call.generator
        if generator is not None and input_ids is generator.candidate_ids:
            return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
        return super().__call__(input_ids, scores, **kwargs)


def _is_ours(assistant: Any, generation_config: GenerationConfig) -> bool:
    return assistant is not None and is_drafter(assistant) and not _stock_dflash(generation_config)


def _stock_dflash(generation_config: GenerationConfig) -> bool:
    return getattr(generation_config, "speculation_type", None) == "dflash"


def check_options(model: Any, mode: GenerationMode, config: GenerationConfig, options: dict[str, Any]) -> None:
    """Raises `ValueError`, naming the option, for what cannot be combined with a drafter; before any forward."""
    refused = {
        "use_mtp": "drafts with the target's own heads",
        "prompt_lookup_num_tokens": "drafts from the prompt",
        "assistant_early_exit": "drafts with the target's own early layers",
        "assistant_ensemble_weight": "changes the output's law, and a drafter promises not to",
    }
    for name, reason in refused.items():
        if getattr(config, name, None):
            raise ValueError(f"`{name}`={getattr(config, name)!r} {reason}; remove it or `assistant_model`.")
    if config.num_beams is not None and config.num_beams > 1:
        raise ValueError(
            f"`num_beams`={config.num_beams}: beam search takes no drafter; set it to 1 or drop the drafter."
        )
    if config.num_return_sequences is not None and config.num_return_sequences > 1 and not config.do_sample:
        raise ValueError(
            f"`num_return_sequences`={config.num_return_sequences}: greedy decoding gives the same sequence every "
            "time; set `do_sample=True` or leave it out."
        )
    if mode != GenerationMode.ASSISTED_GENERATION:
        raise ValueError(f"Generation mode {mode.value!r} takes no drafter; remove `assistant_model`.")
    if config.use_cache is False:
        raise ValueError("`use_cache`=False: drafts are verified against a cache; set `use_cache=True`.")
    if config.guidance_scale is not None and config.guidance_scale != 1:
        raise ValueError(
            f"`guidance_scale`={config.guidance_scale}: its processor keeps a cache of its own that a rejected draft "
            "would spoil; remove it or `assistant_model`."
        )
    if options.get("assistant_tokenizer") is not None:
        raise ValueError("`assistant_tokenizer`: a drafter shares the target's vocabulary; remove the argument.")
    if getattr(model, "_is_stateful", False):
        raise recurrent_state(model)


# Processors that remember the texts they were called with, so that rejected drafts would spoil them.
_STATEFUL = (SynthIDTextWatermarkLogitsProcessor, UnbatchedClassifierFreeGuidanceLogitsProcessor)


def check_processors(processors: LogitsProcessorList) -> None:
    """Raises `ValueError` for processors whose result depends on more than ids and scores."""
    for processor in processors:
        if isinstance(processor, _STATEFUL):
            raise ValueError(
                f"`logits_processor`: {type(processor).__name__} remembers what it saw, and a rejected draft would "
                "spoil that; remove it or `assistant_model`."
            )


def _validate(original: Any, self: Any, mode: GenerationMode, config: GenerationConfig, options: dict) -> None:
    assistant = options.get("assistant_model")
    if not _is_ours(assistant, config):
        return original(self, mode, config, options)
    check_options(self, mode, config, options)
    check_pair(self, unwrap_drafter(assistant).config)


def _decode(original: Any, self: Any, input_ids: torch.LongTensor, *args: Any, **kwargs: Any) -> Any:
    assistant, config = kwargs.get("assistant_model"), kwargs["generation_config"]
    if not _is_ours(assistant, config):
        return original(self, input_ids, *args, **kwargs)
    if input_ids.shape[1] == 0:
        raise ValueError(
            "`inputs_embeds`: verification needs the ids of the prompt, and the loop of some versions drops the mask "
            "without them; pass `input_ids` too, or generate without `assistant_model`."
        )
    names = ("logits_processor", "stopping_criteria", "generation_config")
    kwargs.update(zip(names, args, strict=False))
    check_processors(kwargs["logits_processor"])
    if kwargs.get(cache_name(kwargs)) is None:
        raise ValueError(
            f"`use_cache`: {type(self).__name__} takes no cache of transformers, and drafts are verified against one; "
            "generate without `assistant_model`."
        )
    drafter = unwrap_drafter(assistant)
    longest = drafter.config.max_position_embeddings
    if config.max_length > longest:
        logger.warning_once(
            f"The text may grow to {config.max_length} tokens, the drafter was made for {longest}: beyond that its "
            "drafts will be kept less often; the text itself is not affected."
        )
    check_cache(self, kwargs[cache_name(kwargs)])
    if drafter.speculation.loop != "stock":
        return _decode_rows(self, drafter, input_ids, **kwargs)
    check_stock_loop(drafter, input_ids, kwargs)
    call = _Call(drafter, kwargs["stopping_criteria"])
    kwargs["stopping_criteria"] = _CommittedOnly(call.stopping_criteria, call)
    token = _current_call.set(call)
    try:
        with cropped_by_numbers(kwargs[cache_name(kwargs)]):
            output = original(self, input_ids, **kwargs)
    finally:
        _current_call.reset(token)
    call.drafter.last_acceptance = call.generator.record
    call.drafter.last_row_acceptance = [call.generator.record]
    return output


def check_stock_loop(drafter: XPressDrafter, input_ids: torch.Tensor, kwargs: dict[str, Any]) -> None:
    """Raises `ValueError` for what only our own loop serves."""
    for name, wanted in (
        ("`verification`='block'", drafter.speculation.verification == "block"),
        ("`draft_length`='auto'", drafter.speculation.draft_length == "auto"),
        ("`compile`=True", bool(drafter.speculation.compile)),
        ("a batch", input_ids.shape[0] > 1),
        ("`past_key_values` with a prefix", kwargs[cache_name(kwargs)].get_seq_length() > 0),
    ):
        if wanted:
            raise ValueError(f"{name} takes our own loop: `speculation.loop` is 'stock', set it to None.")


def check_compile(num_rows: int, config: GenerationConfig, cache: Cache) -> None:
    """Raises `ValueError` for what compiled forwards of one shape do not serve."""
    for name, wanted in (
        ("a batch", num_rows > 1),
        ("`output_attentions`", bool(config.output_attentions)),
        ("`cache_implementation` or `past_key_values`", not is_replaceable(cache)),
        (f"transformers {transformers.__version__}", not StaticLayer.is_croppable),
    ):
        if wanted:
            raise ValueError(
                f"`speculation.compile`=True brings caches of its own for one sequence, as transformers from 5.24 on "
                f"can roll them back; it does not serve {name}. Set it to None."
            )


# Arguments of the wrapped loop that are not meant for the target's forward.
_LOOP_ARGUMENTS = (
    "assistant_model",
    "assistant_tokenizer",
    "generation_config",
    "inputs_tensor",
    "logits_processor",
    "stopping_criteria",
    "streamer",
    "synced_gpus",
    "tokenizer",
)


def _decode_rows(model: Any, drafter: XPressDrafter, input_ids: torch.Tensor, **kwargs: Any) -> Any:
    """One or many sequences in our own loop."""
    config, streamer = kwargs["generation_config"], kwargs.get("streamer")
    if streamer is not None and len(input_ids) > 1:
        raise ValueError("`streamer`: rows of a batch advance at their own pace; stream one sequence per call.")
    if kwargs.get("synced_gpus"):
        raise ValueError(
            "`synced_gpus`: processes whose drafts are kept at different rates do not run in step; gather the "
            "target's weights and set it to False."
        )
    if drafter.speculation.compile:
        check_compile(len(input_ids), config, kwargs[cache_name(kwargs)])
    loop = DecodingLoop(
        model,
        drafter,
        input_ids,
        kwargs["logits_processor"],
        kwargs["stopping_criteria"],
        config,
        {key: value for key, value in kwargs.items() if key not in _LOOP_ARGUMENTS},
        streamer,
    )
    rows = loop.run()
    cache = loop.forwards.cache
    if loop.static is not None:
        cache = dynamic_copy(cache) if loop.requested.as_dict else cache
        loop.static.give_back()
    drafter.last_row_acceptance = [row.record for row in rows]
    drafter.last_acceptance = sum(drafter.last_row_acceptance[1:], start=rows[0].record)
    pad = getattr(config, "_pad_token_tensor", None)
    return build_output(rows, loop.requested, 0 if pad is None else int(pad), cache)


def _candidate_generator(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    call = _current_call.get()
    if call is None or not _is_ours(kwargs.get("assistant_model"), kwargs["generation_config"]):
        return original(self, *args, **kwargs)
    call.generator = XPressCandidateGenerator(
        model=self,
        drafter=call.drafter,
        generation_config=kwargs["generation_config"],
        logits_processor=kwargs["logits_processor"],
        stopping_criteria=call.stopping_criteria,
    )
    return call.generator


def _assistant_of_pipeline(original: Any, model: Any, assistant_model: Any, assistant_tokenizer: Any) -> Any:
    if is_drafter(assistant_model):
        return assistant_model, None
    return original(model, assistant_model, assistant_tokenizer)


def install() -> None:
    """Wraps the three methods of `GenerationMixin` and what pipelines do with an assistant; a second call changes
    nothing."""
    if not isinstance(pipelines.load_assistant_model, functools.partial):
        pipelines.load_assistant_model = functools.partial(_assistant_of_pipeline, pipelines.load_assistant_model)
    for name, wrapper in (
        ("_validate_generation_mode", _validate),
        ("_assisted_decoding", _decode),
        ("_get_candidate_generator", _candidate_generator),
    ):
        original = getattr(GenerationMixin, name)
        if getattr(original, "_xpress_hf", False):
            continue
        # partialmethod would hide the signature, which generate() inspects.
        wrapped: Any = functools.wraps(original)(_bind(wrapper, original))
        wrapped._xpress_hf = True
        setattr(GenerationMixin, name, wrapped)


def _bind(wrapper: Any, original: Any) -> Any:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return wrapper(original, self, *args, **kwargs)

    return method
