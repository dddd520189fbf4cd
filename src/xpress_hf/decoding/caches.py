"""Surgery on key/value caches whose rows advance unequally.

A cache of R rows has T columns; the valid ones of a row are its last ones, so that the distance of two columns is the
distance of their tokens in every row, which is what window masks count. Columns before them are padding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
    StaticCache,
    StaticLayer,
)


def cache_name(model_kwargs: dict[str, Any]) -> str:
    """Name of the cache argument, which differs between versions of transformers."""
    return "cache" if "cache" in model_kwargs else "past_key_values"


def on_device(values: list[int] | list[tuple[int, int]], device: torch.device) -> torch.Tensor:
    """Numbers as a tensor on a device that goes on with what it was told before, where a plain copy waits for it."""
    return torch.tensor(values).to(device, non_blocking=True)


def keep_columns(cache: Cache, columns: torch.Tensor) -> None:
    """Replaces every layer's columns by `columns` [R, T'], the old column of each new one. In place."""
    for layer in cache.layers:
        if layer.is_initialized:
            layer.keys = _columns(layer.keys, columns)
            layer.values = _columns(layer.values, columns)


def _columns(states: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """[R, heads, T, D], [R, T'] -> [R, heads, T', D]. Whole rows of D numbers are copied, which on a CPU takes a
    fifteenth of the time of `gather`."""
    rows, heads, total, _ = states.shape
    starts = torch.arange(rows * heads, device=states.device).view(rows, heads, 1) * total
    places = starts + columns.to(states.device)[:, None]  # [R, heads, T']
    return states.flatten(0, 2).index_select(0, places.flatten()).view(rows, heads, *columns.shape[1:], -1)


def keep_rows(cache: Cache, rows: torch.Tensor) -> None:
    """Drops all rows but `rows` [R'], in place."""
    for layer in cache.layers:
        if layer.is_initialized:
            layer.keys = layer.keys[rows.to(layer.keys.device)]
            layer.values = layer.values[rows.to(layer.values.device)]


def aligned_columns(total: int, dropped: torch.Tensor, width: int) -> torch.Tensor:
    """Old columns in their new order when each row loses its last `dropped` [R] of `total` columns.

    `width` is the largest number of valid columns that a row has afterwards; rows with fewer are padded on the left by
    columns that count for nothing. -> [R, width]
    """
    ends = total - dropped
    return (ends[:, None] - width + torch.arange(width, device=dropped.device)).clamp(min=0)


def recurrent_state(model: PreTrainedModel) -> ValueError:
    return ValueError(
        f"{type(model).__name__} keeps a recurrent state that cannot be rolled back after a rejected draft; its cache "
        "cannot be cropped. Generate without `assistant_model`."
    )


def check_cache(model: PreTrainedModel, cache: Cache) -> None:
    """Raises `ValueError` for caches that are known not to be rolled back; before any forward.

    Since 5.25 transformers crops recurrent states too, from those that it keeps for every token. With most models a
    forward over several tokens then gives other logits than one token at a time, so drafts would change the text.
    """
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    # Short convolutions can be rolled back; Inkling's hybrid layers keep nothing else beside keys and values.
    if "linear_attention" in kinds or ("hybrid" in kinds and not config.model_type.startswith("inkling")):
        raise recurrent_state(model)
    for layer in getattr(cache, "layers", ()):
        # Linear layers of some versions know after a forward only; static ones are judged with the whole cache.
        if not (layer.is_croppable or isinstance(layer, LinearAttentionCacheLayerMixin | StaticLayer)):
            raise not_croppable(model, cache)


def not_croppable(model: PreTrainedModel, cache: Cache) -> ValueError:
    return ValueError(
        f"`past_key_values`: the {type(cache).__name__} of {type(model).__name__} cannot be rolled back after a "
        "rejected draft. Generate without `assistant_model`."
    )


def recording_cache(cache: Cache) -> Cache:
    """The cache of one sequence, told to keep what a rejected draft would overwrite in windowed and stateful layers.

    Raises:
        ValueError: a static cache with layers that grow then: single tokens would attend to its empty columns.
    """
    if hasattr(cache, "activate_past_recording"):
        cache.activate_past_recording()
    if isinstance(cache, StaticCache) and not cache.is_compileable:
        kinds = sorted({type(layer).__name__ for layer in cache.layers})
        raise ValueError(
            f"`past_key_values`: a static cache with {kinds} cannot be rolled back after a rejected draft; leave it "
            "and `cache_implementation` out, or generate without `assistant_model`."
        )
    return cache


@contextmanager
def cropped_by_numbers(cache: Cache) -> Iterator[None]:
    """The loop of transformers tells its cache in tensors how much to drop; layers that add to what they were told, as
    those of 5.17 with windows do, then change the number under whoever reads it."""
    crop = cache.crop
    cache.crop = lambda tokens_to_remove: crop(int(tokens_to_remove))
    try:
        yield
    finally:
        del cache.crop


def is_replaceable(cache: Cache) -> bool:
    """Whether it is empty, and a cache with other layers would hold the same keys and values."""
    plain = isinstance(cache, DynamicCache) and not getattr(cache, "offloading", False)
    # Layers derived from these may keep more than keys and values.
    known = all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers)
    return plain and known and cache.get_seq_length() == 0


def ragged_cache(cache: Cache) -> Cache:
    """An empty cache whose layers keep all columns, in place of `cache`.

    Raises:
        ValueError: the cache holds tokens already or has a fixed size.
    """
    if not is_replaceable(cache):
        raise ValueError(
            f"`past_key_values`: a batch with a drafter needs an empty dynamic cache of keys and values, got "
            f"{type(cache).__name__} of {sorted({type(layer).__name__ for layer in cache.layers})} with "
            f"{cache.get_seq_length()} tokens; leave it and `cache_implementation` out, or generate row by row."
        )
    return DynamicCache()


def row_columns(cache: Cache, number: int, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values [heads, count, D] of the last `count` columns of one row, layer by layer."""
    layers = (layer for layer in cache.layers if layer.is_initialized)
    return [(layer.keys[number, :, -count:].clone(), layer.values[number, :, -count:].clone()) for layer in layers]


def joined_cache(rows: list[list[tuple[torch.Tensor, torch.Tensor]]], pads: list[int]) -> Cache:
    """One cache of rows that ended apart: `pads` columns of zeros before each row, zeros behind the shorter ones."""
    cache = DynamicCache()
    width = max(before + layers[0][0].shape[1] for before, layers in zip(pads, rows, strict=True))
    for index in range(len(rows[0])):
        states = []
        for part in range(2):
            own = [layers[index][part] for layers in rows]
            sides = [(before, width - before - one.shape[1]) for before, one in zip(pads, own, strict=True)]
            states.append(torch.stack([pad(one, (0, 0, *side)) for one, side in zip(own, sides, strict=True)]))
        cache.update(states[0], states[1], index)
    return cache
