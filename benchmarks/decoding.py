"""Decoding with a drafter: overhead of our loop, memory, batches, and the two verification rules.

    python benchmarks/decoding.py --prompts DATA/gsm8k.jsonl DATA/humaneval.jsonl --output runs/decoding
    python benchmarks/decoding.py --random-target qwen3-0.6b --device cuda --prompts DATA/gsm8k.jsonl

Runs the embedded target and the shipped drafter in bfloat16, or a random pair of a given size (random_pair.py), whose
acceptance is chosen. `--part` picks among

    overhead      where the time of a cycle goes, and tokens/s of plain generate, our loop, the loop of transformers
                  with the same drafter, and transformers' own block drafting with the bare backbone
    memory        what grows with the context, against the arithmetic of the caches
    batch         total tokens/s of batches: plain, `draft_length="auto"` and the full block; interleaved by group
    verification  acceptance length of token rejection and block verification at several temperatures

With `--output` every part keeps its rows in a file of that folder, and a run that was killed goes on. Nothing else may
run on the machine, for `overhead` and `batch`. On a GPU every clock waits for the device.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from decoding_batch import batch
from decoding_memory import memory
from decoding_verification import verification
from random_pair import SIZES, random_pair

from xpress_hf.demo import load_demo_drafter, load_demo_target
from xpress_hf.evaluation.answering import EvaluationSettings
from xpress_hf.evaluation.arms import parse_arms
from xpress_hf.evaluation.benchmark import Benchmark, float32_twin
from xpress_hf.evaluation.figures import figures
from xpress_hf.evaluation.prompts import encode_prompt, load_prompts
from xpress_hf.evaluation.records import run_header
from xpress_hf.evaluation.tables import Table, run_tables

OVERHEAD_ARMS = ("refined", "refined+loop=stock", "bare", "dflash")


class Decoding:
    """The pair under test and its prompts; one method per part, each of which prints its tables."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        dtype = getattr(torch, args.dtype)
        if args.random_target:
            self.names = {"target": f"random {args.random_target}", "drafter": f"scripted, {args.acceptance:g} right"}
            self.target, self.drafter, self.tokenizer = random_pair(
                args.random_target, dtype, args.device, args.acceptance
            )
        else:
            self.names = {"target": "demo", "drafter": "demo"}
            self.target, self.tokenizer = load_demo_target(dtype=dtype, device=args.device, report=print)
            self.drafter = load_demo_drafter(dtype, args.device)
        self.sets = [load_prompts(source, args.limit) for source in args.prompts]
        turns = itertools.zip_longest(*(one.prompts for one in self.sets))
        self.prompts = [prompt for row in turns for prompt in row if prompt is not None]

    def header(self, part: str, **settings: Any) -> dict[str, Any]:
        return run_header(
            self.target,
            self.names["target"],
            self.drafter,
            self.names["drafter"],
            [one.describe() for one in self.sets],
            part=part,
            drafter_sizes=self.drafter.describe(),
            limit=self.args.limit,
            **settings,
        )

    def path(self, part: str) -> Path | None:
        return self.args.output / f"{part}.jsonl" if self.args.output else None

    def overhead(self) -> None:
        settings = EvaluationSettings(self.args.max_new_tokens)
        compiled = ["refined+compile=true"] if self.args.compile else []
        arms = parse_arms([*OVERHEAD_ARMS, *compiled], self.drafter)
        run = Benchmark(self.target, self.tokenizer, arms, settings, float32_twin(self.target))
        header = run.header(self.sets, self.names)
        run.warm_up()
        total = run.num_answers(self.sets)
        done = itertools.accumulate(itertools.repeat(len(arms)))
        on_answer: Callable[[int], None] = lambda count: print(f"{next(done)} of {total} answers", flush=True)  # noqa: E731
        records = run.run(self.sets, header, self.path("overhead"), on_answer)
        found = figures(header, records)
        self.show(header, *run_tables(found[0.0], header["dtype"]))

    def memory(self) -> None:
        contexts = self.args.contexts
        header = self.header("memory", contexts=contexts)
        device = self.target.device
        texts = [encode_prompt(self.tokenizer, prompt.turns[0], device)[0] for prompt in self.prompts]
        self.show(
            header, memory(self.target, self.drafter, torch.cat(texts), contexts, header, self.path("memory"))[1]
        )

    def batch(self) -> None:
        sizes, groups, new = self.args.batch_sizes, self.args.groups, self.args.max_new_tokens
        header = self.header("batch", batch_sizes=sizes, groups=groups, max_new_tokens=new)
        pair = (self.target, self.drafter, self.tokenizer, self.prompts)
        self.show(header, batch(*pair, sizes, groups, new, header, self.path("batch"))[1])

    def verification(self) -> None:
        temperatures, size, new = self.args.temperatures, max(self.args.batch_sizes), self.args.max_new_tokens
        header = self.header("verification", temperatures=temperatures, batch=size, max_new_tokens=new)
        pair = (self.target, self.drafter, self.tokenizer, self.prompts)
        self.show(header, verification(*pair, temperatures, size, new, header, self.path("verification"))[1])

    def show(self, header: dict[str, Any], *tables: Table) -> None:
        print(provenance(header), end="\n\n", flush=True)
        for table in tables:
            print(table.to_markdown(), flush=True)


def provenance(header: dict[str, Any]) -> str:
    """The header of a run for people."""
    hardware = header["hardware"]
    versions = ", ".join(f"{name} {version}" for name, version in header["versions"].items())
    device = f"{hardware['gpu']}, host {hardware['cpu']}" if hardware["gpu"] else hardware["cpu"]
    prompts = ", ".join(f"{one['file']} ({one['sha256'][:12]})" for one in header["data"])
    settings = {
        name: value
        for name, value in header.items()
        if name in ("limit", "max_new_tokens", "contexts", "batch_sizes", "groups", "temperatures", "batch")
    }
    return (
        f"$ {header['command']}\n{header['date']}, commit {header['git_commit']}; {versions}\n"
        f"{device}; {hardware['threads']} threads; {header['dtype']}\n"
        f"target {header['target']['name']}, drafter {header['drafter']['name']}; prompts {prompts}; {settings}"
    )


PARTS = ("overhead", "memory", "batch", "verification")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--prompts", nargs="+", required=True, help="JSONL files with `id`, `benchmark` and `turns`")
    parser.add_argument("--limit", type=int, default=20, help="prompts of each file")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--contexts", type=int, nargs=2, default=[256, 2048], help="tokens, for `memory`")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--groups", type=int, default=8, help="groups of prompts per batch size")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.7, 1.0], help="for `verification`")
    parser.add_argument("--compile", action="store_true", help="also our loop on compiled forwards, for `overhead`")
    parser.add_argument("--random-target", choices=list(SIZES), help="instead of the embedded target")
    parser.add_argument("--acceptance", type=float, default=0.8, help="share of right drafts on a random target")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path, help="folder for rows; a run that was killed goes on")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    run = Decoding(args)
    for part in args.part:
        getattr(run, part)()


if __name__ == "__main__":
    main()
