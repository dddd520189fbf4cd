"""`xpress-hf`: the command line. Exit codes: 0 done, 1 done but a promise was broken, 2 bad input."""

from __future__ import annotations

import json
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from .demo import DEMO_PROMPTS, load_demo_drafter, load_demo_target
from .evaluation.side_by_side import SideBySide, check_exactness
from .modeling.drafter import XPressDrafter

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

DEMO = "demo"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "auto": "auto"}

Prompts = Annotated[list[str] | None, typer.Option("--prompt", help="Prompt to answer; may be given several times.")]
Sweeps = Annotated[int | None, typer.Option(min=0, help="Sweeps of the refiner per block. [default: the drafter's]")]
Temperature = Annotated[float, typer.Option(min=0.0, help="0 = greedy; above 0 the text is sampled.")]
Device = Annotated[str, typer.Option(help="Device of target and drafter: cpu, cuda, cuda:1, mps, ...")]
MaxNewTokens = Annotated[int, typer.Option(min=2, help="Longest answer in tokens.")]
AsJson = Annotated[bool, typer.Option("--json", help="Figures as JSON on stdout, everything else on stderr.")]
Folder = Annotated[str | None, typer.Option(help="Folder that holds the demo target's GGUF file.")]


@app.callback()
def main() -> None:
    """Lossless, faster generate() for causal LMs of Hugging Face transformers."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def load_target(
    name: str, dtype: str, device: str, revision: str | None, console: Console
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A target by folder, Hub id, or the name `demo`, with its tokenizer."""
    if dtype not in DTYPES:
        raise ValueError(f"`--dtype` must be one of {sorted(DTYPES)}, got {dtype!r}.")
    if name == DEMO:
        return load_demo_target(None, torch.bfloat16 if dtype == "auto" else DTYPES[dtype], device, console.print)
    model = AutoModelForCausalLM.from_pretrained(name, revision=revision, dtype=DTYPES[dtype])
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


def answer_all(pair: SideBySide, prompts: list[str], temperature: float, max_new_tokens: int) -> None:
    """Answers the prompts side by side and prints the summary."""
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": temperature > 0}
    if temperature > 0:
        options["temperature"] = temperature
    pair.warm_up()
    for prompt in prompts:
        pair.answer(prompt, **options)
    pair.console.rule("summary")
    pair.console.print(pair.summary(), highlight=False, markup=False)


def finish(figures: dict[str, Any], kept: bool, as_json: bool) -> None:
    """Prints figures where asked for; exit code 1 where text with the drafter was not that of plain generate."""
    if as_json:
        typer.echo(json.dumps(figures))
    if not kept:
        raise typer.Exit(1)


@app.command()
def demo(
    prompt: Prompts = None,
    sweeps: Sweeps = None,
    temperature: Temperature = 0.0,
    device: Device = "cpu",
    max_new_tokens: MaxNewTokens = 96,
    target_folder: Folder = None,
    as_json: AsJson = False,
) -> None:
    """Answers prompts with the embedded target, plain and with the shipped drafter.

    Speed is shown in bfloat16, exactness in float32, where ids must be equal.
    """
    console = Console(stderr=as_json)
    prompts = prompt or list(DEMO_PROMPTS)
    target, tokenizer = load_demo_target(target_folder, torch.bfloat16, device, console.print)
    exact, _ = load_demo_target(target_folder, torch.float32, device, console.print)
    drafter = load_demo_drafter(device=device)
    drafter.speculation.sweeps = sweeps
    console.print(f"target SmolLM2-135M-Instruct (bfloat16, {device}); drafter: {drafter.describe()}", highlight=False)
    pair = SideBySide(target, tokenizer, drafter, exact, console)
    answer_all(pair, prompts, temperature, max_new_tokens)
    with console.status("float32: comparing greedy ids with plain generate"):
        equal = check_exactness(exact, tokenizer, drafter.float(), prompts, max_new_tokens)
    console.print(
        f"float32, greedy: ids equal plain generate on {sum(equal)} of {len(equal)} prompts", highlight=False
    )
    kept = all(equal) and all(pair.is_tie(one.difference) for one in pair.pairs)
    finish({**pair.to_dict(), "float32_ids_equal": equal}, kept, as_json)


@app.command()
def generate(
    target: Annotated[str, typer.Option(help="Causal LM: folder, Hub id, or `demo`.")],
    drafter: Annotated[str, typer.Option(help="Drafter in any supported layout: folder, Hub id, or `demo`.")],
    prompt: Prompts = None,
    sweeps: Sweeps = None,
    temperature: Temperature = 0.0,
    device: Device = "cpu",
    max_new_tokens: MaxNewTokens = 256,
    dtype: Annotated[str, typer.Option(help=f"dtype of target and drafter: {', '.join(DTYPES)}.")] = "auto",
    revision: Annotated[str | None, typer.Option(help="Revision of the target.")] = None,
    as_json: AsJson = False,
) -> None:
    """Answers prompts with any target, plain and with any drafter made for it."""
    console = Console(stderr=as_json)
    console.print(f"loading {target} and {drafter}", highlight=False)
    model, tokenizer = load_target(target, dtype, device, revision, console)
    loaded = load_drafter(drafter, model, target, console)
    loaded.speculation.sweeps = sweeps
    console.print(f"drafter: {loaded.describe()}", highlight=False)
    pair = SideBySide(model, tokenizer, loaded, console=console)
    answer_all(pair, prompt or list(DEMO_PROMPTS), temperature, max_new_tokens)
    # Without a float32 judge a difference in half precision proves nothing.
    kept = model.dtype != torch.float32 or all(pair.is_tie(one.difference) for one in pair.pairs)
    finish(pair.to_dict(), kept, as_json)


def run() -> None:
    """Entry point: errors that name their cause are printed without a traceback."""
    try:
        app()
    except (ValueError, OSError, RuntimeError) as error:
        Console(stderr=True).print(f"error: {error}", style="red", markup=False, highlight=False)
        raise SystemExit(2) from error


if __name__ == "__main__":
    run()
