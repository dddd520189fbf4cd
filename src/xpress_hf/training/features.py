"""Features of texts on disk: the taps and the last hidden state of the target, computed once, read by many epochs.

A folder holds `features.json` (what was read, from which target), `index.jsonl` (one text per line: ids, prompt
length, first row) and `features.bin` (bfloat16 rows, each L taps and then the post-norm hidden state, H wide).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import PreTrainedModel

from ..decoding.target import taps


@dataclass(frozen=True)
class FeatureMeta:
    """What `features.bin` holds: taps, width of a state, rows written, and the target's name."""

    target_layer_ids: list[int]
    hidden_size: int
    target: str


def read_index(folder: Path) -> list[dict]:
    """Lines of a feature folder; a last line that a killed run left unfinished is dropped from the file too."""
    path = folder / "index.jsonl"
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        path.write_text(whole, encoding="utf-8")
    return [json.loads(line) for line in whole.splitlines()]


class FeatureWriter:
    """Appends texts to a feature folder. A folder that exists is continued after its last whole text.

    Raises:
        ValueError: the folder holds features of other taps or another target.
    """

    def __init__(self, folder: str | Path, meta: FeatureMeta):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "features.json"
        if path.exists() and json.loads(path.read_text()) != asdict(meta):
            raise ValueError(f"`folder` {str(folder)!r} holds features of {path.read_text()}, not of {asdict(meta)}.")
        path.write_text(json.dumps(asdict(meta)))
        self.row_bytes = 2 * meta.hidden_size * (len(meta.target_layer_ids) + 1)
        # A killed run leaves rows without a line, never a line without rows.
        lines = read_index(self.folder)
        self.num_texts = len(lines)
        end = sum(line["rows"] for line in lines) * self.row_bytes
        self.rows = open(self.folder / "features.bin", "ab")  # noqa: SIM115 (closed by `close`)
        self.rows.truncate(end)
        self.rows.seek(end)
        self.index = open(self.folder / "index.jsonl", "a", encoding="utf-8")  # noqa: SIM115

    def add(self, input_ids: list[int], prompt_length: int, states: torch.Tensor) -> None:
        """`states` [S - 1, (L + 1) * H]: the last token's own state is never read."""
        first = self.rows.tell() // self.row_bytes
        self.rows.write(states.to(torch.bfloat16).contiguous().view(torch.int16).numpy().tobytes())
        line = {"input_ids": input_ids, "prompt_length": prompt_length, "row": first, "rows": states.shape[0]}
        self.rows.flush()
        self.index.write(json.dumps(line) + "\n")
        self.index.flush()

    def close(self) -> None:
        self.rows.close()
        self.index.close()


class FeatureDataset(Dataset):
    """Texts of a feature folder: dicts with `input_ids`, `loss_mask`, `context_hidden_states` [S, L * H] and
    `teacher_hidden_states` [S, H] (a zero row stands for the last token)."""

    def __init__(self, folder: str | Path):
        folder = Path(folder)
        self.meta = FeatureMeta(**json.loads((folder / "features.json").read_text()))
        self.lines = read_index(folder)
        self.width = self.meta.hidden_size
        columns = self.width * (len(self.meta.target_layer_ids) + 1)
        flat = np.memmap(folder / "features.bin", dtype=np.int16, mode="r")
        self.states = flat[: len(flat) // columns * columns].reshape(-1, columns)

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        line = self.lines[index]
        ids = torch.tensor(line["input_ids"])
        loss_mask = torch.zeros_like(ids)
        loss_mask[line["prompt_length"] :] = 1
        stored = np.array(self.states[line["row"] : line["row"] + line["rows"]])
        states = torch.zeros(len(ids), stored.shape[1], dtype=torch.bfloat16)
        states[: len(stored)] = torch.from_numpy(stored).view(torch.bfloat16)
        return {
            "input_ids": ids,
            "loss_mask": loss_mask,
            "context_hidden_states": states[:, : -self.width],
            "teacher_hidden_states": states[:, -self.width :],
        }


def write_features(
    model: PreTrainedModel,
    texts: Iterable[dict[str, torch.Tensor]],
    folder: str | Path,
    target_layer_ids: list[int],
    batch_size: int = 8,
) -> int:
    """Runs texts (`input_ids`, `loss_mask`, as `ConversationDataset` gives them) through the target and stores their
    states. A folder that exists is continued after its last text. Returns the number of texts in the folder."""
    meta = FeatureMeta(list(target_layer_ids), model.config.get_text_config().hidden_size, model.name_or_path)
    writer = FeatureWriter(folder, meta)
    count = writer.num_texts
    todo = itertools.islice(texts, count, None)
    try:
        while batch := list(itertools.islice(todo, batch_size)):
            ids = torch.nn.utils.rnn.pad_sequence([text["input_ids"] for text in batch], batch_first=True)
            lengths = torch.tensor([len(text["input_ids"]) for text in batch])
            mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
            states = torch.cat(
                target_states(model, ids.to(model.device), mask.to(model.device), target_layer_ids), dim=-1
            )
            for text, rows in zip(batch, states.cpu(), strict=True):
                if not bool(text["loss_mask"].any()):
                    raise ValueError(
                        f"Text number {writer.num_texts} has no supervised token: its answer is empty or cut away by "
                        "`max_length`; leave it out."
                    )
                prompt_length = int(text["loss_mask"].argmax())
                writer.add(text["input_ids"].tolist(), prompt_length, rows[: len(text["input_ids"]) - 1])
            count += len(batch)
    finally:
        writer.close()
    return count


@torch.no_grad()
def target_states(
    model: PreTrainedModel, input_ids: torch.Tensor, attention_mask: torch.Tensor, target_layer_ids: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """One forward of the frozen target: ids [B, S] -> taps [B, S, L * H] and post-norm hidden states [B, S, H]."""
    was_training = model.training
    model.eval()
    try:
        outputs = model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            output_hidden_states=True,
            use_cache=False,
            **({"logits_to_keep": 1} if model._supports_logits_to_keep() else {}),
        )
    finally:
        model.train(was_training)
    num_layers = model.config.get_text_config().num_hidden_layers
    return taps(outputs.hidden_states, target_layer_ids, num_layers), outputs.hidden_states[-1]
