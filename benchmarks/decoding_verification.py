"""Two ways to judge sampled drafts: token by token, and as a block, on the same prompts and on the same drafts."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from decoding_batch import padded
from rich.progress import track
from row_file import RowFile
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from xpress_hf import XPressDrafter
from xpress_hf.decoding import hook
from xpress_hf.decoding.loop import DecodingLoop, Draft
from xpress_hf.decoding.verification import block_acceptance
from xpress_hf.evaluation.bootstrap import bootstrap, pooled_ratio, pooled_ratio_difference
from xpress_hf.evaluation.prompts import BenchmarkPrompt
from xpress_hf.evaluation.tables import Table

RULES = ("token", "block")


def expected_by_token(
    ids: torch.Tensor, draft_laws: torch.Tensor, target_laws: torch.Tensor, lengths: torch.Tensor
) -> torch.Tensor:
    """Mean number of drafts that token rejection keeps of this block: sum over k of the product of the first k
    chances. Arguments as `token_rejection`. -> [B]"""
    target, draft = (laws.gather(-1, ids[..., None])[..., 0] for laws in (target_laws[:, :-1], draft_laws))
    inside = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
    return ((target / draft).clamp(max=1.0) * inside).cumprod(dim=1).sum(dim=1)


def expected_by_block(
    ids: torch.Tensor, draft_laws: torch.Tensor, target_laws: torch.Tensor, lengths: torch.Tensor
) -> torch.Tensor:
    """The same for block verification, which keeps the largest accepted length. -> [B]"""
    chances = block_acceptance(ids, draft_laws, target_laws, lengths)
    # At least i drafts are kept unless all lengths from i on are refused.
    refused = (1 - chances[:, 1:]).flip(1).cumprod(dim=1)
    return (1 - refused).sum(dim=1)


class ExpectingLoop(DecodingLoop):
    """The loop as it is; for every block it also notes what either rule would keep on average.

    notes: per row of the call, drafts that token rejection and block verification keep of each block on average.
    """

    notes: dict[int, list[tuple[float, float]]]

    def _accept(self, draft: Draft, judged: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if draft.laws is not None:
            block = (draft.ids, draft.laws, judged.softmax(dim=-1), draft.lengths)
            both = torch.stack([expected_by_token(*block), expected_by_block(*block)], dim=1)
            for row, pair in zip(self.rows, both.tolist(), strict=True):
                self.notes[row.index].append(tuple(pair))
        return super()._accept(draft, judged)


def verification(
    target: PreTrainedModel,
    drafter: XPressDrafter,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[BenchmarkPrompt],
    temperatures: Sequence[float],
    size: int,
    new: int,
    header: dict[str, Any],
    path: Path | None,
) -> tuple[RowFile, Table]:
    """Answers all prompts by both rules, `size` at a time."""
    file = RowFile(path, header, ("temperature", "rule", "benchmark", "id"))
    before = drafter.speculation
    try:
        for temperature in temperatures:
            for rule in RULES:
                drafter.speculation = dataclasses.replace(before, verification=rule)
                todo = [one for one in prompts if (temperature, rule, one.benchmark, one.id) not in file]
                for first in track(range(0, len(todo), size), description=f"{rule}, T = {temperature}"):
                    part = todo[first : first + size]
                    for prompt, row in zip(
                        part,
                        _answered(target, drafter, padded(target, tokenizer, part), temperature, new),
                        strict=True,
                    ):
                        names = {"benchmark": prompt.benchmark, "id": prompt.id}
                        file.add(temperature=temperature, rule=rule, **names, **row)
    finally:
        drafter.speculation = before
    return file, rule_table(file, temperatures)


def _answered(
    target: PreTrainedModel, drafter: XPressDrafter, inputs: dict[str, torch.Tensor], temperature: float, new: int
) -> list[dict[str, Any]]:
    """One row of figures per prompt."""
    notes: dict[int, list[tuple[float, float]]] = defaultdict(list)
    law = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    torch.manual_seed(0)
    with (
        mock.patch.object(hook, "DecodingLoop", ExpectingLoop),
        mock.patch.object(ExpectingLoop, "notes", notes, create=True),
    ):
        target.generate(**inputs, assistant_model=drafter, max_new_tokens=new, **law)
    return [
        {
            "kept": record.accepted,
            "verified": record.verified,
            "blocks": len(notes[number]),
            "expected_token": sum(token for token, _ in notes[number]),
            "expected_block": sum(block for _, block in notes[number]),
        }
        for number, record in enumerate(drafter.last_row_acceptance)
    ]


def rule_table(file: RowFile, temperatures: Sequence[float]) -> Table:
    rows = []
    for temperature in temperatures:
        own = [row for row in file.rows.values() if row["temperature"] == temperature]
        counted = {
            rule: np.array(
                [
                    [sum(row["kept"]) + len(row["kept"]), len(row["kept"])]
                    for row in sorted(own, key=lambda row: (row["benchmark"], row["id"]))
                    if row["rule"] == rule
                ]
            )
            for rule in RULES
        }
        by_prompt: dict[tuple[str, str], np.ndarray] = defaultdict(lambda: np.zeros(4))
        for row in own:
            sums = [row["expected_block"], row["blocks"], row["expected_token"], row["blocks"]]
            by_prompt[row["benchmark"], row["id"]] += np.array(sums)
        same = np.array(list(by_prompt.values()))
        gain = bootstrap(same, lambda table: pooled_ratio(table[..., :2]) / pooled_ratio(table[..., 2:]) - 1)
        rows.append(
            [
                f"T = {temperature:g}",
                str(len(by_prompt)),
                str(int(same[:, 1].sum())),
                *(str(bootstrap(counted[rule], pooled_ratio)) for rule in RULES),
                _signed(bootstrap(np.hstack([counted["block"], counted["token"]]), pooled_ratio_difference)),
                _signed(bootstrap(same, pooled_ratio_difference)),
                f"{gain.value:+.1%} [{gain.low:+.1%}, {gain.high:+.1%}]",
            ]
        )
    columns = [
        "law",
        "prompts",
        "blocks",
        *(f"{rule}: acceptance length [95 %]" for rule in RULES),
        "block - token, own texts [95 %]",
        "block - token, same drafts [95 %]",
        "of kept drafts",
    ]
    note = (
        "Acceptance length: tokens per cycle, bonus included, pooled over cycles; 95 % bootstrap intervals over "
        "prompts, differences paired by prompt. Own texts: each rule draws its own text, so chance decides most of "
        "the difference. Same drafts: what either rule keeps of the very same blocks on average, computed from their "
        "laws; blocks of both runs."
    )
    return Table("Verification of sampled drafts", columns, rows, note)


def _signed(found: Any) -> str:
    return f"{found.value:+.4f} [{found.low:+.4f}, {found.high:+.4f}]"
