"""Records of a run on disk: one JSON object a line, first where the figures come from, then one row per answer."""

from __future__ import annotations

import datetime
import json
import math
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from ..decoding.acceptance import AcceptanceRecord
from ..fingerprint import weights_hash
from ..sources import drop_unfinished_line
from ..version import __version__
from .agreement import FLOAT32_TIE, HALF_PRECISION_TIE, Difference

# A run that goes on may differ from its first part in these.
NOT_COMPARED = ("command", "date")


@dataclass(frozen=True)
class Agreement:
    """An answer against that of plain generate.

    equal: same ids. position: first differing id of the answer, 0 its first token; `None` where equal.
    relative_gap: distance of the two logits there over the largest one (`agreement.Difference`); `None` where equal
    or where one text only ends earlier.
    """

    equal: bool
    position: int | None = None
    relative_gap: float | None = None

    @classmethod
    def of(cls, difference: Difference | None, prompt_length: int) -> Agreement:
        """From a comparison of whole texts, prompt included."""
        if difference is None:
            return cls(True)
        gap = difference.relative_gap
        return cls(False, difference.position - prompt_length, gap if math.isfinite(gap) else None)

    def is_tie(self, dtype: str) -> bool:
        """Whether rounding in the target's dtype explains the difference; equal texts count."""
        bound = FLOAT32_TIE if dtype == "float32" else HALF_PRECISION_TIE
        return self.equal or (self.relative_gap is not None and self.relative_gap <= bound)


@dataclass(frozen=True)
class PromptRecord:
    """One answer of one arm. Lists have one entry per cycle; times are in seconds.

    Args:
        arm: what answered: "plain", "refined", ...
        benchmark, id, turn, seed, temperature: which answer; turns and seeds count from 0.
        prompt_tokens, new_tokens: lengths.
        num_draft_tokens: D of the arm; 0 where nothing is drafted.
        accepted, verified: as in `AcceptanceRecord`.
        agreement: `None` where it was not looked at or the text was sampled.
        prefill_s, decode_s: until the first new token, and from there on.
        split_s: parts of the decode time: `draft`, `refine`, `verify`, `rest`.
        prefill_tokens: new tokens that came with the prefill; more than one where it verified a draft too.
        hooks_s: what timing the parts cost, within the decode time.
        bare_accepted: drafts that the same cycle would have kept with zero sweeps.
        changed: whether the refiner changed the block.
        sweeps_until_stable: sweeps after which the block stayed as it was.
    """

    arm: str
    benchmark: str
    id: str
    turn: int
    seed: int
    temperature: float
    prompt_tokens: int
    new_tokens: int
    num_draft_tokens: int
    accepted: list[int]
    verified: list[int]
    agreement: Agreement | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    split_s: dict[str, float] | None = None
    prefill_tokens: int = 1
    hooks_s: float | None = None
    bare_accepted: list[int] | None = None
    changed: list[bool] | None = None
    sweeps_until_stable: list[int] | None = None

    @property
    def key(self) -> tuple:
        """What no two rows of a file share."""
        return (self.arm, self.benchmark, self.id, self.turn, self.seed, self.temperature)

    @property
    def acceptance(self) -> AcceptanceRecord:
        return AcceptanceRecord(self.num_draft_tokens, list(self.accepted), list(self.verified))

    def to_dict(self) -> dict[str, Any]:
        """For JSON; fields that were not measured are left out, `agreement` apart."""
        row = {name: value for name, value in asdict(self).items() if value is not None or name == "agreement"}
        return {"kind": "prompt", **row}

    @classmethod
    def from_dict(cls, row: dict[str, Any]) -> PromptRecord:
        """Raises `TypeError` or `ValueError` where fields are missing, unknown or contradict each other."""
        values = {name: value for name, value in row.items() if name != "kind"}
        if values.get("agreement") is not None:
            values["agreement"] = Agreement(**values["agreement"])
        record = cls(**values)
        cycles = [one for one in (record.verified, record.bare_accepted, record.changed) if one is not None]
        if any(len(one) != len(record.accepted) for one in [*cycles, record.sweeps_until_stable or record.accepted]):
            raise ValueError("its lists over cycles differ in length")
        return record


def pool(records: Iterable[PromptRecord]) -> AcceptanceRecord | None:
    """Cycles of all answers in one record; `None` where nobody drafted."""
    drafted = [record.acceptance for record in records if record.num_draft_tokens]
    return sum(drafted[1:], start=drafted[0]) if drafted else None


