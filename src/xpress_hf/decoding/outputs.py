"""What generate() gives back beside ids: per-token scores, logits, hidden states, attentions, and the cache.

Symbols: B rows of the call, R rows still running, V vocabulary, N tokens in a forward, H width.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, PreTrainedConfig
from transformers.cache_utils import Cache, StaticCache
from transformers.generation import GenerateDecoderOnlyOutput

from .caches import joined_cache
from .rows import Row

BY_TOKEN = ("scores", "logits")
BY_LAYER = ("hidden_states", "attentions")
# Kinds of layers of hybrid targets that give no attention weights.
WITHOUT_ATTENTION = ("conv", "linear_attention", "mamba")


def layer_windows(config: PreTrainedConfig) -> list[int | None]:
    """Columns that plain decoding keeps of each layer with attention, `None` = all."""
    config = config.get_text_config()
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        kinds = ["full_attention" if window is None else "sliding_attention"] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in kinds if kind not in WITHOUT_ATTENTION]


@dataclass(frozen=True)
class Requested:
    """What the caller asked for, as plain generate() reads it from the config of the call.

    names: entries of the returned dict, one per new token each. windows: see `layer_windows`.
    fixed_size: whether the target's cache has a column per position of the longest text, used or not.
    """

    names: tuple[str, ...]
    as_dict: bool
    windows: list[int | None]
    fixed_size: bool = False

    @classmethod
    def of(cls, config: GenerationConfig, target_config: PreTrainedConfig, cache: Cache) -> Requested:
        as_dict = bool(config.return_dict_in_generate)
        names = tuple(name for name in (*BY_TOKEN, *BY_LAYER) if as_dict and getattr(config, f"output_{name}"))
        return cls(names, as_dict, layer_windows(target_config), isinstance(cache, StaticCache))

    @property
    def extras(self) -> dict[str, bool]:
        """Arguments of the target's forward."""
        return {f"output_{name}": True for name in BY_LAYER if name in self.names}

    def note(
        self, row: Row, number: int, count: int, judged: torch.Tensor, logits: torch.Tensor, outputs: Any, first: bool
    ) -> None:
        """Keeps what belongs to `count` new tokens of a row, before they join its ids.

        Args:
            number: place of the row among those that run.
            judged, logits: [R, N, V] after and before the processors, where each token was chosen.
            outputs: of the forward over the tokens before them. first: whether that was the prompt, whose states and
                attentions plain generate hands out as a whole.
        """
        for name in self.names:
            steps = row.steps.setdefault(name, [])
            if name in BY_TOKEN:
                steps += list((judged if name == "scores" else logits)[number, :count])
                continue
            layers = getattr(outputs, name)
            if first:
                steps.append(self._of_prompt(name, number, layers))
            elif name == "hidden_states":
                steps += [tuple(layer[number, place, None] for layer in layers) for place in range(count)]
            else:
                steps += [self._attentions(row, number, place, layers) for place in range(count)]

    def _of_prompt(self, name: str, number: int, layers: Any) -> tuple[torch.Tensor, ...]:
        """States or weights of a row's prompt, or of its last piece. Layers with a window keep that many columns of
        earlier pieces, the caches of batches all of them."""
        own = tuple(layer[number] for layer in layers)
        if name == "hidden_states" or self.fixed_size:
            return own
        return tuple(
            weights if window is None else weights[..., 1 - window - weights.shape[-2] :]
            for weights, window in zip(own, self.windows, strict=True)
        )

    def _attentions(self, row: Row, number: int, place: int, layers: Any) -> tuple[torch.Tensor, ...]:
        """Weights [heads, 1, T'] of one place over the row's own columns, as plain decoding lays them out."""
        if self.fixed_size:
            return tuple(layer[number][:, place, None] for layer in layers)
        found = []
        for layer, window in zip(layers, self.windows, strict=True):
            weights = layer[number]
            end = weights.shape[-1] - weights.shape[-2] + place + 1
            total = len(row.ids) + place
            width = total if window is None else min(window, total)
            own = weights[:, place, None, max(0, end - min(width, row.length + place)) : end]
            found.append(pad(own, (width - own.shape[-1], 0)))
        return tuple(found)


def by_token(rows: list[Row], name: str) -> tuple[torch.Tensor, ...]:
    """One entry [B, V] per step of the longest row; a row that has ended holds zeros there."""
    return tuple(pad_sequence([torch.stack(row.steps[name]) for row in rows], batch_first=True).transpose(0, 1))


def by_layer(rows: list[Row], name: str) -> tuple[tuple[torch.Tensor, ...], ...]:
    """One tuple over layers per step of the longest row, entries [B, ...]; zeros for a row that has ended."""
    longest = max((row.steps[name] for row in rows), key=len)
    steps = []
    for step, shapes in enumerate(longest):
        own = [row.steps[name][step] if step < len(row.steps[name]) else None for row in rows]
        steps.append(
            tuple(
                torch.stack([torch.zeros_like(shape) if one is None else one[layer] for one in own])
                for layer, shape in enumerate(shapes)
            )
        )
    return tuple(steps)


def build_output(
    rows: list[Row], requested: Requested, pad_id: int, cache: Cache
) -> torch.Tensor | GenerateDecoderOnlyOutput:
    """Ids [B, S'], rows that ended early padded on the right; or the dict that plain generate would return.

    The cache holds all tokens but the last of each row; for a batch it is put together anew, and columns of padding
    hold zeros, so that going on from it takes the attention mask.
    """
    sequences = pad_sequence([row.ids for row in rows], batch_first=True, padding_value=pad_id)
    if not requested.as_dict:
        return sequences
    cache = cache if len(rows) == 1 else joined_cache([row.cached for row in rows], [row.pads for row in rows])
    fields = inspect.signature(GenerateDecoderOnlyOutput).parameters
    values: dict[str, Any] = {"cache" if "cache" in fields else "past_key_values": cache}
    for name in requested.names:
        values[name] = (by_token if name in BY_TOKEN else by_layer)(rows, name)
    return GenerateDecoderOnlyOutput(sequences=sequences, **values)
