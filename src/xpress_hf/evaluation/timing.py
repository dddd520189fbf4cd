"""One timed generate() call, prefill and decode apart."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from ..decoding.acceptance import AcceptanceRecord
from ..modeling.drafter import XPressDrafter, unwrap_drafter


class Stopwatch(BaseStreamer):
    """Notes when the first new token arrives and passes everything on to another streamer."""

    def __init__(self, listener: BaseStreamer | None = None):
        self.listener = listener
        self.first_token_at: float | None = None
        self._saw_prompt = False

    def put(self, value: torch.Tensor) -> None:
        if self._saw_prompt and self.first_token_at is None:
            self.first_token_at = time.perf_counter()
        self._saw_prompt = True
        if self.listener is not None:
            self.listener.put(value)

    def end(self) -> None:
        if self.listener is not None:
            self.listener.end()


@dataclass(frozen=True)
class TimedRun:
    """A generate() call. Times in seconds.

    ids: [S] prompt and answer. prefill_s: until the first new token. decode_s: from there to the end.
    acceptance: record of the drafter; `None` for plain decoding.
    """

    ids: torch.Tensor
    prompt_length: int
    prefill_s: float
    decode_s: float
    acceptance: AcceptanceRecord | None

    @property
    def num_new_tokens(self) -> int:
        return len(self.ids) - self.prompt_length

    @property
    def tokens_per_s(self) -> float:
        """Decode speed: the first token belongs to the prefill. NaN where there is no second one."""
        return (self.num_new_tokens - 1) / self.decode_s if self.num_new_tokens > 1 else float("nan")


def timed_generate(
    target: PreTrainedModel,
    input_ids: torch.Tensor,
    drafter: XPressDrafter | None = None,
    listener: BaseStreamer | None = None,
    **options: Any,
) -> TimedRun:
    """Runs `target.generate` on one prompt [1, S]; `options` are those of generate()."""
    watch = Stopwatch(listener)
    if drafter is not None:
        options["assistant_model"] = drafter
    start = time.perf_counter()
    output = target.generate(input_ids, attention_mask=torch.ones_like(input_ids), streamer=watch, **options)
    end = time.perf_counter()
    first = end if watch.first_token_at is None else watch.first_token_at
    return TimedRun(
        ids=output[0].cpu(),
        prompt_length=input_ids.shape[1],
        prefill_s=first - start,
        decode_s=end - first,
        acceptance=None if drafter is None else unwrap_drafter(drafter).last_acceptance,
    )
