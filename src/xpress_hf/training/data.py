"""Conversations -> ids and loss mask, and batches with their anchors."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase


def read_conversations(path: str | Path) -> list[dict[str, Any]]:
    """One conversation per line: `messages` (last one by the assistant), optionally `response_ids` and `finished`.

    Raises:
        ValueError: a line is no JSON object or lacks `messages`; names the line.
    """
    conversations = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number}: no valid JSON ({error}).") from error
            if not isinstance(record, dict) or not record.get("messages"):
                raise ValueError(f"{path}, line {number}: expected an object with `messages`, got {line[:80]!r}.")
            if record["messages"][-1].get("role") != "assistant":
                raise ValueError(f"{path}, line {number}: the last of `messages` must be the assistant's.")
            conversations.append(record)
    return conversations


def encode_conversation(
    record: dict[str, Any], tokenizer: PreTrainedTokenizerBase, max_length: int | None = None
) -> dict[str, torch.Tensor]:
    """Ids of a conversation in the target's chat template and a mask that is 1 on the last answer.

    Where the record has `response_ids`, these very ids are used: encoding the decoded text again need not give them.
    A finished answer ends in the end-of-turn id, which is supervised too.
    """
    messages = record["messages"]
    prompt = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, tokenize=True, return_dict=True)[
        "input_ids"
    ]
    answer = record.get("response_ids")
    if answer is None:
        answer = tokenizer(messages[-1]["content"], add_special_tokens=False)["input_ids"]
    if record.get("finished", True) and tokenizer.eos_token_id is not None:
        answer = [*answer, tokenizer.eos_token_id]
    ids = torch.tensor([*prompt, *answer])
    loss_mask = torch.zeros_like(ids)
    loss_mask[len(prompt) :] = 1
    return {"input_ids": ids[:max_length], "loss_mask": loss_mask[:max_length]}


class ConversationDataset(Dataset):
    """Conversations of a JSONL file, encoded on access."""

    def __init__(self, path: str | Path, tokenizer: PreTrainedTokenizerBase, max_length: int | None = None):
        self.records = read_conversations(path)
        self.tokenizer = tokenizer
        self.max_length = max_length

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return encode_conversation(self.records[index], self.tokenizer, self.max_length)


class TextCollator:
    """Pads texts on the right: lengths S_i -> tensors [B, S] with `attention_mask`, features [B, S, ...] if given."""

    def __call__(self, texts: Iterable[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        texts = list(texts)
        if not any(len(text["input_ids"]) for text in texts):
            # The target cannot read a batch without a single place; one of padding trains nothing.
            texts = [{key: value.new_zeros(1, *value.shape[1:]) for key, value in text.items()} for text in texts]
        lengths = torch.tensor([len(text["input_ids"]) for text in texts])
        batch: dict[str, torch.Tensor] = {}
        for key in texts[0]:
            fill = -1 if key == "document_ids" else 0
            batch[key] = pad_sequence([text[key] for text in texts], batch_first=True, padding_value=fill)
        batch["attention_mask"] = (torch.arange(batch["input_ids"].shape[1]) < lengths[:, None]).long()
        return batch
