"""What several commands share: options, loading of targets and drafters, and the end of a command."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..demo import load_demo_drafter, load_demo_target
from ..evaluation.records import PromptRecord
from ..modeling.drafter import XPressDrafter

DEMO = "demo"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "auto": "auto"}

Prompts = Annotated[list[str] | None, typer.Option("--prompt", help="Prompt to answer; may be given several times.")]
Sweeps = Annotated[int | None, typer.Option(min=0, help="Sweeps of the refiner per block. [default: the drafter's]")]
Temperature = Annotated[float, typer.Option(min=0.0, help="0 = greedy; above 0 the text is sampled.")]
Device = Annotated[str, typer.Option(help="Device of target and drafter: cpu, cuda, cuda:1, mps, ...")]
MaxNewTokens = Annotated[int, typer.Option(min=2, help="Longest answer in tokens.")]
AsJson = Annotated[bool, typer.Option("--json", help="Figures as JSON on stdout, everything else on stderr.")]
Folder = Annotated[str | None, typer.Option(help="Folder that holds the demo target's GGUF file.")]

Limit = Annotated[int | None, typer.Option(min=1, help="Prompts of each source at most.")]
Temperatures = Annotated[
    list[float] | None, typer.Option(min=0.0, help="0 = greedy; may be given several times. [default: 0]")
]
Seeds = Annotated[
    list[int] | None, typer.Option(min=0, help="Seed of sampled answers; may be given several times. [default: 0]")
]
Records = Annotated[Path | None, typer.Option(help="JSON Lines file of records; one that exists is continued.")]
DtypeName = Annotated[str, typer.Option(help=f"dtype of the target: {', '.join(DTYPES)}.")]
Revision = Annotated[str | None, typer.Option(help="Revision of the target.")]
TemplateSwitches = Annotated[
    str | None,
    typer.Option("--chat-template-kwargs", help='Switches of the chat template, such as {"enable_thinking": false}.'),
]


def watch_answers(
    answer: Callable[[Callable[[int], None]], list[PromptRecord]], total: int, output: Path | None, console: Console
) -> list[PromptRecord]:
    """Runs `answer` under a progress bar; where the user interrupts it, says what is kept and ends with exit code 1.

    Args:
        answer: is handed a function to call with the number of answers that were added.
        total: answers of a whole run.
        output: file of the records.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task("answers", total=total)
        try:
            return answer(lambda count: progress.advance(task, count))
        except KeyboardInterrupt:
            kept = "nothing was kept; name an --output to go on from" if output is None else f"answers are in {output}"
            console.print(f"interrupted: {kept}", highlight=False, markup=False)
            raise typer.Exit(1) from None


def load_target(
    name: str, dtype: str, device: str, revision: str | None, console: Console
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A target by folder, Hub id, or the name `demo`, with its tokenizer.

    Raises:
        ValueError: unknown dtype, or a checkpoint that lacks weights of its model, which would then be random.
    """
    if dtype not in DTYPES:
        raise ValueError(f"`--dtype` must be one of {sorted(DTYPES)}, got {dtype!r}.")
    if name == DEMO:
        return load_demo_target(None, torch.bfloat16 if dtype == "auto" else DTYPES[dtype], device, console.print)
    model, info = AutoModelForCausalLM.from_pretrained(
        name, revision=revision, dtype=DTYPES[dtype], output_loading_info=True
    )
    if missing := sorted(info["missing_keys"]):
        raise ValueError(
            f"Target {name!r} lacks the weights {missing}: they would be random, and a drafter would learn noise; "
            "complete the checkpoint."
        )
    return model.to(device).eval(), AutoTokenizer.from_pretrained(name, revision=revision)


def load_drafter(name: str, target: PreTrainedModel, target_name: str, console: Console) -> XPressDrafter:
    """A drafter by folder, Hub id, or the name `demo`, in the target's dtype and on its device."""
    if name == DEMO:
        if target_name != DEMO:
            console.print(
                "note: the shipped drafter learned from the target's Q4_1 weights; others accept a little less"
            )
        return load_demo_drafter(target.dtype, target.device)
    return XPressDrafter.from_pretrained(name, dtype=target.dtype).to(target.device).eval()


def finish(figures: dict[str, Any], kept: bool, as_json: bool) -> None:
    """Prints figures where asked for; exit code 1 where text with the drafter was not that of plain generate."""
    if as_json:
        typer.echo(json.dumps(figures))
    if not kept:
        raise typer.Exit(1)


def json_object(option: str, text: str | None) -> dict[str, Any]:
    """Value of an option that holds a JSON object; empty where it was not given."""
    try:
        value = json.loads(text or "{}")
    except json.JSONDecodeError as error:
        raise ValueError(f"`{option}` must be a JSON object, got {text!r} ({error}).") from error
    if not isinstance(value, dict):
        raise ValueError(f"`{option}` must be a JSON object, got {text!r}.")
    return value
