"""Tables of a run, in a form that a terminal and a web page both show."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table as RichTable

from .agreement import FLOAT32_TIE, HALF_PRECISION_TIE
from .figures import LEAST_PROMPTS, ArmFigures
from .time_split import PARTS

NOTHING = "-"


@dataclass(frozen=True)
class Table:
    """Cells as text; the first column names the row, the others hold figures. note: how to read it."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    note: str = ""

    def to_rich(self) -> RichTable:
        table = RichTable(title=self.title, caption=self.note or None, title_justify="left", caption_justify="left")
        for number, column in enumerate(self.columns):
            table.add_column(column, justify="right" if number else "left", no_wrap=not number)
        for row in self.rows:
            table.add_row(*row)
        return table

    def to_html(self) -> str:
        def cells(tag: str, values: Sequence[str]) -> str:
            return "<tr>" + "".join(f"<{tag}>{html.escape(value)}</{tag}>" for value in values) + "</tr>"

        body = "\n".join(cells("td", row) for row in self.rows)
        note = f"<p>{html.escape(self.note)}</p>" if self.note else ""
        return (
            f"<h3>{html.escape(self.title)}</h3>\n<table>\n<thead>{cells('th', self.columns)}</thead>\n"
            f"<tbody>\n{body}\n</tbody>\n</table>\n{note}"
        )

    def to_markdown(self) -> str:
        lines = [self.columns, ["---", *["---:"] * (len(self.columns) - 1)], *self.rows]
        table = "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
        return f"{self.title}\n\n{table}\n" + (f"\n{self.note}\n" if self.note else "")


def ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}"


def speed_table(figures: Sequence[ArmFigures], dtype: str, explained: bool) -> Table:
    """Acceptance, speed and agreement of the arms on one benchmark. explained: with a note on how to read it."""
    rows = []
    for one in figures:
        speed, ratio, interval, length = one.tokens_per_s, one.speedup, one.speedup_interval, one.acceptance_length
        texts = f"{one.equal} / {one.ties} / {one.faults}" if one.equal + one.ties + one.faults else NOTHING
        rows.append(
            [
                one.arm,
                NOTHING if length is None else f"{length.value:.3f} [{length.low:.3f}, {length.high:.3f}]",
                NOTHING if speed is None else f"{speed.median:.1f} ({speed.low:.1f} to {speed.high:.1f})",
                NOTHING if ratio is None else f"{ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})",
                NOTHING if interval is None else f"[{interval.low:.2f}, {interval.high:.2f}]",
                NOTHING if one.prefill_s is None else f"{1e3 * one.prefill_s.median:.1f}",
                texts,
            ]
        )
    bound = f"{FLOAT32_TIE:.0e}" if dtype == "float32" else f"2^-6 = {HALF_PRECISION_TIE:.4f}"
    refusals = [f"No speed figure for {one.arm}: {one.refused}." for one in figures if one.refused]
    note = (
        "Acceptance length: tokens per cycle, bonus included, pooled over cycles [95 % interval over prompts]. Speed: "
        "new tokens after the prefill over their time; median over prompts (quartiles). Speed-up: over plain generate "
        "on the same prompt; [95 % interval of its median over prompts]. Ids: texts equal to plain generate / parted "
        f"at a near tie (gap of the two logits at most {bound} of the largest) / parted elsewhere."
    )
    columns = ["arm", "acceptance length", "decode tokens/s", "speed-up", "95 %", "prefill ms", "ids"]
    few = f"Fewer than {LEAST_PROMPTS} prompts: the intervals are narrower than the truth allows."
    notes = [*refusals, *[few] * (figures[0].prompts < LEAST_PROMPTS), *[note] * explained]
    title = f"{figures[0].benchmark}: {figures[0].prompts} prompts"
    return Table(title, columns, rows, " ".join(notes))


def cycle_table(figures: Sequence[ArmFigures]) -> Table | None:
    """Where the time of a cycle goes; `None` where it was not measured."""
    timed = [one for one in figures if one.cycle_s is not None]
    rows = [
        [
            one.arm,
            *(ms(one.cycle_s[part]) for part in (*PARTS, "rest")),
            ms(sum(one.cycle_s.values())),
            f"{one.cycle_s['rest'] / sum(one.cycle_s.values()):.1%}",
            f"{one.hooks_share:.2%}",
        ]
        for one in timed
    ]
    note = (
        "Milliseconds per cycle (one forward of the target), pooled over prompts. draft: backbone and borrowed head, "
        "or the forwards of another assistant; refine: all sweeps; verify: the target; rest: everything else in "
        "generate(), with its share of the cycle. hooks: what timing these parts cost, over the time of the cycle."
    )
    return (
        Table("Time of a cycle", ["arm", *PARTS, "rest", "cycle", "rest share", "hooks"], rows, note) if rows else None
    )


def bounds_table(figures: Sequence[ArmFigures]) -> Table | None:
    """How far the speed-up is from what its own forwards allow; `None` where no arm has one."""
    rows = [
        [
            one.arm,
            f"{one.bounds.measured:.2f}",
            f"{one.bounds.forwards:.2f}",
            f"{one.bounds.share:.0%}",
            f"{one.bounds.free_drafts:.2f}",
        ]
        for one in figures
        if one.bounds is not None
    ]
    note = (
        "Speed-ups pooled over prompts, at the measured acceptance and forward times. Best possible: a cycle that "
        "takes no longer than its forwards (draft, refine, verify); reached: the measured speed-up over it. Free "
        "drafts: as if drafting and refining took no time either."
    )
    columns = ["arm", "measured", "best possible", "reached", "free drafts"]
    return Table("Bounds", columns, rows, note) if rows else None


def run_tables(figures: dict[str, list[ArmFigures]], dtype: str) -> list[Table]:
    """Speed per benchmark, then time and bounds over all of them."""
    overall = next(iter(figures.values()))
    speeds = [speed_table(own, dtype, number == len(figures) - 1) for number, own in enumerate(figures.values())]
    return [*speeds, *(table for table in (cycle_table(overall), bounds_table(overall)) if table is not None)]