def run_header(
    target: PreTrainedModel,
    target_name: str,
    drafter: PreTrainedModel | None = None,
    drafter_name: str | None = None,
    data: Iterable[dict[str, str]] = (),
    **settings: Any,
) -> dict[str, Any]:
    """Where the figures of a run come from.

    Args:
        target_name, drafter_name: as the user named them.
        data: sources of prompts (`PromptSet.describe`).
        settings: what else decides the figures: `seeds`, `temperature`, `max_new_tokens`, `chat_template_kwargs`, ...
    """
    return {
        "kind": "run",
        "command": command_line(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "git_commit": git_commit(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "xpress_hf": __version__,
        },
        "hardware": {
            "cpu": cpu_name(),
            "gpu": torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else None,
            "threads": torch.get_num_threads(),
        },
        "dtype": str(target.dtype).removeprefix("torch."),
        "target": describe_model(target, target_name),
        "drafter": None if drafter is None else describe_model(drafter, drafter_name),
        "data": list(data),
        **settings,
    }


def command_line() -> str:
    """The command of this run, without the folder of the program."""
    name = Path(sys.argv[0]).name
    return shlex.join(["xpress-hf" if name == "__main__.py" else name, *sys.argv[1:]])


def describe_model(model: PreTrainedModel, name: str | None) -> dict[str, Any]:
    """Name, commit on the Hub where it came from there, and a hash over samples of its weights."""
    return {
        "name": name,
        "revision": getattr(model.config, "_commit_hash", None),
        "weights_hash": weights_hash(model),
    }


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def git_commit() -> str | None:
    """Commit of the checkout that this package runs from, with `+` where files were changed; `None` elsewhere."""
    folder = Path(__file__).parents[3]
    if not (folder / ".git").exists():
        return None
    try:
        commit, status = (
            subprocess.run(["git", "-C", folder, *words], capture_output=True, text=True, check=True).stdout.strip()
            for words in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit + ("+" if status else "")


def read_records(path: str | Path) -> tuple[dict[str, Any], list[PromptRecord]]:
    """Header and rows of a file. A last line without an end, which an interrupted run leaves, is passed over.

    Raises:
        ValueError: a line is no record; names it. The same answer twice.
    """
    header: dict[str, Any] | None = None
    records: dict[tuple, PromptRecord] = {}
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith("\n"):
                break
            where = f"{path}, line {number}"
            expected = "run" if header is None else "prompt"
            try:
                row = json.loads(line)
                if row["kind"] != expected:
                    raise ValueError(f"its `kind` is {row['kind']!r}")
                record = None if header is None else PromptRecord.from_dict(row)
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(
                    f"{where}: expected an object of the kind {expected!r}, got {line[:80]!r} ({error}); remove the "
                    "line, or name another file."
                ) from error
            if record is None:
                header = row
            elif record.key in records:
                raise ValueError(f"{where}: the answer {record.key} stands in the file twice; remove one of them.")
            else:
                records[record.key] = record
    if header is None:
        raise ValueError(f"{path} holds no run: its first line must be an object of the kind 'run'.")
    return header, list(records.values())


class RecordFile:
    """Writes rows as they come; a file that exists is continued.

    Args:
        path: JSON Lines file; `None` keeps the rows in memory alone.
        header: of this run (`run_header`).

    Attributes:
        header: of the file: where a run goes on, that of its first part.
        records: all rows by key, those of earlier runs included.

    Raises:
        ValueError: the file belongs to a run with other settings (all named), or a line is broken.
    """

    def __init__(self, path: str | Path | None, header: dict[str, Any]):
        self.header = json.loads(json.dumps(header))
        self.records: dict[tuple, PromptRecord] = {}
        self._file = None
        if path is None:
            return
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            drop_unfinished_line(path)
        if path.exists() and path.stat().st_size:
            stored, records = read_records(path)
            check_same_run(path, stored, self.header)
            self.header = stored
            self.records = {record.key: record for record in records}
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 (closed by __exit__)
        if not path.stat().st_size:
            self._write(self.header)

    def __contains__(self, key: tuple) -> bool:
        return key in self.records

    def append(self, record: PromptRecord) -> None:
        """Adds one row; it is on its way to the disk when this returns."""
        if record.key in self.records:
            raise ValueError(f"The answer {record.key} is in the file already.")
        self.records[record.key] = record
        self._write(record.to_dict())

    def _write(self, row: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()

    def __enter__(self) -> RecordFile:
        return self

    def __exit__(self, *error: Any) -> None:
        if self._file is not None:
            self._file.close()


def check_same_run(path: Path, stored: dict[str, Any], header: dict[str, Any]) -> None:
    """Raises ValueError where two headers differ in what decides the figures."""
    names = sorted({*stored, *header} - set(NOT_COMPARED))
    differ = [
        f"`{name}` {stored.get(name)!r} there, {header.get(name)!r} now"
        for name in names
        if stored.get(name) != header.get(name)
    ]
    if differ:
        raise ValueError(
            f"{path} holds a run with other settings: {'; '.join(differ)}. Go on with the same ones, or name another "
            "file."
        )
