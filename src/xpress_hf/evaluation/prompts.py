"""Benchmark prompts from JSONL files, in the wording that papers on block drafters use."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
TESTED = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n"

# benchmark -> (text before, text after) the question; benchmarks that are not named stand as they are.
WORDING = {
    **dict.fromkeys(("gsm8k", "math500", "aime24", "aime25"), ("", BOXED)),
    "humaneval": (TESTED, "\n```"),
}


@dataclass(frozen=True)
class BenchmarkPrompt:
    """One item: `turns` are the user messages in order."""

    id: str
    benchmark: str
    turns: list[str]


def read_prompts(path: str | Path, limit: int | None = None, start: int = 0) -> list[BenchmarkPrompt]:
    """Items `start` to `start + limit` of a JSONL file with `id`, `benchmark` and `turns`, the first
    turn in the field's wording.

    Raises:
        ValueError: a line is no JSON object or lacks a field; names the line.
    """
    prompts = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                record = json.loads(line)
                name, turns = record["benchmark"], list(record["turns"])
                before, after = WORDING.get(name, ("", ""))
                prompts.append(BenchmarkPrompt(record["id"], name, [before + turns[0] + after, *turns[1:]]))
            except (json.JSONDecodeError, KeyError, TypeError, IndexError) as error:
                raise ValueError(
                    f"{path}, line {number}: expected an object with `id`, `benchmark` and `turns`, got {line[:80]!r}."
                ) from error
    return prompts[start : None if limit is None else start + limit]
