"""Conversations -> ids and loss mask, and batches with their anchors."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from ..sources import Source, conversation_of, read_rows
from .chat import ChatTemplate


def read_conversations(source: Source, split: str = "train", limit: int | None = None) -> list[dict[str, Any]]:
    """Conversations of a source (`sources.read_rows`), in one form: `messages` that end in an answer, optionally
    `response_ids`, `finished`, `tools` and `chat_template_kwargs`. What follows the last answer is left out.

    Raises:
        ValueError: a row cannot be read or has no answer (names it), or there is no row at all.
    """
    return [record for _, record in _named_conversations(source, split, limit)]


def _named_conversations(source: Source, split: str, limit: int | None) -> list[tuple[str, dict[str, Any]]]:
    conversations = []
    for where, row in read_rows(source, split, limit):
        record = conversation_of(row, where)
        answers = [place for place, message in enumerate(record["messages"]) if message["role"] == "assistant"]
        if not answers:
            raise ValueError(
                f"{where}: no turn is the assistant's, so there is nothing to learn; `xpress-hf regenerate` lets the "
                "target answer prompts."
            )
        conversations.append((where, {**record, "messages": record["messages"][: answers[-1] + 1]}))
    if not conversations:
        raise ValueError(f"{_name(source)} holds no conversation.")
    return conversations


def _name(source: Source) -> str:
    return repr(str(source)) if isinstance(source, str | Path) else "The data set"


def encode_conversation(
    record: dict[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
) -> dict[str, torch.Tensor]:
    """Ids of a conversation in the target's chat template and a mask that is 1 on what the assistant writes.

    Where the record has `response_ids`, these very ids are the last answer: encoding the decoded text again need not
    give them. An answer ends in the end-of-turn id, which is supervised too; one that is not `finished` (cut by a
    length limit) does not.

    Args:
        record: `messages` that end in an answer; optionally `response_ids`, `finished`, `tools`,
            `chat_template_kwargs`.
        max_length: ids kept at most.
        chat_template_kwargs: switches of the template for records without their own.

    Returns:
        `input_ids` [S] and `loss_mask` [S].

    Raises:
        ValueError: the template refuses the conversation or cannot mark the answers.
    """
    kwargs = record.get("chat_template_kwargs")
    template = ChatTemplate(tokenizer, record.get("tools"), chat_template_kwargs or {} if kwargs is None else kwargs)
    finished = record.get("finished", True)
    answer = record.get("response_ids")
    if answer is None:
        ids, mask = template.encode(record["messages"])
        length = max((place + 1 for place, one in enumerate(mask) if one), default=len(ids))
        ids, mask = ids[:length], mask[:length]
    else:
        ids, mask = template.encode(record["messages"][:-1], add_generation_prompt=True)
        ids, mask = [*ids, *answer], [*mask, *[1] * len(answer)]
    closed = bool(mask) and mask[-1] == 1 and ids[-1] in template.special_ids
    if finished and not closed and (end := template.end_id()) is not None:
        ids, mask = [*ids, end], [*mask, 1]
    elif closed and not finished and answer is None:
        ids, mask = ids[:-1], mask[:-1]
    return {
        "input_ids": torch.tensor(ids[:max_length], dtype=torch.long),
        "loss_mask": torch.tensor(mask[:max_length], dtype=torch.long),
    }


def check_mask_token(input_ids: torch.Tensor, mask_token_id: int, where: str) -> None:
    """Raises ValueError where a text holds the drafter's mask id: there the drafter could not tell it from a slot to
    be filled. `where` names the text."""
    places = (input_ids == mask_token_id).nonzero().flatten().tolist()
    if places:
        raise ValueError(
            f"{where}: `mask_token_id`={mask_token_id} occurs in the text (place {places[0]}, {len(places)} times); "
            "take an id that no text holds, such as an unused row of the target's embedding."
        )


class ConversationDataset(Dataset):
    """Conversations of a source, encoded on access (`encode_conversation`).

    Args:
        source: JSONL file, `datasets` object, folder or name (`sources.read_rows`).
        tokenizer: the target's.
        max_length: ids kept at most of each text.
        split: split of a named dataset.
        chat_template_kwargs: switches of the template for rows without their own, such as
            `{"enable_thinking": False}`.
        mask_token_id: the drafter's mask id; given, every text is encoded once to see that none holds it.

    Raises:
        ValueError: names the row at fault; also from access, where the template cannot mark the answers of a row.
    """

    def __init__(
        self,
        source: Source,
        tokenizer: PreTrainedTokenizerBase,
        max_length: int | None = None,
        split: str = "train",
        chat_template_kwargs: dict[str, Any] | None = None,
        mask_token_id: int | None = None,
    ):
        named = _named_conversations(source, split, None)
        self.names = [where for where, _ in named]
        self.records = [record for _, record in named]
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.chat_template_kwargs = chat_template_kwargs
        if mask_token_id is not None:
            for index, where in enumerate(self.names):
                check_mask_token(self[index]["input_ids"], mask_token_id, where)

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        try:
            return encode_conversation(self.records[index], self.tokenizer, self.max_length, self.chat_template_kwargs)
        except ValueError as error:
            raise ValueError(f"{self.names[index]}: {error}") from error


PADDING = {"document_ids": -1}


def _without_empty(texts: list[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
    """Texts of length 0 replaced by one unsupervised token, in the dtypes and widths of the other texts: a batch row
    without any token has an empty softmax in the target."""
    whole = next((text for text in texts if len(text["input_ids"])), None)

    def one_token(key: str, value: torch.Tensor) -> torch.Tensor:
        if whole is not None:
            return torch.zeros_like(whole[key][:1])
        # Tensors made of empty lists have the default dtype.
        dtype = value.dtype if key.endswith("hidden_states") else torch.long
        return torch.zeros(1, *value.shape[1:], dtype=dtype)

    return [
        text if len(text["input_ids"]) else {key: one_token(key, value) for key, value in text.items()}
        for text in texts
    ]


class TextCollator:
    """Pads texts on the right: lengths S_i -> tensors [B, S] with `attention_mask`, features [B, S, ...] if given.
    A text of length 0 stands as one unsupervised token; `document_ids` of packed texts are padded with -1."""

    def __call__(self, texts: Iterable[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        texts = _without_empty(list(texts))
        lengths = torch.tensor([len(text["input_ids"]) for text in texts])
        batch: dict[str, torch.Tensor] = {}
        for key in texts[0]:
            rows, fill = [text[key] for text in texts], PADDING.get(key, 0)
            batch[key] = pad_sequence(rows, batch_first=True, padding_value=fill)
        batch["attention_mask"] = (torch.arange(batch["input_ids"].shape[1]) < lengths[:, None]).long()
        return batch
