"""Batches: plain generate against drafts, total tokens per second, group by group of prompts."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import track
from row_file import RowFile
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from xpress_hf import XPressDrafter
from xpress_hf.evaluation.arms import PLAIN
from xpress_hf.evaluation.bootstrap import Interval, bootstrap
from xpress_hf.evaluation.figures import median
from xpress_hf.evaluation.prompts import BenchmarkPrompt, encode_prompt
from xpress_hf.evaluation.tables import Table

# Name -> changes of the drafter's `SpeculationConfig`; `None` = without drafter.
ARMS: dict[str, dict[str, Any] | None] = {PLAIN: None, "auto": {"draft_length": "auto"}, "full block": {}}
# What "auto" may lose against plain generate.
ALLOWED_LOSS = 0.05


def padded(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[BenchmarkPrompt]
) -> dict[str, torch.Tensor]:
    """Ids and mask [R, S] of first turns, padded on the left."""
    texts = [encode_prompt(tokenizer, prompt.turns[0], target.device)[0].tolist() for prompt in prompts]
    return tokenizer.pad({"input_ids": texts}, padding_side="left", return_tensors="pt").to(target.device)


def timed(
    target: PreTrainedModel,
    drafter: XPressDrafter,
    changes: dict[str, Any] | None,
    inputs: dict[str, torch.Tensor],
    new: int,
) -> tuple[int, float]:
    """New tokens of all rows, and seconds of the whole call."""
    options: dict[str, Any] = {"max_new_tokens": new, "do_sample": False}
    before = drafter.speculation
    if changes is not None:
        drafter.speculation = dataclasses.replace(before, **changes)
        options["assistant_model"] = drafter
    try:
        start = _now(target)
        output = target.generate(**inputs, **options)
        seconds = _now(target) - start
    finally:
        drafter.speculation = before
    return sum(map(_length, output[:, inputs["input_ids"].shape[1] :], [target] * len(output))), seconds


def _now(target: PreTrainedModel) -> float:
    if target.device.type != "cpu":
        torch.accelerator.synchronize(target.device)
    return time.perf_counter()


def _length(ids: torch.Tensor, target: PreTrainedModel) -> int:
    """Tokens up to the first end id; what follows is padding."""
    ends = target.generation_config.eos_token_id
    if ends is None:
        return len(ids)
    found = torch.isin(ids, torch.tensor(ends, device=ids.device)).nonzero()
    return int(found[0]) + 1 if len(found) else len(ids)


def batch(
    target: PreTrainedModel,
    drafter: XPressDrafter,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[BenchmarkPrompt],
    sizes: Sequence[int],
    groups: int,
    new: int,
    header: dict[str, Any],
    path: Path | None,
) -> tuple[RowFile, Table]:
    """Every arm on every group in an order that rotates; before that once on the first group, not counted."""
    file = RowFile(path, header, ("batch", "group", "arm"))
    for size in sizes:
        parts = [prompts[first : first + size] for first in range(0, size * groups, size)]
        parts = [part for part in parts if len(part) == size]
        if not parts:
            raise ValueError(f"`--batch-sizes` {size} needs as many prompts, got {len(prompts)}; name more.")
        todo = [number for number in range(len(parts)) if any((size, number, arm) not in file for arm in ARMS)]
        if todo:
            inputs = padded(target, tokenizer, parts[0])
            for changes in ARMS.values():
                timed(target, drafter, changes, inputs, new)
        for number in track(todo, description=f"batch {size}"):
            inputs = padded(target, tokenizer, parts[number])
            names = list(ARMS)
            first = number % len(names)
            found = {}
            for arm in names[first:] + names[:first]:
                found[arm] = timed(target, drafter, ARMS[arm], inputs, new)
            for arm, (tokens, seconds) in found.items():
                if (size, number, arm) not in file:
                    file.add(batch=size, group=number, arm=arm, tokens=tokens, seconds=seconds)
    return file, throughput_table(file, sizes)


def throughput_table(file: RowFile, sizes: Sequence[int]) -> Table:
    rows = []
    for size in sizes:
        own = [row for row in file.rows.values() if row["batch"] == size]
        speeds = {
            arm: {row["group"]: row["tokens"] / row["seconds"] for row in own if row["arm"] == arm} for arm in ARMS
        }
        cells = [str(size), str(len(speeds[PLAIN]))]
        words = []
        for arm, values in speeds.items():
            cells.append(f"{np.median(list(values.values())):.1f}")
            if arm == PLAIN:
                continue
            ratios = np.array([[value / speeds[PLAIN][group]] for group, value in values.items()])
            ratio = bootstrap(ratios, median)
            cells.append(str(ratio))
            words.append(f"{arm} {verdict(ratio)}")
            if arm == "auto":
                kept = ratio.value >= 1 - ALLOWED_LOSS
                words[-1] += f", {'within' if kept else 'beyond'} the allowed loss of {ALLOWED_LOSS:.0%}"
        rows.append([*cells, "; ".join(words)])
    speed_columns = [column for arm in ARMS for column in ([arm] if arm == PLAIN else [arm, f"{arm} / plain [95 %]"])]
    note = (
        "Total tokens per second of whole generate() calls, prefill included: median over groups of prompts. Ratios "
        "are paired: on the same group, median over groups with its 95 % bootstrap interval. auto: "
        '`draft_length="auto"`; full block: all drafts verified in every cycle.'
    )
    return Table("Throughput of batches", ["batch", "groups", *speed_columns, "in words"], rows, note)


def verdict(ratio: Interval) -> str:
    if ratio.low > 1:
        return "pays"
    return "does not pay" if ratio.high < 1 else "makes no difference beyond noise"
