"""Figures of a run from its records alone, for programs (dicts) and for people (tables)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from .bootstrap import Interval, bootstrap, pooled_ratio
from .expansion_bound import ExpansionBound
from .metric import DEFINITIONS, acceptance_figures
from .records import PromptRecord, pool

MORE_DEFINITIONS = {
    **DEFINITIONS,
    "intervals": "95 %, prompts drawn with replacement (turns and seeds of a prompt stay together), 10,000 draws",
    "expansion": "tokens per cycle that a longer block can add at most while its old slots do not improve: new slots "
    "times ceiling share (DBloom)",
    "refiner.changed": "share of cycles in which the sweeps changed the drafted block",
    "refiner.helped": "share of cycles that kept more drafts than the bare draft of the same cycle would have; greedy "
    "answers only",
    "refiner.hurt": "share of cycles that kept fewer",
    "refiner.bare_draft": "acceptance length of the bare drafts of these cycles; a run without sweeps starts other "
    "cycles and gives another figure",
    "refiner.sweeps_until_stable": "cycles whose block stayed as it was after 0, 1, ... sweeps; the last entry may "
    "hold blocks that more sweeps would have changed",
    "agreement": "greedy answers against plain generate: same ids, parted at a near tie, parted elsewhere",
}


def summarize(records: Sequence[PromptRecord], dtype: str, new_block_size: int | None = None) -> list[dict[str, Any]]:
    """Figures per temperature, over all benchmarks and for each.

    Args:
        dtype: of the target, which decides what is a near tie.
        new_block_size: longer block of the expansion bound. Default: half as long again.
    """
    groups = []
    for temperature in sorted({record.temperature for record in records}):
        chosen = [record for record in records if record.temperature == temperature]
        benchmarks = list(dict.fromkeys(record.benchmark for record in chosen))
        for name in ["all", *benchmarks] if len(benchmarks) > 1 else benchmarks:
            some = [record for record in chosen if name in ("all", record.benchmark)]
            groups.append({"benchmark": name, "temperature": temperature, **_figures(some, dtype, new_block_size)})
    return groups


def _figures(records: Sequence[PromptRecord], dtype: str, new_block_size: int | None) -> dict[str, Any]:
    figures = acceptance_figures([record.acceptance for record in records])
    return {
        "num_prompts": len({(record.benchmark, record.id) for record in records}),
        "num_new_tokens": sum(record.new_tokens for record in records),
        **figures,
        "intervals": {
            name: interval and interval.to_dict()
            for name, interval in (
                ("acceptance_length", _ratio(records, _tokens_and_cycles)),
                ("acceptance_length_prompt_mean", _ratio(records, _lengths_and_answers)),
                ("ceiling_share", _ratio(records, _full_cycles)),
            )
        },
        "expansion": _expansion(records, new_block_size),
        "refiner": _refiner(records),
        "agreement": _agreement(records, dtype),
    }


def _ratio(records: Sequence[PromptRecord], counts: Any) -> Interval | None:
    """Interval of a ratio of sums over prompts; `None` where there is nothing to divide by."""
    sums: dict[tuple[str, str], np.ndarray] = {}
    for record in records:
        key = (record.benchmark, record.id)
        sums[key] = sums.get(key, 0) + np.array(counts(record), dtype=float)
    table = np.array(list(sums.values()))
    return bootstrap(table, pooled_ratio) if table[:, 1].any() else None


def _tokens_and_cycles(record: PromptRecord) -> tuple[float, float]:
    return sum(record.accepted) + len(record.accepted), len(record.accepted)


def _lengths_and_answers(record: PromptRecord) -> tuple[float, float]:
    return (record.acceptance.acceptance_length, 1) if record.accepted else (0, 0)


def _full_cycles(record: PromptRecord) -> tuple[float, float]:
    full = [
        kept for kept, asked in zip(record.accepted, record.verified, strict=True) if asked == record.num_draft_tokens
    ]
    return sum(kept == record.num_draft_tokens for kept in full), len(full)


def _expansion(records: Sequence[PromptRecord], new_block_size: int | None) -> dict[str, Any] | None:
    pooled = pool(records)
    if pooled is None or pooled.ceiling_share is None:
        return None
    size = pooled.num_draft_tokens + 1
    bound = ExpansionBound.of(pooled, new_block_size or size + size // 2)
    interval = _ratio(records, _full_cycles)
    slots = bound.new_block_size - size
    return {
        "new_block_size": bound.new_block_size,
        "bound": bound.bound,
        "interval": [slots * interval.low, slots * interval.high],
        "pays": bound.pays(),
    }


def _refiner(records: Sequence[PromptRecord]) -> dict[str, Any] | None:
    observed = [record for record in records if record.changed]
    if not observed:
        return None
    changed = [one for record in observed for one in record.changed]
    settled = [one for record in observed for one in record.sweeps_until_stable]
    pairs = [
        pair
        for record in observed
        if record.bare_accepted is not None
        for pair in zip(record.accepted, record.bare_accepted, strict=True)
    ]
    return {
        "changed": sum(changed) / len(changed),
        "helped": sum(kept > bare for kept, bare in pairs) / len(pairs) if pairs else None,
        "hurt": sum(kept < bare for kept, bare in pairs) / len(pairs) if pairs else None,
        "bare_draft": 1 + sum(bare for _, bare in pairs) / len(pairs) if pairs else None,
        "sweeps_until_stable": np.bincount(settled).tolist(),
    }


def _agreement(records: Sequence[PromptRecord], dtype: str) -> dict[str, int] | None:
    compared = [record.agreement for record in records if record.agreement is not None]
    if not compared:
        return None
    equal, ties = (sum(test) for test in ([one.equal for one in compared], [one.is_tie(dtype) for one in compared]))
    return {"equal": equal, "near_tie": ties - equal, "other": len(compared) - ties}


def print_summary(groups: Sequence[dict[str, Any]], console: Console) -> None:
    """A table over benchmarks, then the figures of everything together, then what they mean."""
    for group in groups:
        first = [one for one in groups if one["temperature"] == group["temperature"]]
        if group is first[0]:
            console.print(_table(first))
            _print_details(group, console)
    console.print("definitions", style="bold")
    for name, text in MORE_DEFINITIONS.items():
        console.print(f"  {name}: {text}", highlight=False, markup=False)


def _table(groups: Sequence[dict[str, Any]]) -> Table:
    table = Table(title=f"temperature {groups[0]['temperature']:g}")
    for name in (
        "benchmark",
        "prompts",
        "cycles",
        "acceptance length, pooled [95 %]",
        "mean over answers",
        "ceiling bin",
    ):
        table.add_column(name, justify="left" if name == "benchmark" else "right")
    for group in groups:
        interval = group["intervals"]["acceptance_length"]
        table.add_row(
            group["benchmark"],
            str(group["num_prompts"]),
            str(group["num_cycles"]),
            "no cycle" if interval is None else str(Interval(**interval)),
            _number(group["acceptance_length_prompt_mean"]),
            _percent(group["ceiling_share"]),
        )
    return table


def _print_details(group: dict[str, Any], console: Console) -> None:
    lines = [
        f"acceptance length without bonus {_number(group['acceptance_length_without_bonus'])}",
        "slots kept when reached: " + " ".join(_percent(rate) for rate in group["position_acceptance"]),
        f"cycles by kept drafts 0..{group['num_draft_tokens']}: {' '.join(map(str, group['histogram']))}",
    ]
    if (bound := group["expansion"]) is not None:
        low, high = bound["interval"]
        lines.append(
            f"a block of {bound['new_block_size']} adds at most {bound['bound']:.3f} [{low:.3f}, {high:.3f}] tokens "
            f"per cycle: expanding {'may' if bound['pays'] else 'cannot'} pay"
        )
    if (refiner := group["refiner"]) is not None:
        compared = (
            ""
            if refiner["helped"] is None
            else f", helped {_percent(refiner['helped'])}, hurt {_percent(refiner['hurt'])}; bare draft of the same "
            f"cycles {_number(refiner['bare_draft'])}"
        )
        lines.append(f"refiner changed the block in {_percent(refiner['changed'])} of cycles{compared}")
        lines.append(f"cycles by sweeps until stable: {' '.join(map(str, refiner['sweeps_until_stable']))}")
    if (found := group["agreement"]) is not None:
        counts = f"{found['equal']} equal, {found['near_tie']} parted at a near tie, {found['other']} elsewhere"
        lines.append(f"ids against plain generate: {counts}")
    for line in lines:
        console.print(line, highlight=False, markup=False)


def _number(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.3f}"


def _percent(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.1%}"
