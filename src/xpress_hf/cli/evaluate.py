"""`evaluate`: acceptance of a drafter on prompts, and why it is what it is."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from ..evaluation.evaluator import EvaluationSettings, Evaluator
from ..evaluation.explain import Explainer, Finding, print_findings
from ..evaluation.prompts import HUB, PromptSet, load_prompts
from ..evaluation.summary import MORE_DEFINITIONS, print_summary, summarize
from .common import (
    AsJson,
    Device,
    DtypeName,
    Limit,
    MaxNewTokens,
    Records,
    Revision,
    Seeds,
    Sweeps,
    Temperatures,
    TemplateSwitches,
    finish,
    json_object,
    load_drafter,
    load_target,
    watch_answers,
)

# Prompts that causes are looked for on.
EXPLAIN_PROMPTS = 8

PromptSources = Annotated[
    list[str],
    typer.Option(
        help="JSONL file (`id`, `benchmark`, `turns`) or a benchmark on the Hub: "
        f"{', '.join(HUB)}. May be given several times."
    ),
]


def evaluate(
    target: Annotated[str, typer.Option(help="Causal LM: folder, Hub id, or `demo`.")],
    drafter: Annotated[str, typer.Option(help="Drafter in any supported layout: folder, Hub id, or `demo`.")],
    prompts: PromptSources,
    limit: Limit = None,
    max_new_tokens: MaxNewTokens = 256,
    temperature: Temperatures = None,
    seed: Seeds = None,
    sweeps: Sweeps = None,
    chat_template_kwargs: TemplateSwitches = None,
    agreement: Annotated[bool, typer.Option(help="Compare greedy answers with plain generate.")] = True,
    float32_judge: Annotated[
        bool, typer.Option(help="Load the target in float32 too: it tells near ties of half precision from faults.")
    ] = False,
    new_block_size: Annotated[
        int | None, typer.Option(min=2, help="Longer block of the expansion bound. [default: half as long again]")
    ] = None,
    explain: Annotated[
        bool,
        typer.Option("--explain", help=f"Look for causes of low acceptance on {EXPLAIN_PROMPTS} prompts."),
    ] = False,
    output: Records = None,
    dtype: DtypeName = "auto",
    device: Device = "cpu",
    revision: Revision = None,
    as_json: AsJson = False,
) -> None:
    """Measures how many drafts a target keeps, cycle by cycle, and compares the ids with plain generate.

    Exit code 1: ids differ from plain generate beyond a near tie (float32 targets and --float32-judge alone can tell),
    or the run was interrupted. Speed is measured by `benchmark`.
    """
    console = Console(stderr=as_json)
    settings = EvaluationSettings(
        max_new_tokens,
        tuple(temperature or [0.0]),
        tuple(seed or [0]),
        json_object("--chat-template-kwargs", chat_template_kwargs),
        agreement,
    )
    sets = [load_prompts(source, limit) for source in prompts]
    model, tokenizer = load_target(target, dtype, device, revision, console)
    loaded = load_drafter(drafter, model, target, console)
    loaded.speculation.sweeps = sweeps
    console.print(f"drafter: {loaded.describe()}", highlight=False)
    judge = load_target(target, "float32", device, revision, console)[0] if float32_judge else None
    evaluator = Evaluator(model, tokenizer, loaded, settings, judge, names=(target, drafter))
    records = watch_answers(
        lambda on_answer: evaluator.run(sets, output, on_answer), evaluator.num_answers(sets), output, console
    )
    for text in evaluator.skipped:
        console.print(f"not asked, no room in the context: {text}", highlight=False, markup=False)
    groups = summarize(records, str(model.dtype).removeprefix("torch."), new_block_size)
    print_summary(groups, console)
    findings = look_for_causes(evaluator, sets, console) if explain else []
    # Without a float32 judge a difference in half precision proves nothing.
    is_exact = judge is not None or model.dtype == torch.float32
    others = sum((group["agreement"] or {"other": 0})["other"] for group in groups)
    figures: dict[str, Any] = {"run": evaluator.header(sets), "groups": groups, "skipped": evaluator.skipped}
    figures |= {"findings": [asdict(finding) for finding in findings]} if explain else {}
    finish({**figures, "definitions": MORE_DEFINITIONS}, not (is_exact and others), as_json)


def look_for_causes(evaluator: Evaluator, sets: list[PromptSet], console: Console) -> list[Finding]:
    """Findings on a few prompts of the run, printed."""
    prompts = [prompt for one in sets for prompt in one.prompts]
    settings = evaluator.settings
    explainer = Explainer(
        evaluator.target,
        evaluator.tokenizer,
        evaluator.drafter,
        # From all over the sources.
        prompts[:: max(1, len(prompts) // EXPLAIN_PROMPTS)][:EXPLAIN_PROMPTS],
        settings.max_new_tokens,
        settings.chat_template_kwargs,
    )
    with console.status("looking for causes") as status:
        findings = explainer.run(lambda name: status.update(f"looking for causes: {name}"))
    print_findings(findings, console)
    return findings
