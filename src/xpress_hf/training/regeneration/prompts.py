"""What is asked and what comes back: prompts of one or several turns, sampling, answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ...sources import Source, conversation_of, read_rows
from ..chat import Message

# Columns of a row that an answer replaces.
REPLACED = ("messages", "response_ids", "finished", "chat_template_kwargs", "generation", "row")


@dataclass(frozen=True)
class Sampling:
    """How answers are drawn.

    Args:
        temperature: 0 = greedy.
        top_p: smallest set of tokens with this share of the law; 1 = all.
        top_k: this many best tokens; 0 = all.
        seed: the same seed and batches give the same answers.
        max_new_tokens: longest answer; one that is cut there is marked as not `finished`.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    max_new_tokens: int = 1024

    def __post_init__(self):
        if self.temperature < 0:
            raise ValueError(f"`temperature` must be >= 0, got {self.temperature}.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"`top_p` must lie above 0 and at most at 1, got {self.top_p}.")
        if self.top_k < 0:
            raise ValueError(f"`top_k` must be >= 0 (0 = all), got {self.top_k}.")
        if self.max_new_tokens < 1:
            raise ValueError(f"`max_new_tokens` must be >= 1, got {self.max_new_tokens}.")


@dataclass(frozen=True)
class Prompt:
    """One row of the source.

    Args:
        row: its number, from 0.
        where: its name in errors.
        turns: what is said before each answer: a user message, before the first one possibly a system message.
        tools: tools that the template shows.
        chat_template_kwargs: switches of the template.
        columns: other columns, handed through.
    """

    row: int
    where: str
    turns: list[list[Message]]
    tools: list[Any] | None = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    columns: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """A conversation that the target has answered.

    Args:
        messages: all turns, up to the last answer.
        finished: whether the last answer ended by itself.
        num_new_tokens: tokens of all answers.
        response_ids: ids of the last answer as the target wrote them, the end-of-turn id included; `None` where a
            server does not tell.
    """

    messages: list[Message]
    finished: bool
    num_new_tokens: int
    response_ids: list[int] | None = None


def read_prompts(
    source: Source,
    split: str = "train",
    limit: int | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
) -> list[Prompt]:
    """Prompts of a source. Answers in it are dropped, each user message gets a new one; turns from the first result
    of a tool on are left out, since it belongs to a call that the target has not made.

    Raises:
        ValueError: a row cannot be read or has no user message (names it), or there is no row.
    """
    prompts = []
    for row, (where, columns) in enumerate(read_rows(source, split, limit)):
        record = conversation_of(columns, where)
        turns: list[list[Message]] = []
        pending: list[Message] = []
        for message in record["messages"]:
            if message["role"] == "tool":
                break
            if message["role"] != "assistant":
                pending.append(message)
            if message["role"] == "user":
                turns.append(pending)
                pending = []
        if not turns:
            raise ValueError(f"{where}: no turn is the user's, so there is nothing to answer.")
        kwargs = {**(chat_template_kwargs or {}), **(record.get("chat_template_kwargs") or {})}
        rest = {key: value for key, value in record.items() if key not in (*REPLACED, "tools")}
        prompts.append(Prompt(row, where, turns, record.get("tools"), kwargs, rest))
    if not prompts:
        raise ValueError("The source of prompts holds no row.")
    return prompts
