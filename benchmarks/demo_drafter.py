"""Acceptance, decode speed and overhead of the demo drafter against plain generate, on held-out prompts.

    python benchmarks/demo_drafter.py --data DATA [--control FOLDER] [--output rows.jsonl]

For every prompt all arms run one after the other, greedy, bfloat16, in an order that rotates; nothing else may run
on the machine. Arms: `plain` generate; `refined`, the shipped drafter; `bare`, the same drafter with zero sweeps;
`control`, a drafter that was trained with the `dflash` recipe alone. Acceptance lengths count the bonus token and are
pooled over cycles.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import transformers
from rich.progress import track

import xpress_hf
from xpress_hf import AcceptanceRecord, XPressDrafter
from xpress_hf.decoding.target import Target
from xpress_hf.demo import load_demo_drafter, load_demo_target
from xpress_hf.evaluation.agreement import HALF_PRECISION_TIE, first_difference
from xpress_hf.evaluation.bootstrap import Interval, bootstrap, pooled_ratio_difference
from xpress_hf.evaluation.prompts import encode_prompt, read_prompts
from xpress_hf.evaluation.records import cpu_name
from xpress_hf.evaluation.timing import timed_generate
from xpress_hf.modeling import drafter as drafter_module

FILES = ("gsm8k.jsonl", "humaneval.jsonl")
ARMS = ("plain", "refined", "bare", "control")
PARTS = ("target", "drafter", "head", "refiner")


class Clock:
    """Time spent in the parts of a cycle, by replacing their functions with timed ones."""

    def __init__(self, target: torch.nn.Module):
        self.spans: list[tuple[str, float, float]] = []
        self.target = target

    def timed(self, part: str, function):
        def run(*args, **kwargs):
            start = time.perf_counter()
            result = function(*args, **kwargs)
            self.spans.append((part, start, time.perf_counter()))
            return result

        return run

    @contextmanager
    def running(self):
        with (
            mock.patch.object(self.target, "forward", self.timed("target", self.target.forward)),
            mock.patch.object(drafter_module, "refine_block", self.timed("refiner", drafter_module.refine_block)),
            # Plain functions in class dictionaries get `self` handed in.
            mock.patch.object(Target, "logits", self.timed("head", Target.logits)),
            mock.patch.object(XPressDrafter, "forward", self.timed("drafter", XPressDrafter.forward)),
        ):
            yield self

    def decode_share(self, decode_s: float) -> dict[str, float]:
        """Seconds per part within the last `decode_s` seconds before now, and the rest."""
        begin = time.perf_counter() - decode_s
        parts = {name: sum(e - s for part, s, e in self.spans if part == name and s >= begin) for name in PARTS}
        return {**parts, "rest": decode_s - sum(parts.values())}


def acceptance_difference(left: list[AcceptanceRecord], right: list[AcceptanceRecord]) -> Interval:
    """left - right: acceptance lengths pooled over cycles, with an interval over prompts."""
    pairs = zip(left, right, strict=True)
    table = [[sum(a.accepted), a.num_cycles, sum(b.accepted), b.num_cycles] for a, b in pairs]
    return bootstrap(np.array(table), pooled_ratio_difference)


def run_arm(target, drafter: XPressDrafter | None, sweeps: int | None, ids: torch.Tensor, new: int) -> tuple:
    """One timed answer: (run, seconds per part of the decode phase)."""
    if drafter is not None:
        drafter.speculation.sweeps = sweeps
    with Clock(target).running() as clock:
        run = timed_generate(target, ids, drafter, max_new_tokens=new, do_sample=False)
        return run, clock.decode_share(run.decode_s)


def provenance(args: argparse.Namespace) -> dict:
    return {
        "command": " ".join(["python", *sys.argv]),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "xpress_hf": xpress_hf.__version__,
        "python": platform.python_version(),
        "hardware": f"{cpu_name()}, {torch.get_num_threads()} threads",
        "dtype": "bfloat16",
        "prompts": f"{args.limit} from number {args.start} on of {' and '.join(FILES)}, field's wording, chat "
        "template with its default system prompt",
        "max_new_tokens": args.new,
    }


def read_rows(path: str | None) -> dict[str, dict]:
    """Rows of an earlier run by prompt id."""
    if path is None or not Path(path).exists():
        return {}
    rows = {}
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        row["ids"] = {name: torch.tensor(ids) for name, ids in row["ids"].items()}
        row["records"] = {name: record and AcceptanceRecord(**record) for name, record in row["records"].items()}
        rows[row["id"]] = row
    return rows


def write_rows(path: str | None, rows: dict[str, dict], run: dict) -> None:
    """Writes all rows anew, whole or not at all."""
    if path is None:
        return
    lines = []
    for row in rows.values():
        records = {name: record and vars(record) for name, record in row["records"].items()}
        ids = {name: value.tolist() for name, value in row["ids"].items()}
        lines.append(json.dumps({"run": run, **row, "records": records, "ids": ids}) + "\n")
    scratch = Path(f"{path}.part")
    scratch.write_text("".join(lines), encoding="utf-8")
    scratch.replace(path)


def report(rows: list[dict], args: argparse.Namespace) -> str:
    """Provenance, then figures over all prompts and benchmark by benchmark."""
    lines = [f"{key}: {value}" for key, value in provenance(args).items()]
    for group in ("all", *(Path(name).stem for name in FILES)):
        chosen = [row for row in rows if group in ("all", row["benchmark"])]
        plain = statistics.median(row["tokens_per_s"]["plain"] for row in chosen)
        lines += [f"\n{group}: {len(chosen)} prompts", f"  plain    decode {plain:.1f} tokens/s (median)"]
        arms = [name for name in ARMS[1:] if name in rows[0]["records"]]
        lines += [arm_report(name, chosen) for name in arms]
        for other in arms[1:]:
            pair = [[row["records"][name] for row in chosen] for name in ("refined", other)]
            found = acceptance_difference(*pair)
            interval = f"[{found.low:+.4f}, {found.high:+.4f}]"
            lines.append(f"  refined - {other}: 95 % bootstrap interval over prompts {interval}")
    return "\n".join(lines)


def arm_report(name: str, rows: list[dict]) -> str:
    """Pooled acceptance, median speed and ratio, and where the time of the decode phase went."""
    records = [row["records"][name] for row in rows]
    pooled = sum(records[1:], start=records[0])
    together = [row for row in rows if row["session"][name] == row["session"]["plain"]]
    ratios = [row["tokens_per_s"][name] / row["tokens_per_s"]["plain"] for row in together]
    # Speeds of runs at different times cannot be compared.
    ratio = f"{statistics.median(ratios):.2f} x plain (medians)" if ratios else "not timed beside plain"
    speed = statistics.median(row["tokens_per_s"][name] for row in rows)
    seconds = {part: sum(row["parts"][name][part] for row in rows) for part in (*PARTS, "rest")}
    share = ", ".join(f"{part} {value / sum(seconds.values()):.1%}" for part, value in seconds.items())
    return (
        f"  {name:8s} acceptance length {pooled.acceptance_length:.3f} over {pooled.num_cycles} cycles; decode "
        f"{speed:.1f} tokens/s, {ratio}; time: {share}"
    )


def agreement(rows: list[dict], judge) -> str:
    """Counts texts that equal plain generate, first differences that are near ties, and others."""
    lines = []
    for name in [name for name in ARMS[1:] if name in rows[0]["ids"]]:
        counts = {"equal": 0, "near tie": 0, "OTHER": 0}
        for row in rows:
            found = first_difference(judge, row["prompt_length"], row["ids"]["plain"], row["ids"][name])
            kind = "equal" if found is None else "near tie" if found.relative_gap <= HALF_PRECISION_TIE else "OTHER"
            counts[kind] += 1
        lines.append(f"  {name:8s} ids against plain: {counts}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help=f"folder with {' and '.join(FILES)}")
    parser.add_argument("--drafter", help="default: the shipped drafter")
    parser.add_argument("--control", help="drafter of the dflash recipe alone")
    parser.add_argument("--start", type=int, default=0, help="first prompt of each file")
    parser.add_argument("--limit", type=int, default=40, help="prompts of each file")
    parser.add_argument("--new", type=int, default=128, help="new tokens per prompt")
    parser.add_argument("--output", help="JSON Lines file, one row per prompt; arms that it holds are not run again")
    args = parser.parse_args()

    target, tokenizer = load_demo_target(report=print)
    load = {"dtype": torch.bfloat16}
    shipped = XPressDrafter.from_pretrained(args.drafter, **load).eval() if args.drafter else load_demo_drafter()
    arms = {"plain": (None, None), "refined": (shipped, None), "bare": (shipped, 0)}
    if args.control:
        arms["control"] = (XPressDrafter.from_pretrained(args.control, **load).eval(), 0)
    for drafter, sweeps in arms.values():
        run_arm(target, drafter, sweeps, torch.arange(3, 40)[None], 16)

    prompts = [prompt for name in FILES for prompt in read_prompts(Path(args.data) / name, args.limit, args.start)]
    rows = read_rows(args.output)
    session = time.strftime("%Y-%m-%d %H:%M:%S")
    for index, prompt in enumerate(track(prompts, description="prompts")):
        ids = encode_prompt(tokenizer, prompt.turns[0], target.device)
        empty = {key: {} for key in ("ids", "records", "tokens_per_s", "parts", "session")}
        row = rows.setdefault(
            prompt.id, {"id": prompt.id, "benchmark": prompt.benchmark, "prompt_length": ids.shape[1], **empty}
        )
        missing = [name for name in arms if name not in row["ids"]]
        for name in missing[index % len(missing) :] + missing[: index % len(missing)] if missing else []:
            run, parts = run_arm(target, *arms[name], ids, args.new)
            row["ids"][name], row["records"][name], row["parts"][name] = run.ids, run.acceptance, parts
            row["tokens_per_s"][name], row["session"][name] = run.tokens_per_s, session
        write_rows(args.output, rows, provenance(args))
    rows = [rows[prompt.id] for prompt in prompts]
    print(report(rows, args))
    judge, _ = load_demo_target(dtype=torch.float32)
    print("\nagreement (near tie: gap <= 2^-6 of the largest logit in float32)\n" + agreement(rows, judge))


if __name__ == "__main__":
    main()
