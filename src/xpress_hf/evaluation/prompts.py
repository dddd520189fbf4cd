"""Benchmark prompts from JSONL files or the Hub, in the wording that papers on block drafters use, and their ids."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
TESTED = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n"
PROGRAM = (
    "You are an expert Python programmer. You will be given a question (problem specification) and will generate a "
    "correct Python program that matches the specification and passes all tests. You will NOT return anything except "
    "for the program\n\n### Question:\n"
)

# benchmark -> (text before, text after) the question; benchmarks that are not named stand as they are.
WORDING = {
    **dict.fromkeys(("gsm8k", "math500", "aime24", "aime25"), ("", BOXED)),
    "humaneval": (TESTED, "\n```"),
}


@dataclass(frozen=True)
class HubBenchmark:
    """Where a benchmark lies on the Hub. turns: a row -> its user messages, without the wording of `WORDING`."""

    path: str
    turns: Callable[[dict[str, Any]], list[str]]
    split: str = "test"
    options: dict[str, Any] = field(default_factory=dict)


def _column(name: str) -> Callable[[dict[str, Any]], list[str]]:
    return lambda row: [row[name]]


def _program(row: dict[str, Any]) -> list[str]:
    starter = row.get("starter_code")
    form = "Use the following code structure:" if starter else "Write your code in the following format:"
    code = starter or "# YOUR CODE HERE"
    answer = "### Answer: (use the provided format with backticks)"
    return [f"{PROGRAM}{row['question_content']}\n\n### Format: {form}\n```python\n{code}\n```\n\n{answer}"]


HUB = {
    "gsm8k": HubBenchmark("openai/gsm8k", _column("question"), options={"name": "main"}),
    "math500": HubBenchmark("HuggingFaceH4/MATH-500", _column("problem")),
    "aime25": HubBenchmark("MathArena/aime_2025", _column("problem"), "train"),
    "humaneval": HubBenchmark("openai/openai_humaneval", _column("prompt")),
    "mbpp": HubBenchmark("google-research-datasets/mbpp", _column("prompt"), options={"name": "sanitized"}),
    # Plain files: the data set's loading script would be remote code.
    "livecodebench": HubBenchmark(
        "json",
        _program,
        "train",
        {"data_files": "hf://datasets/livecodebench/code_generation_lite/test*.jsonl"},
    ),
    "mt_bench": HubBenchmark("HuggingFaceH4/mt_bench_prompts", lambda row: list(row["prompt"]), "train"),
    "alpaca": HubBenchmark(
        "tatsu-lab/alpaca", lambda row: ["\n\n".join(filter(None, (row["instruction"], row["input"])))], "train"
    ),
}


@dataclass(frozen=True)
class BenchmarkPrompt:
    """One item: `turns` are the user messages in order."""

    id: str
    benchmark: str
    turns: list[str]


@dataclass(frozen=True)
class PromptSet:
    """Prompts of one source. name: file name, or name of the benchmark on the Hub. sha256: of its content."""

    name: str
    sha256: str
    prompts: list[BenchmarkPrompt]

    def describe(self) -> dict[str, str]:
        return {"file": self.name, "sha256": self.sha256}


def load_prompts(source: str | Path, limit: int | None = None) -> PromptSet:
    """The first `limit` prompts of a JSONL file (`read_prompts`) or, by its name, of a benchmark on the Hub.

    Raises:
        ValueError: neither a file nor a known name; a line that is no prompt; the Hub cannot be reached.
    """
    if Path(source).is_file():
        digest = hashlib.sha256(Path(source).read_bytes()).hexdigest()
        return PromptSet(Path(source).name, digest, read_prompts(source, limit))
    name = str(source).lower().replace("-", "_")
    if name not in HUB:
        raise ValueError(
            f"`prompts`: {str(source)!r} is neither a file nor a benchmark; known benchmarks: {', '.join(HUB)}."
        )
    prompts = _from_hub(name)
    digest = hashlib.sha256(json.dumps([prompt.turns for prompt in prompts]).encode()).hexdigest()
    return PromptSet(HUB[name].path if HUB[name].path != "json" else name, digest, prompts[:limit])


def read_prompts(path: str | Path, limit: int | None = None, start: int = 0) -> list[BenchmarkPrompt]:
    """Items `start` to `start + limit` of a JSONL file with `id`, `benchmark` and `turns`, the first
    turn in the field's wording.

    Raises:
        ValueError: a line is no JSON object or lacks a field, an id occurs twice (names the line), or there is none.
    """
    prompts: dict[tuple[str, str], BenchmarkPrompt] = {}
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            where = f"{path}, line {number}"
            if not line.strip():
                continue
            prompt = _read_prompt(line, where)
            if (key := (prompt.benchmark, prompt.id)) in prompts:
                raise ValueError(f"{where}: `id` {prompt.id!r} of {prompt.benchmark!r} occurs twice; give it another.")
            prompts[key] = prompt
    chosen = list(prompts.values())[start : None if limit is None else start + limit]
    if not chosen:
        raise ValueError(f"{path} holds no prompt (of {len(prompts)} lines, from number {start} on).")
    return chosen


def _read_prompt(line: str, where: str) -> BenchmarkPrompt:
    try:
        record = json.loads(line)
        name, turns = record["benchmark"], record["turns"]
        if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
            raise ValueError("`turns` must be a list of texts")
        return BenchmarkPrompt(str(record["id"]), str(name), worded(name, turns))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{where}: expected an object with `id`, `benchmark` and `turns` (a list of texts), got {line[:80]!r} "
            f"({error!r})."
        ) from error


def worded(benchmark: str, turns: list[str]) -> list[str]:
    """User messages with the first in the wording of the benchmark."""
    before, after = WORDING.get(benchmark, ("", ""))
    return [before + turns[0] + after, *turns[1:]]


def _from_hub(name: str) -> list[BenchmarkPrompt]:
    benchmark = HUB[name]
    advice = (
        f"give a file instead of the name: one JSON object a line with `id`, `benchmark` ({name!r}) and `turns`, the "
        "list of user messages"
    )
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            f"`prompts`: {name!r} is read from the Hub with `datasets`: pip install 'xpress-hf[eval]', or {advice}."
        ) from error
    try:
        rows = datasets.load_dataset(benchmark.path, split=benchmark.split, **benchmark.options)
    except Exception as error:
        # Many kinds: no network, no such revision, files that cannot be parsed.
        raise ValueError(
            f"`prompts`: {name!r} cannot be read from the Hub ({type(error).__name__}: {error}); check the network "
            f"and HF_HUB_OFFLINE, or {advice}."
        ) from error
    return [
        BenchmarkPrompt(f"{name}/{number:04d}", name, worded(name, benchmark.turns(row)))
        for number, row in enumerate(rows)
    ]


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase,
    prompt: str | list[dict[str, str]],
    device: torch.device,
    chat_template_kwargs: dict[str, Any] | None = None,
) -> torch.Tensor:
    """A user message or a whole conversation -> ids [1, S] in the tokenizer's chat template, or as it stands where
    there is none, turns apart by an empty line.

    Args:
        chat_template_kwargs: switches of the template, such as `{"enable_thinking": False}`.
    """
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if tokenizer.chat_template is None:
        text = "\n\n".join(message["content"] for message in messages)
        return tokenizer(text, return_tensors="pt")["input_ids"].to(device)
    return tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True, **(chat_template_kwargs or {})
    )["input_ids"].to(device)
