"""Rows of a measurement in a JSON Lines file: a run that was killed goes on where it stood."""

from __future__ import annotations

import json
from collections.abc import Hashable
from pathlib import Path
from typing import Any

from xpress_hf.evaluation.records import check_same_run
from xpress_hf.sources import drop_unfinished_line


class RowFile:
    """Rows by the values of `names`; the first line of the file says where they come from.

    Args:
        path: JSON Lines file, continued where it exists; `None` keeps the rows in memory alone.
        header: of this run (`run_header`).
        names: fields that no two rows share.

    Raises:
        ValueError: the file belongs to a run with other settings.
    """

    def __init__(self, path: Path | None, header: dict[str, Any], names: tuple[str, ...]):
        self.path, self.names = path, names
        self.header = json.loads(json.dumps(header))
        self.rows: dict[tuple[Hashable, ...], dict[str, Any]] = {}
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        drop_unfinished_line(path)
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        if not lines:
            self._write(self.header)
            return
        stored, *rows = lines
        check_same_run(path, stored, self.header)
        self.rows = {self._key(row): row for row in rows}

    def _key(self, row: dict[str, Any]) -> tuple[Hashable, ...]:
        return tuple(row[name] for name in self.names)

    def __contains__(self, key: tuple[Hashable, ...]) -> bool:
        return key in self.rows

    def add(self, **row: Any) -> None:
        self.rows[self._key(row)] = row
        self._write(row)

    def _write(self, row: dict[str, Any]) -> None:
        if self.path is not None:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
