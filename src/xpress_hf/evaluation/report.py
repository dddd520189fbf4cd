"""A page about one run, or about two, from their rows alone: tables and pictures in one HTML file."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .comparison import Run, compare, comparison_table, differing_settings
from .figures import ArmFigures, figures
from .metric import DEFINITIONS
from .tables import Table, run_tables

STYLE = """
body { font-family: system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem; color: #1a1a1a; }
table { border-collapse: collapse; font-size: 0.9rem; }
th, td { padding: 0.25rem 0.7rem; text-align: right; border-bottom: 1px solid #ddd; }
th:first-child, td:first-child { text-align: left; }
th { border-bottom: 2px solid #888; }
p, figcaption { max-width: 60rem; font-size: 0.85rem; color: #444; }
figure { margin: 1.5rem 0; }
img { max-width: 100%; }
.settings td { text-align: left; overflow-wrap: anywhere; }
"""

Picture = tuple[bytes, str]


def run_report(header: dict[str, Any], records: Sequence[Any]) -> str:
    """The page of one run.

    Args:
        header, records: as `read_records` gives them.

    Raises:
        ValueError: the run holds no answer. RuntimeError: matplotlib is not installed.
    """
    parts = [_settings(header)]
    for temperature, groups in figures(header, records).items():
        parts.append(f"<h2>{_law(temperature)}</h2>")
        parts += [table.to_html() for table in run_tables(groups, header["dtype"])]
        parts += [_figure(*picture) for picture in pictures(header, groups)]
    parts.append(_definitions())
    return _page(f"Drafter {_name(header, 'drafter')} on target {_name(header, 'target')}", parts)


def comparison_report(first: Run, second: Run) -> str:
    """The page of two runs; errors as in `run_report`, and a `ValueError` where they share no answer."""
    differences = compare(first, second)
    image = _plots().comparison_plot(differences)
    parts = [
        _html_table(differing_settings(first[0], second[0]), "settings"),
        comparison_table(differences).to_html(),
        _figure(_plots().to_png(image), "Second run minus first with its 95 % interval; grey where it is noise."),
    ]
    return _page("Two runs", parts)


def pictures(header: dict[str, Any], groups: dict[str, list[ArmFigures]]) -> list[Picture]:
    """PNG files of one run and what they show; what was not measured is left out."""
    plots = _plots()
    overall = next(iter(groups.values()))
    drawn = [
        (
            plots.histogram_plot(overall),
            "Cycles by the number of drafts they kept. The last bar is the ceiling bin: these cycles might have kept "
            "more drafts of a longer block.",
        ),
        (
            plots.position_plot(overall),
            "How often the draft in a slot was kept, among cycles that kept all slots before it. A refiner pays where "
            "its line lies above that of the bare drafter.",
        ),
        (plots.curve_plot(header, overall, "sweeps"), "Sweeps of the refiner: tokens per cycle, its cost, and both."),
        (plots.curve_plot(header, overall, "draft_length"), "Drafts verified per cycle: tokens, cost, and both."),
        (plots.cycle_plot(overall), "Where the time of a cycle goes, and how many tokens it gives."),
        (
            plots.speedup_plot(groups),
            "Speed-up over plain generate on the same prompt: median and quartiles over prompts. Arms whose ids part "
            "from plain generate beyond near ties have none.",
        ),
    ]
    return [(plots.to_png(image), caption) for image, caption in drawn if image is not None]


def write_report(page: str, path: str | Path) -> None:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")


def _plots() -> Any:
    try:
        from . import plots
    except ImportError as error:
        raise RuntimeError("A report holds pictures, which take matplotlib: pip install 'xpress-hf[eval]'.") from error
    return plots


def _law(temperature: float) -> str:
    return f"Sampled, temperature {temperature:g}" if temperature else "Greedy"


def _name(header: dict[str, Any], model: str) -> str:
    return str((header.get(model) or {}).get("name") or "without name")


def _settings(header: dict[str, Any]) -> str:
    """Where the figures come from."""
    cells = [
        [name, value if isinstance(value, str) else json.dumps(value)]
        for name, value in header.items()
        if name != "kind"
    ]
    return _html_table(Table("Where these figures come from", ["", ""], cells), "settings")


def _definitions() -> str:
    return _html_table(Table("Definitions", ["", ""], [list(pair) for pair in DEFINITIONS.items()]), "settings")


def _html_table(table: Table, kind: str) -> str:
    return f'<div class="{kind}">{table.to_html()}</div>'


def _figure(image: bytes, caption: str) -> str:
    data = base64.b64encode(image).decode()
    text = html.escape(caption)
    return f'<figure><img src="data:image/png;base64,{data}" alt="{text}"><figcaption>{text}</figcaption></figure>'


def _page(title: str, parts: Sequence[str]) -> str:
    title = html.escape(title)
    body = "\n".join(parts)
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head><meta charset="utf-8"><title>{title}</title>\n'
        f"<style>{STYLE}</style></head>\n<body>\n<h1>{title}</h1>\n{body}\n</body>\n</html>\n"
    )
