"""Surgery on key/value caches whose rows advance unequally.

A cache of R rows has T columns; the valid ones of a row are its last ones, so that the distance of two columns is the
distance of their tokens in every row, which is what window masks count. Columns before them are padding.
"""

from __future__ import annotations

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer


def keep_columns(cache: Cache, columns: torch.Tensor) -> None:
    """Replaces every layer's columns by `columns` [R, T'], the old column of each new one. In place."""
    for layer in cache.layers:
        if not layer.is_initialized:
            continue
        index = columns.to(layer.keys.device)[:, None, :, None]
        for name in ("keys", "values"):
            states = getattr(layer, name)
            setattr(layer, name, states.gather(2, index.expand(-1, states.shape[1], -1, states.shape[3])))


def keep_rows(cache: Cache, rows: torch.Tensor) -> None:
    """Drops all rows but `rows` [R'], in place."""
    for layer in cache.layers:
        if layer.is_initialized:
            layer.keys = layer.keys[rows.to(layer.keys.device)]
            layer.values = layer.values[rows.to(layer.values.device)]


def aligned_columns(total: int, dropped: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Old columns in their new order when each row loses its last `dropped` [R] of `total` columns.

    The new width is the largest `valid` [R], the number of valid columns a row has afterwards; rows with fewer are
    padded on the left by columns that count for nothing. -> [R, max(valid)]
    """
    width = int(valid.max())
    ends = total - dropped
    return (ends[:, None] - width + torch.arange(width, device=dropped.device)).clamp(min=0)


def ragged_cache(cache: Cache) -> Cache:
    """An empty cache whose layers keep all columns, in place of `cache`.

    Raises:
        ValueError: the cache holds tokens already or has a fixed size.
    """
    plain = isinstance(cache, DynamicCache) and not getattr(cache, "offloading", False)
    if not plain or not all(isinstance(layer, DynamicLayer) for layer in cache.layers) or cache.get_seq_length() > 0:
        raise ValueError(
            f"`past_key_values`: a batch with a drafter needs an empty dynamic cache of keys and values, got "
            f"{type(cache).__name__} with {cache.get_seq_length()} tokens; leave it and `cache_implementation` out."
        )
    return DynamicCache()
