"""Pictures of a run. Colours (Okabe and Ito), markers and hatches tell arms apart for colour-blind readers too."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ..decoding.acceptance import AcceptanceRecord
from .arms import ASSISTANT, BARE, CONTROL, DFLASH, LOOKUP, PLAIN
from .comparison import BEYOND, LENGTH, SPEED, SPEEDUP, Difference
from .figures import ArmFigures

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C8C8C")
MARKERS = "osD^vPX*"
CEILING_COLOUR = "#D55E00"
PART_STYLES = {
    "verify": ("#0072B2", ""),
    "draft": ("#E69F00", "//"),
    "refine": ("#009E73", ".."),
    "rest": ("#BBBBBB", "xx"),
}
# More arms than this, plain generate among them, do not fit into one picture.
MOST_ARMS = 9
CURVES = {"sweeps": "sweeps of the refiner", "draft_length": "drafts verified per cycle"}


def to_png(figure: Figure) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=110)
    return file.getvalue()


def _figure(width: float, height: float, columns: int = 1, rows: int = 1, **options: Any) -> tuple[Figure, list[Any]]:
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **options).flatten().tolist()
    for one in axes:
        one.spines[["top", "right"]].set_visible(False)
        one.set_axisbelow(True)
        one.grid(axis="y", color="#DDDDDD")
    return figure, axes


def main_arms(figures: Sequence[ArmFigures]) -> list[ArmFigures]:
    """Arms that are no points of a curve, or all where there are no others."""
    main = [one for one in figures if not one.arm.startswith(tuple(f"{name}=" for name in CURVES))]
    return (main if any(one.record for one in main) else list(figures))[:MOST_ARMS]


def drafting_arms(figures: Sequence[ArmFigures]) -> list[ArmFigures]:
    """Main arms that drafted; the loop that runs a drafter changes no draft."""
    arms = [one for one in main_arms(figures) if one.record is not None and one.record.num_cycles]
    return [one for one in arms if not one.arm.startswith("loop=")] or arms


def arm_styles(figures: Sequence[ArmFigures]) -> dict[str, dict[str, str]]:
    """Colour and marker of every main arm, the same in all pictures of a run."""
    drawn = [one.arm for one in main_arms(figures) if one.arm != PLAIN]
    return {name: {"color": COLOURS[n], "marker": MARKERS[n]} for n, name in enumerate(drawn[: len(COLOURS)])}


def histogram_plot(figures: Sequence[ArmFigures]) -> Figure | None:
    """Share of cycles by kept drafts, one panel per arm, the ceiling bin marked; `None` where nothing was drafted."""
    drafted = drafting_arms(figures)
    if not drafted:
        return None
    columns = min(len(drafted), 3)
    rows = -(-len(drafted) // columns)
    figure, axes = _figure(3.6 * columns, 2.8 * rows, columns, rows, sharey=True)
    for axis, one in zip(axes, drafted, strict=False):
        record = one.record
        shares = [100 * count / record.num_cycles for count in record.histogram]
        bars = axis.bar(range(len(shares)), shares, color=COLOURS[0], edgecolor="white")
        bars[-1].set(facecolor=CEILING_COLOUR, hatch="//")
        title = f"{one.arm}, {record.num_cycles} cycles"
        if record.ceiling_share is not None:
            title += f"\nceiling bin: {record.ceiling_share:.1%} of full-length cycles"
        axis.set_title(title, fontsize=9)
        axis.set_xlabel("drafts kept in a cycle")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axis in axes[len(drafted) :]:
        axis.set_visible(False)
    for axis in axes[::columns]:
        axis.set_ylabel("share of cycles [%]")
    return figure


def position_plot(figures: Sequence[ArmFigures]) -> Figure | None:
    """How often each slot was kept when reached, one line per block drafter."""
    drafters = [one for one in drafting_arms(figures) if one.arm not in (LOOKUP, ASSISTANT)]
    if not drafters:
        return None
    figure, (axis,) = _figure(7, 3.6)
    styles = arm_styles(figures)
    for one in drafters:
        dashes = "--" if one.arm.startswith((BARE, DFLASH)) else "-"
        _rates(axis, one.record, label=one.arm, linestyle=dashes, **styles[one.arm])
        if one.bare_record is not None:
            _rates(
                axis, one.bare_record, label="bare drafts of the same cycles", linestyle=":", color="black", marker="x"
            )
    axis.set(xlabel="slot behind the anchor", ylabel="kept when reached [%]", ylim=(0, 105))
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def _rates(axis: Any, record: AcceptanceRecord, **style: Any) -> None:
    points = [(slot, rate) for slot, rate in enumerate(record.position_acceptance, start=1) if rate is not None]
    axis.plot([slot for slot, _ in points], [100 * rate for _, rate in points], **style)


def curve_arms(
    header: dict[str, Any], figures: Sequence[ArmFigures], setting: str
) -> list[tuple[int, ArmFigures]] | None:
    """Arms of the drafter that differ in one setting alone, with its value, in ascending order; `None` for fewer than
    three of them."""
    groups: dict[tuple, list[tuple[int, ArmFigures]]] = {}
    for one in figures:
        settings = header.get("arms", {}).get(one.arm, {})
        if setting in settings and not one.arm.startswith(CONTROL):
            others = tuple(sorted((key, str(value)) for key, value in settings.items() if key != setting))
            groups.setdefault(others, []).append((settings[setting], one))
    longest = max(groups.values(), key=len, default=[])
    return sorted(longest, key=lambda point: point[0]) if len(longest) > 2 else None


def curve_plot(header: dict[str, Any], figures: Sequence[ArmFigures], setting: str) -> Figure | None:
    """Acceptance length, time of a cycle and speed against one setting of the drafter."""
    arms = curve_arms(header, figures, setting)
    if arms is None:
        return None
    figure, (left, middle, right) = _figure(11, 3.8, 3)
    lengths = [(x, one.acceptance_length) for x, one in arms if one.acceptance_length is not None]
    _points(left, [(x, one.value, one.low, one.high) for x, one in lengths])
    left.set(ylabel="tokens per cycle", title="acceptance length (95 % interval)")
    cycles = [(x, one.cycle_s) for x, one in arms if one.cycle_s is not None]
    narrowest = min((after - before for (before, _), (after, _) in pairwise(cycles)), default=1)
    _stack(middle.bar, [x for x, _ in cycles], [split for _, split in cycles], 0.8 * narrowest)
    middle.set(ylabel="ms", title="time of a cycle")
    figure.legend(*middle.get_legend_handles_labels(), frameon=False, fontsize=9, ncols=4, loc="outside lower center")
    speeds = [(x, one.tokens_per_s) for x, one in arms if one.tokens_per_s is not None]
    _points(right, [(x, one.median, one.low, one.high) for x, one in speeds])
    right.set(ylabel="tokens/s", title="decode speed (median, quartiles)")
    for axis in (left, middle, right):
        axis.set_xlabel(CURVES[setting])
        axis.set_xticks([x for x, _ in arms])
        axis.title.set_fontsize(10)
    return figure


def _points(axis: Any, points: Sequence[tuple[float, float, float, float]], **style: Any) -> None:
    """Values with error bars: place, value, low end, high end."""
    places, values, low, high = zip(*points, strict=True) if points else ((), (), (), ())
    errors = [
        [value - end for value, end in zip(values, low, strict=True)],
        [end - value for value, end in zip(values, high, strict=True)],
    ]
    axis.errorbar(places, values, errors, capsize=4, **{"color": COLOURS[0], "marker": "o", **style})


def _stack(
    draw: Callable[..., Any], places: Sequence[float], splits: Sequence[dict[str, float]], thickness: float
) -> list[float]:
    """Bars of stacked parts in ms. draw: `bar` or `barh` of an axis. Returns where the bars end."""
    ends = [0.0] * len(splits)
    for part, (colour, hatch) in PART_STYLES.items():
        sizes = [1e3 * split[part] for split in splits]
        draw(places, sizes, thickness, ends, color=colour, hatch=hatch, edgecolor="white", label=part)
        ends = [end + size for end, size in zip(ends, sizes, strict=True)]
    return ends


def cycle_plot(figures: Sequence[ArmFigures]) -> Figure | None:
    """Time of a cycle by part, one bar per arm."""
    timed = [one for one in figures if one.cycle_s is not None]
    if not timed:
        return None
    figure, (axis,) = _figure(8.5, 1.2 + 0.42 * len(timed))
    axis.grid(visible=False)
    axis.grid(axis="x", color="#DDDDDD")
    ends = _stack(axis.barh, range(len(timed)), [one.cycle_s for one in timed], 0.65)
    for place, (one, end) in enumerate(zip(timed, ends, strict=True)):
        axis.text(end, place, f"  {end:.1f} ms, {1e3 * one.token_s:.1f} ms per token", va="center", fontsize=8)
    axis.set_yticks(range(len(timed)), [one.arm for one in timed])
    axis.invert_yaxis()
    axis.set(xlabel="time of a cycle [ms]", xlim=(0, 1.35 * max(ends)))
    axis.legend(frameon=False, fontsize=9, ncols=len(PART_STYLES), loc="lower left", bbox_to_anchor=(0, 1))
    return figure


def speedup_plot(groups: dict[str, list[ArmFigures]]) -> Figure | None:
    """Median speed-up over plain generate and its quartiles, per benchmark and arm."""
    styles = arm_styles(next(iter(groups.values())))
    names = [name for name in styles if any(one.arm == name and one.speedup for own in groups.values() for one in own)]
    if not names:
        return None
    figure, (axis,) = _figure(2.5 + max(4.0, 0.28 * len(groups) * (len(names) + 2)), 3.8)
    step = 0.8 / len(names)
    for number, name in enumerate(names):
        offset = (number - (len(names) - 1) / 2) * step
        points = [
            (place + offset, one.speedup.median, one.speedup.low, one.speedup.high)
            for place, own in enumerate(groups.values())
            for one in own
            if one.arm == name and one.speedup is not None
        ]
        _points(axis, points, label=name, linestyle="", **styles[name])
    axis.axhline(1, color="black", linewidth=1, linestyle="--", zorder=0)
    axis.annotate("plain", (1, 1), xycoords=("axes fraction", "data"), xytext=(-2, 2), textcoords="offset points",
                  ha="right", va="bottom", fontsize=8)  # fmt: skip
    axis.set_xticks(range(len(groups)), list(groups), rotation=30 if len(groups) > 5 else 0)
    axis.set(ylabel="speed-up over plain generate", xlim=(-0.6, len(groups) - 0.4), ylim=(0, None))
    axis.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def comparison_plot(differences: Sequence[Difference]) -> Figure:
    """Differences of two runs with their intervals, one panel per figure."""
    names = [name for name in (LENGTH, SPEEDUP, SPEED) if any(one.figure == name for one in differences)]
    most = max(sum(one.figure == name for one in differences) for name in names)
    figure, axes = _figure(4.2 * len(names), 1.4 + 0.4 * most, len(names))
    for axis, name in zip(axes, names, strict=True):
        own = [one for one in differences if one.figure == name]
        for place, one in enumerate(own):
            is_known = one.verdict == BEYOND
            style = {"color": COLOURS[1] if is_known else "#8C8C8C", "marker": "D" if is_known else "o"}
            value, low, high = one.interval.value, one.interval.low, one.interval.high
            axis.errorbar([value], [place], xerr=[[value - low], [high - value]], capsize=4, **style)
        axis.grid(visible=False)
        axis.axvline(0, color="black", linewidth=1)
        labels = [one.arm + (f", T = {one.temperature:g}" if one.temperature else "") for one in own]
        axis.set_yticks(range(len(own)), labels)
        axis.set(xlabel=f"{name}: second - first", ylim=(len(own) - 0.5, -0.5))
    return figure
