"""Logits processors of a generate() call over the places of a block, in as few calls as stay exact.

Symbols: R rows still running, G texts of equal length, S tokens of a text, D drafts, V vocabulary.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from transformers.generation import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    ExponentialDecayLengthPenalty,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    LogitsProcessor,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from .caches import on_device
from .rows import Row

# Processors that never look at the ids: all slots of a block go through them in one call.
POSITION_FREE = (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    LogitNormalization,
    MinPLogitsWarper,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

# Stock processors that treat every row alike: places of equal length go through them in one call.
ROW_WISE = (
    *POSITION_FREE,
    ExponentialDecayLengthPenalty,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    InfNanRemoveLogitsProcessor,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
)


def position_free(processors: LogitsProcessorList) -> bool:
    """Whether all slots of a block may go through the processors in one call. Subclasses may look at the ids."""
    return all(type(processor) in POSITION_FREE for processor in processors)


def row_wise(processor: LogitsProcessor) -> bool:
    """Whether rows of a batch may be judged in any number and order."""
    # A penalty that leaves prompts out may hold their length row by row.
    per_row = isinstance(getattr(processor, "prompt_ignore_length", None), torch.Tensor)
    return type(processor) in ROW_WISE and not per_row


class RowProcessors:
    """Logits processors of a batch, for texts of any of its rows. Those that may have been built for the whole batch
    look a row up by its number, so they are shown its text in every place of a batch and its own place is read."""

    def __init__(self, processors: LogitsProcessorList, batch: int):
        self.processors, self.batch = processors, batch
        self.at_once = batch == 1 or all(map(row_wise, processors))

    def __call__(self, rows: Sequence[int], input_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """[G, S], [G, V] -> [G, V] for texts of the rows with these numbers in the batch; writes to `logits`."""
        if self.at_once:
            return self.processors(input_ids, logits)
        judged = torch.empty_like(logits)
        for place, row in enumerate(rows):
            shown = logits[place].expand(self.batch, -1).clone()
            judged[place] = self.processors(input_ids[place].expand(self.batch, -1), shown)[row]
        return judged

    def judge(self, rows: list[Row], draft_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Logits [R, D + 1, V] of running rows, each place with the drafts before it counted -> the same shape."""
        places: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for number, row in enumerate(rows):
            for place in range(logits.shape[1]):
                places[len(row.ids) + place].append((number, place))
        judged = torch.empty_like(logits)
        for group in places.values():
            texts = torch.stack([torch.cat([rows[number].ids, draft_ids[number, :place]]) for number, place in group])
            numbers, where = on_device(group, logits.device).unbind(dim=1)
            indices = [rows[number].index for number, _ in group]
            judged[numbers, where] = self(indices, texts, logits[numbers, where])
        return judged
