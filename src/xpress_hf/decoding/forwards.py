"""Forwards of the target within one generate() call: prefill and verification of rows that advance unequally.

Symbols: R rows still running, S prompt length, N tokens in a verification (anchor and drafts), L taps, H target width.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from .caches import (
    aligned_columns,
    cache_name,
    keep_columns,
    keep_rows,
    not_croppable,
    on_device,
    ragged_cache,
    recording_cache,
)
from .static_shapes import StaticShapes
from .target import tap_request, taps

# One number per token; the answer goes on with the number of the last prompt token, as in plain generate.
TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")


class TargetForwards:
    """Runs the target and keeps its cache and positions.

    Args:
        model: the target.
        input_ids: [R, S], left-padded where `attention_mask` says so.
        model_kwargs: arguments of the target's forward as generate() prepared them, the cache among them.
        layers: tapped layers.
        extras: further arguments of every forward, such as `output_attentions`. `output_hidden_states=True` makes the
            target keep all states instead of the tapped ones.
        chunk_size: longest piece of the prompt in one forward; `None` = the whole prompt.
        static: cache and compiled forward of verifications; `None` = the cache of `model_kwargs`, nothing compiled.

    Raises:
        ValueError: the cache or an argument cannot be served; before any forward.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        model_kwargs: dict[str, Any],
        layers: list[int],
        extras: dict[str, Any],
        chunk_size: int | None = None,
        static: StaticShapes | None = None,
    ):
        self.model, self.layers = model, layers
        self.num_layers = model.config.get_text_config().num_hidden_layers
        self.extras = {"output_hidden_states": tap_request(layers), **extras}
        self.parameters = inspect.signature(model.forward).parameters
        self.cache_name = cache_name(model_kwargs)
        self.single = len(input_ids) == 1
        given = model_kwargs[self.cache_name]
        self.static = static
        if static is not None:
            self.cache: Cache = static.target_cache
        else:
            self.cache = recording_cache(given) if self.single else ragged_cache(given)
        self.first_inputs = {**model_kwargs, self.cache_name: self.cache}
        mask = model_kwargs.get("attention_mask")
        self.mask = torch.ones_like(input_ids) if mask is None else mask
        self.num_cached = self._check_prefix(input_ids)
        self.chunk_size = chunk_size
        self.later_inputs = self._later_inputs(input_ids)
        self.offset = torch.zeros(len(input_ids), dtype=torch.long, device=input_ids.device)

    def _check_prefix(self, input_ids: torch.Tensor) -> int:
        """Tokens that the cache holds already."""
        mask, cached = self.mask, self.cache.get_seq_length()
        if mask.shape != input_ids.shape and cached:
            raise ValueError(
                f"`past_key_values` holds {cached} tokens that `input_ids` of {input_ids.shape[1]} tokens leaves out; "
                "the drafter has to read them: pass the ids of the whole text, or generate without `assistant_model`."
            )
        if mask.shape != input_ids.shape or bool((mask.diff(dim=1) < 0).any()) or not bool(mask[:, -1].all()):
            raise ValueError(
                "`attention_mask`: a drafter takes padding on the left only. Set `tokenizer.padding_side='left'`; "
                "where a prompt itself holds the padding id, pass `attention_mask`."
            )
        if cached >= input_ids.shape[1]:
            raise ValueError(
                f"`past_key_values` holds {cached} tokens and `input_ids` {input_ids.shape[1]}: at least one token "
                "has to be new. Pass the ids of the whole text, or crop the cache."
            )
        return cached

    def _later_inputs(self, input_ids: torch.Tensor) -> dict[str, Any]:
        """What the target's forward takes after the prefill beside ids, mask, positions and cache."""
        later = self.model.prepare_inputs_for_generation(input_ids, is_first_iteration=False, **self.first_inputs)
        ours = ("input_ids", "inputs_embeds", "attention_mask", "position_ids", "logits_to_keep", "use_cache")
        later = {
            name: value
            for name, value in later.items()
            if value is not None and name not in (*ours, self.cache_name, *self.extras)
        }
        for name, value in later.items():
            if isinstance(value, torch.Tensor | list | tuple) and name not in TOKEN_TYPES and not self.single:
                raise ValueError(f"`{name}`: a batch with a drafter does not serve it yet; generate row by row.")
        return later

    def prefill(self, input_ids: torch.Tensor) -> tuple[Any, torch.Tensor]:
        """Runs the prompt behind what the cache holds.

        Returns:
            the outputs of the last forward, whose logits are those of the last token alone where the target can do so,
            and the taps of the whole prompt [R, S, L * H].
        """
        step = self.chunk_size or input_ids.shape[1]
        if self.chunk_size and (self.num_cached or step < input_ids.shape[1]):
            self._check_chunks()
        states = []
        if self.num_cached:
            # The drafter needs the taps of the prefix; the target goes on from the cache that it was given.
            inputs = self._prompt_inputs(input_ids, 0, self.num_cached)
            inputs[self.cache_name], inputs["use_cache"] = None, False
            states.append(self.taps(self.model(**inputs)))
        for begin in range(self.num_cached, input_ids.shape[1], step):
            inputs = self._prompt_inputs(input_ids, begin, min(begin + step, input_ids.shape[1]))
            outputs = self.model(**inputs)
            states.append(self.taps(outputs))
            self._shrink_windows()
        if (held := self.cache.get_seq_length()) != input_ids.shape[1]:
            raise ValueError(
                f"`past_key_values`: after a prompt of {input_ids.shape[1]} tokens the cache of "
                f"{type(self.model).__name__} holds {held}; drafts are verified against a cache of all tokens. "
                "Generate without `assistant_model`."
            )
        self._note_positions(inputs.get("position_ids"), input_ids.device)
        return outputs, torch.cat([state.to(input_ids.device) for state in states], dim=1)

    def _shrink_windows(self) -> None:
        """A cache that records the past keeps all columns of windowed layers until it is cropped, if only by nothing.

        Raises:
            ValueError: it cannot be cropped, which recurrent layers know after their first forward only.
        """
        if not getattr(self.cache, "is_croppable", True):
            raise not_croppable(self.model, self.cache)
        if self.single:
            self.cache.crop(0)

    def _prompt_inputs(self, input_ids: torch.Tensor, begin: int, end: int) -> dict[str, Any]:
        kwargs = dict(self.first_inputs)
        if kwargs.get("attention_mask") is not None:
            kwargs["attention_mask"] = self.mask[:, :end]
        for name in ("position_ids", *TOKEN_TYPES):
            if isinstance(kwargs.get(name), torch.Tensor):
                kwargs[name] = kwargs[name][..., :end]
        if kwargs.get("inputs_embeds") is not None:
            kwargs["inputs_embeds"] = kwargs["inputs_embeds"][:, :end]
        new = None if begin == 0 else end - begin
        inputs = self.model.prepare_inputs_for_generation(
            input_ids[:, :end], next_sequence_length=new, is_first_iteration=True, **kwargs
        )
        inputs.update(self.extras)
        if "logits_to_keep" in self.parameters:
            inputs["logits_to_keep"] = 1
        return inputs

    def _check_chunks(self) -> None:
        known = {"attention_mask", "position_ids", self.cache_name, *TOKEN_TYPES}
        for name, value in self.first_inputs.items():
            # Features of images that generate() encoded beforehand are a dict.
            if isinstance(value, torch.Tensor | dict) and name not in known:
                raise ValueError(f"`prefill_chunk_size`: `{name}` cannot be cut into pieces; set it to None.")

    def _note_positions(self, given: torch.Tensor | None, device: torch.device) -> None:
        """Distance of the target's positions from a count of the row's tokens [..., R]; positions that the caller
        chose, or that images take, go on where they ended."""
        counted = self.mask.sum(dim=1) - 1
        last = counted if given is None else given[..., -1]
        self.offset = (last.to(device) - counted.to(device)).expand(*last.shape[:-1], len(counted))

    def verify(self, tokens: torch.Tensor, lengths: list[int]) -> Any:
        """One forward over anchors and drafts [R, N]; `lengths` [R] tokens that each row has run."""
        if self.static is None:
            return self._forward(self.model, tokens, lengths)
        num_tokens = tokens.shape[1]
        if num_tokens > 1:
            tokens = self.static.padded(tokens)
        outputs = self._forward(self.static.verify, tokens, lengths)
        outputs.logits = outputs.logits[:, :num_tokens]
        self.cache.crop(num_tokens - tokens.shape[1])
        return outputs

    def _forward(self, model: Callable[..., Any], tokens: torch.Tensor, lengths: list[int]) -> Any:
        width, device = self.cache.get_seq_length(), tokens.device
        inputs: dict[str, Any] = {"input_ids": tokens, self.cache_name: self.cache, "use_cache": True}
        inputs.update(self.later_inputs)
        inputs.update(self.extras)
        for name in TOKEN_TYPES:
            if name in self.later_inputs:
                inputs[name] = self.later_inputs[name][:, -1:].expand(-1, tokens.shape[1])
        run = on_device(lengths, device)
        if any(length < width for length in lengths):
            columns = torch.arange(width + tokens.shape[1], device=device)
            inputs["attention_mask"] = (columns >= (width - run)[:, None]).long()
        if "position_ids" in self.parameters:
            steps = torch.arange(tokens.shape[1], device=device)
            inputs["position_ids"] = (run + self.offset)[..., None] + steps
        return model(**inputs)

    def taps(self, outputs: Any) -> torch.Tensor:
        return taps(outputs.hidden_states, self.layers, self.num_layers)

    def drop(self, dropped: list[int], lengths: list[int]) -> None:
        """Takes the last `dropped` columns of each row out of the cache and aligns the rows again; `lengths` [R]
        tokens that each row keeps."""
        if self.single:
            # Also with nothing to drop: windowed layers shrink back to their window here.
            self.cache.crop(-dropped[0])
            return
        total = self.cache.get_seq_length()
        if any(dropped) or max(lengths) < total:
            columns = aligned_columns(total, on_device(dropped, self.offset.device), max(lengths))
            keep_columns(self.cache, columns)

    def keep(self, rows: list[int]) -> None:
        """Drops all rows but `rows`."""
        if not rows:
            return
        index = on_device(rows, self.offset.device)
        self.offset = self.offset[..., index]
        keep_rows(self.cache, index)
        for name in TOKEN_TYPES:
            if name in self.later_inputs:
                self.later_inputs[name] = self.later_inputs[name][index]
