"""Compiled forwards and the caches of fixed length that they take: `SpeculationConfig(compile=True)`.

A compiled forward is bound to the shapes of its inputs and to the place of its cache in memory. So every verification
has one of two widths, every block reads the same number of new context rows, lengths of caches are rounded up, and
the caches of a call that has ended serve the next one: a pair is compiled once.

Symbols: N tokens in a verification (anchor and drafts), B block size, S new context rows, T columns of a cache.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import CompileConfig, GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, StaticLayer

from ..modeling.backbone import additive_mask, context_visibility
from ..modeling.drafter import XPressDrafter

# Texts whose longest length is rounded to the same number share what was compiled.
LENGTHS = 256

_idle: WeakKeyDictionary[PreTrainedModel, tuple[tuple, Cache]] = WeakKeyDictionary()


class StaticShapes:
    """What one generate() call over one sequence compiles and fills.

    width: N of a verification with drafts, and S of the block after it.
    target_cache, drafter_cache: empty caches of `num_columns` columns in all layers, windowed ones too.
    verify, draft: compiled forwards of target and drafter. Prompts, and what plain steps left for a block to read, are
        as long as they are: both run as they were.

    Args:
        max_length: longest text. num_drafts: longest draft that is verified.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        drafter: XPressDrafter,
        config: GenerationConfig,
        max_length: int,
        num_drafts: int,
    ):
        self.models = (model, drafter)
        self.width = num_drafts + 1
        longest = max_length + self.width + drafter.config.block_size
        self.num_columns = -(-longest // LENGTHS) * LENGTHS
        self.target_cache, self.drafter_cache = (self._take(one) for one in self.models)
        options = config.compile_config or CompileConfig(dynamic=False, mode="default")
        self.verify, self.draft = (one.get_compiled_call(options) for one in self.models)

    def _take(self, model: PreTrainedModel) -> Cache:
        """The cache of the call before, if it fits: whoever holds one has it alone, and one that an exception left
        half full is gone."""
        key, cache = _idle.pop(model, (None, None))
        if key != self._key(model):
            num_layers = model.config.get_text_config().num_hidden_layers
            return Cache(layers=[StaticLayer(self.num_columns) for _ in range(num_layers)])
        cache.reset()
        return cache

    def _key(self, model: PreTrainedModel) -> tuple:
        return self.num_columns, model.device, model.dtype

    def give_back(self) -> None:
        """Both caches wait for the next call; before that nobody reads them any more."""
        for model, cache in zip(self.models, (self.target_cache, self.drafter_cache), strict=True):
            _idle[model] = self._key(model), cache

    def padded(self, rows: torch.Tensor) -> torch.Tensor:
        """[1, S or N, ...] -> [1, width, ...] by rows at the end that count for nothing; longer ones stay."""
        missing = self.width - rows.shape[1]
        if missing <= 0:
            return rows
        return torch.cat([rows, rows[:, -1:].expand(-1, missing, *rows.shape[2:])], dim=1)

    def block_inputs(self, drafter: XPressDrafter, counted: int, num_new: int) -> dict[str, Any]:
        """Arguments of `draft_block`: forward, positions [1, S + B] and masks [1, 1, B, T] of a block behind `counted`
        context rows, the last of which are among the `num_new` = S new ones. In the cache the block stands behind the
        new rows that do not count."""
        config, device = drafter.config, drafter.device
        first = int(self.drafter_cache.get_seq_length())
        block = counted + torch.arange(config.block_size, device=device)[None]
        columns = torch.arange(self.num_columns, device=device)[None]
        masks = {}
        for kind, direction in zip(config.layer_types, config.block_attention_per_layer, strict=True):
            if kind not in masks:
                seen = context_visibility(columns, columns < counted, block, config, kind, direction == "causal")
                context, own = seen.split([self.num_columns, config.block_size], dim=-1)
                context[..., first + num_new : first + num_new + config.block_size] = own
                masks[kind] = additive_mask(context, drafter.dtype)
        new = torch.arange(first, first + num_new, device=device)[None]
        return {
            # The first block lays out the cache, which belongs in no graph.
            "forward": self.draft if first and num_new == self.width else drafter,
            "position_ids": torch.cat([new, block], dim=1),
            "attention_mask": masks,
        }


def dynamic_copy(cache: Cache) -> Cache:
    """The columns in use, in a cache that grows."""
    copy, length = DynamicCache(), int(cache.get_seq_length())
    for index, layer in enumerate(cache.layers):
        copy.update(layer.keys[:, :, :length].clone(), layer.values[:, :, :length].clone(), index)
    return copy
