"""A run that can be killed at any point: answers in a JSONL file, one whole line each, and what is still missing."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Container, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from ...sources import drop_unfinished_line
from .prompts import Answer, Prompt, Sampling
from .server import ServerError


class Answerer(Protocol):
    """Whoever answers: the target itself or a server."""

    name: str

    def answer(
        self, prompts: list[Prompt], done: Container[int], sampling: Sampling
    ) -> Iterator[list[tuple[Prompt, Answer]]]:
        """Answers to the prompts whose row is not `done`, as they come, in any order."""
        ...


@dataclass(frozen=True)
class Summary:
    """What a run did. num_rows: answers in the file. num_written: answers of this run. seconds: its time."""

    num_rows: int
    num_written: int
    num_new_tokens: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return self.num_new_tokens / self.seconds


def regenerate(
    prompts: list[Prompt],
    output: str | Path,
    answerer: Answerer,
    sampling: Sampling,
    on_answers: Callable[[int, int], None] = lambda num_rows, num_new_tokens: None,
) -> Summary:
    """Lets the target answer prompts; one JSON line per row of the source goes to `output`.

    A file that exists is continued: rows that it holds are kept, a last line that a killed run left unfinished is
    dropped. Greedy answers do not depend on where a run was killed, since a row is always computed in the same batch.

    Args:
        on_answers: called with the number of new rows and tokens whenever some are on disk.

    Raises:
        ValueError: the file was made with other settings or from other prompts.
        ServerError: the server is away for good; all answers that came are in the file.
    """
    started = time.perf_counter()
    num_written = num_new_tokens = 0
    with AnswerFile(Path(output), {"target": answerer.name, **asdict(sampling)}) as file:
        for prompt in prompts:
            file.check(prompt)
        try:
            for answers in answerer.answer(prompts, file.done, sampling):
                for prompt, answer in answers:
                    file.append(prompt, answer)
                tokens = sum(answer.num_new_tokens for _, answer in answers)
                num_written, num_new_tokens = num_written + len(answers), num_new_tokens + tokens
                on_answers(len(answers), tokens)
        except ServerError as error:
            raise ServerError(
                f"{error} {len(file.done)} of {len(prompts)} answers are kept in {output}; the same command goes on "
                "from there."
            ) from error
        return Summary(len(file.done), num_written, num_new_tokens, time.perf_counter() - started)


class AnswerFile:
    """Answers by row. `done` holds, for each row in the file, what identifies its prompt."""

    def __init__(self, path: Path, settings: dict[str, Any]):
        self.path = path
        self.settings = settings
        self.done: dict[int, str] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            drop_unfinished_line(path)
            with open(path, encoding="utf-8") as file:
                for number, line in enumerate(file, start=1):
                    self._read(line, f"{path}, line {number}")
        self.file = open(path, "a", encoding="utf-8")  # noqa: SIM115 (closed by __exit__)

    def _read(self, line: str, where: str) -> None:
        try:
            record = json.loads(line)
            row, settings, users = record["row"], record["generation"], user_texts(record["messages"])
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(
                f"{where}: no answer of an earlier run ({error!r}); repair or remove the line, or name another file."
            ) from error
        for name, value in self.settings.items():
            if settings.get(name) != value:
                raise ValueError(
                    f"{where}: made with `{name}`={settings.get(name)!r}, this run has {value!r}; use the same "
                    "settings to go on, or name another file."
                )
        self.done[row] = identity(users, record.get("chat_template_kwargs") or {})

    def check(self, prompt: Prompt) -> None:
        """Raises ValueError where the file's answer to this row belongs to another prompt."""
        known = self.done.get(prompt.row)
        users = user_texts([message for turn in prompt.turns for message in turn])
        # An answer that was cut ends the conversation before its last turns.
        options = [identity(users[: count + 1], prompt.chat_template_kwargs) for count in range(len(users))]
        if known is not None and known not in options:
            raise ValueError(
                f"{prompt.where}: {self.path} holds the answer to another prompt or with other switches of the "
                f"template as row {prompt.row}; use the same source to go on, or name another file."
            )

    def append(self, prompt: Prompt, answer: Answer) -> None:
        """Adds one whole line; after a failed write the file's last line has no end and is dropped by the next run."""
        record: dict[str, Any] = {"row": prompt.row, **prompt.columns, "messages": answer.messages}
        if prompt.tools is not None:
            record["tools"] = prompt.tools
        if answer.response_ids is not None:
            record["response_ids"] = answer.response_ids
        record |= {
            "finished": answer.finished,
            "chat_template_kwargs": prompt.chat_template_kwargs,
            "generation": self.settings,
        }
        self.file.write(json.dumps(record) + "\n")
        self.file.flush()
        self.done[prompt.row] = identity(user_texts(answer.messages), prompt.chat_template_kwargs)

    def __enter__(self) -> AnswerFile:
        return self

    def __exit__(self, *error: Any) -> None:
        self.file.close()


def user_texts(messages: list[dict[str, Any]]) -> list[Any]:
    """What the user says."""
    return [message["content"] for message in messages if message["role"] == "user"]


def identity(users: list[Any], kwargs: dict[str, Any]) -> str:
    """One text for a prompt and its switches."""
    return json.dumps([users, kwargs], sort_keys=True)
