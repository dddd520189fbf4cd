"""Rows of conversations or prompts from JSONL files and from `datasets`, in one form, each with a name for errors."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

# What other collections call the roles.
ROLES = {
    **{name: name for name in ("system", "user", "assistant", "tool", "developer")},
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "observation": "tool",
    "function": "tool",
    "function_response": "tool",
}
COLUMNS = ("messages", "conversations", "prompt", "turns")

Source = str | Path | Iterable[dict[str, Any]]


def read_rows(source: Source, split: str = "train", limit: int | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows of a source with their names ("answers.jsonl, line 3", "row 7").

    Args:
        source: a JSONL file, a folder written by `Dataset.save_to_disk`, a name for `datasets.load_dataset`, or rows
            themselves: a `Dataset`, an `IterableDataset`, a list of dicts.
        split: split of a named or saved dataset.
        limit: rows to read at most.

    Raises:
        ValueError: a line is no JSON object (names it), or the source cannot be opened.
    """
    if isinstance(source, str | Path):
        rows = _jsonl_rows(Path(source)) if Path(source).is_file() else _numbered(_load_dataset(str(source), split))
    else:
        rows = _numbered(source)
    return itertools.islice(rows, limit)


def _numbered(rows: Iterable[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    return ((f"row {number}", row) for number, row in enumerate(rows))


def _jsonl_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            where = f"{path}, line {number}"
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{where}: no valid JSON ({error}).") from error
            if not isinstance(row, dict):
                raise ValueError(f"{where}: expected an object, got {line[:80]!r}.")
            yield where, row


def _load_dataset(name: str, split: str) -> Iterable[dict[str, Any]]:
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            f"{name!r} is no file; to read a dataset by folder or name install `datasets`: pip install "
            "'xpress-hf[train]'."
        ) from error
    saved = [file for file in ("state.json", "dataset_dict.json") if (Path(name) / file).is_file()]
    try:
        if not saved:
            return datasets.load_dataset(name, split=split)
        loaded = datasets.load_from_disk(name)
        return loaded[split] if isinstance(loaded, dict) else loaded
    except Exception as error:
        # Many kinds: no such dataset, no network, no such split, files it cannot parse.
        raise ValueError(f"{name!r} is no file and `datasets` cannot open it (split {split!r}): {error}") from error


def conversation_of(row: dict[str, Any], where: str) -> dict[str, Any]:
    """A row in one form: `messages` of `role` and `content`; other columns stay.

    Read are `messages`, `conversations` (also with `from` and `value`), `prompt` (a text or messages, with
    `completion` if there is one) and `turns` (user texts), the first that the row has.

    Raises:
        ValueError: none of these columns, or one that cannot be read; names the row.
    """
    column = next((name for name in COLUMNS if row.get(name)), None)
    if column is None:
        raise ValueError(f"{where}: expected one of the columns {', '.join(COLUMNS)}, got {sorted(row)}.")
    turns = row[column]
    if column == "prompt":
        turns = [*_as_turns(turns, "user"), *_as_turns(row.get("completion") or [], "assistant")]
    elif column == "turns":
        turns = [turn if isinstance(turn, dict) else {"role": "user", "content": turn} for turn in turns]
    if not isinstance(turns, list):
        raise ValueError(f"{where}: `{column}` must be a list of turns, got {str(turns)[:80]!r}.")
    rest = {key: value for key, value in row.items() if value is not None and key not in (*COLUMNS, "completion")}
    if isinstance(rest.get("tools"), str):
        try:
            rest["tools"] = json.loads(rest["tools"])
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: `tools` is a text, but no valid JSON ({error}).") from error
    if isinstance(row.get("system"), str) and (not turns or turns[0].get("role", turns[0].get("from")) != "system"):
        turns = [{"role": "system", "content": rest.pop("system")}, *turns]
    return {**rest, "messages": [_message(turn, where) for turn in turns]}


def _as_turns(value: Any, role: str) -> list[Any]:
    return [{"role": role, "content": value}] if isinstance(value, str) else list(value)


def _message(turn: Any, where: str) -> dict[str, Any]:
    if not isinstance(turn, dict):
        raise ValueError(f"{where}: a turn must be an object, got {str(turn)[:80]!r}.")
    # Tables fill columns that a row lacks with None, which templates take for a value.
    message = {key: value for key, value in turn.items() if value is not None and key not in ("from", "value")}
    name = turn.get("role", turn.get("from"))
    if name not in ROLES:
        raise ValueError(f"{where}: `role` must be one of {sorted(ROLES)}, got {name!r}.")
    content = turn.get("content", turn.get("value"))
    if content is None and not turn.get("tool_calls"):
        raise ValueError(f"{where}: a turn of the role {name!r} has neither `content` nor `tool_calls`.")
    return {**message, "role": ROLES[name], "content": "" if content is None else content}


def drop_unfinished_line(path: Path) -> None:
    """Cuts off what follows the last line end of a file: the line that a killed run left unfinished."""
    with open(path, "rb") as file:
        end = file.seek(0, os.SEEK_END)
        stop, chunk = end, 1 << 16
        while stop > 0:
            start = max(0, stop - chunk)
            file.seek(start)
            place = file.read(stop - start).rfind(b"\n")
            if place >= 0:
                stop = start + place + 1
                break
            stop = start
    if stop != end:
        os.truncate(path, stop)
