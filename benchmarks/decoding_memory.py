"""Memory while decoding: what grows with the context, against the arithmetic of the two caches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from row_file import RowFile
from step_meter import LiveBytes, Memory
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from xpress_hf import XPressDrafter
from xpress_hf.evaluation.tables import NOTHING, Table

NEW_TOKENS = 24
ARMS = ("plain", "ours")
PHASES = {
    "prompt": "largest until the first draft is verified (prefill, and the drafter's pass over the prompt)",
    "decode": "largest from then on",
    "held": "at the end of the text, caches and the tensors of the last forward",
}


class PhaseMeter(BaseStreamer):
    """Bytes beyond those held before a call, largest of each phase; phases are told by the streamed tokens."""

    def __init__(self, memory: LiveBytes | Memory):
        self.memory = memory
        self.base = memory.held()
        self.bytes: dict[str, int] = {}
        self._puts = 0
        memory.watch()

    def put(self, value: torch.Tensor) -> None:
        self._puts += 1
        # Prompt, first token by the prefill, first token by a draft.
        if self._puts == 3:
            self._note("prompt")
            self.memory.watch()
        self.bytes["held"] = self.memory.held() - self.base

    def end(self) -> None:
        self._note("decode")

    def _note(self, phase: str) -> None:
        self.bytes[phase] = self.memory.peak() - self.base


def cache_bytes(config: Any, dtype: torch.dtype) -> int:
    """Keys and values of one token in all layers; every layer keeps the whole context."""
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * dtype.itemsize


@torch.no_grad()
def measured(
    target: PreTrainedModel, drafter: XPressDrafter | None, ids: torch.Tensor, on_device: bool
) -> dict[str, int]:
    """Bytes by phase of one greedy call on ids [1, S]. on_device: what torch has allocated on the GPU, scratch memory
    of kernels included; else tensor by tensor."""
    options = {"assistant_model": drafter, "max_new_tokens": NEW_TOKENS, "do_sample": False}
    if on_device:
        meter = PhaseMeter(Memory(target.device))
        target.generate(ids, attention_mask=torch.ones_like(ids), streamer=meter, **options)
        return meter.bytes
    with LiveBytes() as live:
        meter = PhaseMeter(live)
        target.generate(ids, attention_mask=torch.ones_like(ids), streamer=meter, **options)
    return meter.bytes


def memory(
    target: PreTrainedModel,
    drafter: XPressDrafter,
    text: torch.Tensor,
    contexts: list[int],
    header: dict[str, Any],
    path: Path | None,
) -> tuple[RowFile, Table]:
    """Both arms at two lengths of context, cut from the ids `text` [S], which is repeated where it is too short."""
    file = RowFile(path, header, ("arm", "context"))
    for context in contexts:
        ids = text.repeat(context // len(text) + 1)[None, :context].to(target.device)
        for arm in ARMS:
            if (arm, context) not in file:
                own = None if arm == "plain" else drafter
                file.add(arm=arm, context=context, **measured(target, own, ids, target.device.type == "cuda"))
    tokens = contexts[-1] - contexts[0]
    of_target = tokens * cache_bytes(target.config.get_text_config(), target.dtype)
    predicted = {"plain": of_target, "ours": of_target + tokens * cache_bytes(drafter.config, drafter.dtype)}
    rows = []
    for phase in PHASES:
        for arm in ARMS:
            first, last = (file.rows[arm, context][phase] for context in (contexts[0], contexts[-1]))
            expected = [NOTHING, NOTHING] if phase == "prompt" else _against(last - first, predicted[arm], tokens)
            rows.append([f"{arm}, {phase}", _mib(first), _mib(last), _mib(last - first), *expected])
    title = f"Memory beyond the weights, MiB, for {contexts[0]} and {contexts[-1]} tokens of context"
    columns = ["arm, phase", str(contexts[0]), str(contexts[-1]), "growth", "growth of caches", "rest, bytes a token"]
    note = " ".join(f"{phase}: {meaning}." for phase, meaning in PHASES.items())
    note += (
        " Growth of caches: keys and values by arithmetic from the configs, of the target and, in our arm, of the "
        "drafter. Rest: measured growth beyond it, over the tokens of context that were added; of the largest value "
        "it is what one layer of the target lays out anew while it runs, with a drafter or without."
    )
    return file, Table(title, columns, rows, note)


def _against(growth: int, predicted: int, tokens: int) -> list[str]:
    return [_mib(predicted), f"{(growth - predicted) / tokens:.1f}"]


def _mib(count: int) -> str:
    return f"{count / 2**20:.2f}"
