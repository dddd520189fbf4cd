"""Features of texts on disk: the taps and the last hidden state of the target, computed once, read by many epochs.

A folder holds `features.json` (what was read, from which target), `index.jsonl` (one text per line: ids, supervised
runs, first row) and `features.bin` (bfloat16 rows, each L taps and then the post-norm hidden state, H wide).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..decoding.target import taps
from ..fingerprint import config_fields, tokenizer_hash, weights_hash
from ..sources import drop_unfinished_line
from .chat import mask_runs


@dataclass(frozen=True)
class FeatureMeta:
    """What `features.bin` holds, and the target it was read from. `None` = not known, in folders of earlier versions.

    Args:
        target_layer_ids: taps.
        hidden_size: width of a state.
        target: name of the target.
        dtype: dtype that the target ran in.
        config: fields of its config (`fingerprint.config_fields`).
        weights: hash over samples of its weights (`fingerprint.weights_hash`).
        tokenizer: hash of its vocabulary and chat template (`fingerprint.tokenizer_hash`).
    """

    target_layer_ids: list[int]
    hidden_size: int
    target: str
    dtype: str | None = None
    config: dict[str, Any] | None = None
    weights: str | None = None
    tokenizer: str | None = None

    @classmethod
    def of(
        cls, model: PreTrainedModel, target_layer_ids: list[int], tokenizer: PreTrainedTokenizerBase | None = None
    ) -> FeatureMeta:
        """The meta data of features that are read from a target now."""
        return cls(
            target_layer_ids=list(target_layer_ids),
            hidden_size=model.config.get_text_config().hidden_size,
            target=model.name_or_path,
            dtype=str(model.dtype).removeprefix("torch."),
            config=config_fields(model),
            weights=weights_hash(model),
            tokenizer=None if tokenizer is None else tokenizer_hash(tokenizer),
        )

    @classmethod
    def read(cls, folder: Path) -> FeatureMeta:
        path = folder / "features.json"
        if not path.is_file():
            raise ValueError(f"`folder` {str(folder)!r} holds no features.json; `xpress-hf features` writes one.")
        values = json.loads(path.read_text(encoding="utf-8"))
        if unknown := set(values) - {field.name for field in fields(cls)}:
            raise ValueError(f"{path}: unknown fields {sorted(unknown)}; it was written by a newer version.")
        return cls(**values)

    def write(self, folder: Path) -> None:
        # A run that is killed here must not leave half a file.
        scratch = folder / "features.json.part"
        scratch.write_text(json.dumps(asdict(self)), encoding="utf-8")
        os.replace(scratch, folder / "features.json")

    def differences(self, other: FeatureMeta, ignored: tuple[str, ...] = ()) -> list[str]:
        """Fields that both know and that differ, in words. A name says nothing where weights can be compared."""
        if self.weights and other.weights:
            ignored = (*ignored, "target")
        found = []
        for name, stored in asdict(self).items():
            live = getattr(other, name)
            if name in ignored or stored is None or live is None or stored == live:
                continue
            if name == "config":
                changed = {key: (value, live.get(key)) for key, value in stored.items() if value != live.get(key)}
                found += [f"`{key}` {here} != {there}" for key, (here, there) in changed.items()]
            elif name in ("weights", "tokenizer"):
                found.append({"weights": "other weights", "tokenizer": "another vocabulary or chat template"}[name])
            else:
                found.append(f"`{name}` {stored} != {live}")
        return found


def read_index(folder: Path) -> list[dict]:
    """Whole lines of a feature folder; a last line that a killed run left unfinished is left out."""
    path = folder / "index.jsonl"
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


class FeatureWriter:
    """Appends texts to a feature folder. A folder that exists is continued after its last whole text.

    Raises:
        ValueError: the folder holds features of other taps or another target.
    """

    def __init__(self, folder: str | Path, meta: FeatureMeta):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        if (self.folder / "features.json").exists():
            stored = FeatureMeta.read(self.folder)
            if differences := stored.differences(meta):
                raise ValueError(
                    f"`folder` {str(folder)!r} holds features of another kind ({'; '.join(differences)}); name "
                    "another folder."
                )
            if meta.weights and not stored.weights:
                warn_of_missing_fingerprint(self.folder)
        else:
            meta.write(self.folder)
        self.row_bytes = 2 * meta.hidden_size * (len(meta.target_layer_ids) + 1)
        # A killed run leaves rows without a line, never a line without rows.
        if (self.folder / "index.jsonl").exists():
            drop_unfinished_line(self.folder / "index.jsonl")
        lines = read_index(self.folder)
        self.num_texts = len(lines)
        self.num_rows = sum(line["rows"] for line in lines)
        self.rows = open(self.folder / "features.bin", "ab")  # noqa: SIM115 (closed by `close`)
        self.rows.truncate(self.num_rows * self.row_bytes)
        self.index = open(self.folder / "index.jsonl", "a", encoding="utf-8")  # noqa: SIM115

    def add(self, input_ids: list[int], loss_mask: torch.Tensor, states: torch.Tensor) -> None:
        """Adds a text: S ids, `loss_mask` [S], `states` [S - 1, (L + 1) * H] (the last token's own state is never
        read), or no states at all for a text that trains nothing.

        After a failed write the writer is closed; what it left behind the last whole text is never read.
        """
        line = {"input_ids": input_ids, "supervised": mask_runs(loss_mask), "row": self.num_rows, "rows": len(states)}
        try:
            self.rows.write(states.to(torch.bfloat16).contiguous().view(torch.int16).numpy().tobytes())
            self.rows.flush()
            self.index.write(json.dumps(line) + "\n")
            self.index.flush()
        except BaseException:
            self.close()
            raise
        self.num_rows += len(states)
        self.num_texts += 1

    def close(self) -> None:
        # Every text was flushed; what a failed write left in a buffer is not wanted.
        for file in (self.rows, self.index):
            with contextlib.suppress(OSError):
                file.close()


class FeatureDataset(Dataset):
    """Texts of a feature folder: dicts with `input_ids`, `loss_mask`, `context_hidden_states` [S, L * H] and
    `teacher_hidden_states` [S, H] (a zero row stands for the last token).

    Raises:
        ValueError: the folder holds no text, or fewer states than its index says.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.meta = FeatureMeta.read(self.folder)
        self.lines = read_index(self.folder)
        if not self.lines:
            raise ValueError(f"`folder` {str(folder)!r} holds no text.")
        self.width = self.meta.hidden_size
        columns = self.width * (len(self.meta.target_layer_ids) + 1)
        path = self.folder / "features.bin"
        num_rows = path.stat().st_size // (2 * columns)
        needed = max(line["row"] + line["rows"] for line in self.lines)
        if num_rows < needed:
            raise ValueError(
                f"{path} holds {num_rows} rows of states, the index names {needed}: the copy is not complete, or "
                "features.json is not its own."
            )
        shape = (num_rows, columns)
        self.states = np.memmap(path, dtype=np.int16, mode="r", shape=shape) if num_rows else np.zeros(shape, np.int16)

    def check(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        target_layer_ids: list[int] | None = None,
    ) -> None:
        """Compares the target that the features were read from with the one they are to be used with.

        Features of a folder without a fingerprint are accepted with a warning. The dtype may differ: states are kept
        in bfloat16.

        Raises:
            ValueError: another target, vocabulary or chat template, or other taps; names what differs.
        """
        layers = self.meta.target_layer_ids if target_layer_ids is None else list(target_layer_ids)
        differences = self.meta.differences(FeatureMeta.of(target, layers, tokenizer), ignored=("dtype", "target"))
        if differences:
            raise ValueError(
                f"`target`: the features in {str(self.folder)!r} were read from {self.meta.target!r}, which differs "
                f"({'; '.join(differences)}); read the features anew, or load that target."
            )
        if self.meta.weights is None:
            warn_of_missing_fingerprint(self.folder)

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        line = self.lines[index]
        ids = torch.tensor(line["input_ids"], dtype=torch.long)
        loss_mask = torch.zeros_like(ids)
        # Lines of earlier versions have one answer, behind a prompt of this length.
        for start, stop in line.get("supervised") or [(line.get("prompt_length", len(ids)), len(ids))]:
            loss_mask[start:stop] = 1
        stored = np.array(self.states[line["row"] : line["row"] + line["rows"]])
        states = torch.zeros(len(ids), stored.shape[1], dtype=torch.bfloat16)
        states[: len(stored)] = torch.from_numpy(stored).view(torch.bfloat16)
        return {
            "input_ids": ids,
            "loss_mask": loss_mask,
            "context_hidden_states": states[:, : -self.width],
            "teacher_hidden_states": states[:, -self.width :],
        }


