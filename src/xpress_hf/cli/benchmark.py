"""`benchmark` and `report`: speed of a drafter beside what else its target could run, and pages about runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from ..evaluation.answering import EvaluationSettings
from ..evaluation.arms import MEANINGS, default_arms, parse_arms
from ..evaluation.benchmark import Benchmark, float32_twin
from ..evaluation.comparison import compare, comparison_table, differing_settings
from ..evaluation.figures import ArmFigures, figures
from ..evaluation.prompts import load_prompts
from ..evaluation.records import read_records
from ..evaluation.report import comparison_report, run_report, write_report
from ..evaluation.tables import run_tables
from .common import (
    AsJson,
    Device,
    DtypeName,
    Limit,
    MaxNewTokens,
    Records,
    Revision,
    Seeds,
    Temperatures,
    TemplateSwitches,
    finish,
    json_object,
    load_drafter,
    load_target,
    watch_answers,
)
from .evaluate import PromptSources

ARMS_HELP = "Ways to answer, comma-separated: " + "; ".join(f"{name}: {text}" for name, text in MEANINGS.items())


def benchmark(
    target: Annotated[str, typer.Option(help="Causal LM: folder, Hub id, or `demo`.")],
    drafter: Annotated[str, typer.Option(help="Drafter in any supported layout: folder, Hub id, or `demo`.")],
    prompts: PromptSources,
    limit: Limit = None,
    max_new_tokens: MaxNewTokens = 128,
    arms: Annotated[
        str | None,
        typer.Option(
            help=f"{ARMS_HELP}. Settings follow with +, as in refined+sweeps=3+loop=own. [default: all but the last "
            "three that this pair allows]"
        ),
    ] = None,
    assistant: Annotated[str | None, typer.Option(help="Small causal LM with the target's vocabulary.")] = None,
    control: Annotated[str | None, typer.Option(help="Another drafter of the same target.")] = None,
    temperature: Temperatures = None,
    seed: Seeds = None,
    chat_template_kwargs: TemplateSwitches = None,
    output: Records = None,
    dtype: DtypeName = "auto",
    device: Device = "cpu",
    revision: Revision = None,
    as_json: AsJson = False,
) -> None:
    """Times every arm on every prompt, one after the other in an order that rotates. Nothing else may run meanwhile.

    Exit code 1: an arm was refused a speed figure because its ids differ from plain generate beyond near ties, or the
    run was interrupted.
    """
    console = Console(stderr=as_json)
    switches = json_object("--chat-template-kwargs", chat_template_kwargs)
    settings = EvaluationSettings(max_new_tokens, tuple(temperature or [0.0]), tuple(seed or [0]), switches)
    sets = [load_prompts(source, limit) for source in prompts]
    model, tokenizer = load_target(target, dtype, device, revision, console)
    own = load_drafter(drafter, model, target, console)
    other = load_drafter(control, model, target, console) if control else None
    dtype_name = str(model.dtype).removeprefix("torch.")
    small = load_target(assistant, dtype_name, device, None, console)[0] if assistant else None
    words = arms.split(",") if arms else default_arms(own, small is not None, other is not None)
    console.print(f"drafter: {own.describe()}; {torch.get_num_threads()} threads", highlight=False)
    run = Benchmark(model, tokenizer, parse_arms(words, own, small, other), settings, float32_twin(model))
    names = {"target": target, "drafter": drafter, "assistant": assistant, "control": control}
    header = run.header(sets, names)
    with console.status("warming up"):
        run.warm_up()
    records = watch_answers(
        lambda on_answer: run.run(sets, header, output, on_answer), run.num_answers(sets), output, console
    )
    for text in run.skipped:
        console.print(f"not asked, no room in the context: {text}", highlight=False, markup=False)
    found = figures(header, records)
    show(found, header, console)
    finish({"run": header, "figures": as_dicts(found)}, not any(one.refused for one in _all(found)), as_json)


def report(
    rows: Annotated[Path | None, typer.Argument(help="JSON Lines file of `benchmark` or `evaluate`.")] = None,
    compare_runs: Annotated[
        tuple[Path, Path] | None, typer.Option("--compare", help="Two such files, side by side.")
    ] = None,
    output: Annotated[Path, typer.Option(help="HTML file to write, pictures inside.")] = Path("report.html"),
    as_json: AsJson = False,
) -> None:
    """Writes a page of tables and pictures about a run, or about the differences of two, from their records alone."""
    console = Console(stderr=as_json)
    if (rows is None) == (compare_runs is None):
        raise ValueError("Name one file of records, or two with `--compare`.")
    if rows is not None:
        header, records = read_records(rows)
        write_report(run_report(header, records), output)
        found = figures(header, records)
        show(found, header, console)
        result: dict[str, Any] = {"run": header, "figures": as_dicts(found)}
    else:
        first, second = (read_records(path) for path in compare_runs)
        write_report(comparison_report(first, second), output)
        differences = compare(first, second)
        for table in (differing_settings(first[0], second[0]), comparison_table(differences)):
            console.print(table.to_rich())
        result = {"differences": [one.to_dict() for one in differences]}
    console.print(f"wrote {output}", highlight=False, markup=False)
    finish(result, True, as_json)


Found = dict[float, dict[str, list[ArmFigures]]]


def show(found: Found, header: dict[str, Any], console: Console) -> None:
    for temperature, groups in found.items():
        if len(found) > 1 or temperature:
            console.rule(f"temperature {temperature:g}")
        for table in run_tables(groups, header["dtype"]):
            console.print(table.to_rich())


def as_dicts(found: Found) -> list[dict[str, Any]]:
    return [
        {"temperature": temperature, **one.to_dict()}
        for temperature, groups in found.items()
        for own in groups.values()
        for one in own
    ]


def _all(found: Found) -> list[ArmFigures]:
    return [one for groups in found.values() for own in groups.values() for one in own]