def warn_of_missing_fingerprint(folder: Path) -> None:
    """For folders of earlier versions."""
    warnings.warn(
        f"{str(folder)!r} does not say which target its features were read from: nothing checks that it is this one.",
        stacklevel=3,
    )


def write_features(
    model: PreTrainedModel,
    texts: Iterable[dict[str, torch.Tensor]],
    folder: str | Path,
    target_layer_ids: list[int],
    batch_size: int = 8,
    tokenizer: PreTrainedTokenizerBase | None = None,
    on_texts: Callable[[int, int], None] = lambda num_texts, num_tokens: None,
) -> int:
    """Runs texts (`input_ids`, `loss_mask`, as `ConversationDataset` gives them) through the target and stores their
    states. A folder that exists is continued after its last text. Texts without a supervised token are stored without
    states, so that the n-th text stays the n-th. Returns the number of texts in the folder.

    Args:
        tokenizer: recorded, so that another vocabulary or chat template is noticed later.
        on_texts: called with the number of texts and tokens whenever some are on disk.
    """
    writer = FeatureWriter(folder, FeatureMeta.of(model, target_layer_ids, tokenizer))
    todo = itertools.islice(texts, writer.num_texts, None)
    try:
        while batch := list(itertools.islice(todo, batch_size)):
            useful = [text["input_ids"] for text in batch if bool(text["loss_mask"].any())]
            states = iter(_states_of(model, useful, target_layer_ids))
            for text in batch:
                ids = text["input_ids"]
                rows = next(states) if bool(text["loss_mask"].any()) else torch.zeros(0, 1)
                writer.add(ids.tolist(), text["loss_mask"], rows)
            on_texts(len(batch), sum(len(text["input_ids"]) for text in batch))
    finally:
        writer.close()
    return writer.num_texts


def _states_of(model: PreTrainedModel, texts: list[torch.Tensor], target_layer_ids: list[int]) -> list[torch.Tensor]:
    """States of texts of lengths S_i, without those of their last tokens: [S_i - 1, (L + 1) * H] each."""
    if not texts:
        return []
    ids = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
    lengths = torch.tensor([len(text) for text in texts])
    mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    states = torch.cat(target_states(model, ids.to(model.device), mask.to(model.device), target_layer_ids), dim=-1)
    return [rows[: len(text) - 1] for text, rows in zip(texts, states.cpu(), strict=True)]


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
