"""`xpress-hf`: the command line."""

from __future__ import annotations

from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from .demo import DEMO_PROMPTS, load_demo_drafter, load_demo_target
from .evaluation.side_by_side import SideBySide, check_exactness
from .modeling.drafter import XPressDrafter

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help="Lossless, faster generate()."
)
console = Console()

Prompts = Annotated[list[str] | None, typer.Option("--prompt", help="Prompt to answer; may be given several times.")]
Sweeps = Annotated[int | None, typer.Option(min=0, help="Sweeps of the refiner per block. [default: the drafter's]")]
Temperature = Annotated[float, typer.Option(min=0.0, help="0 = greedy; above 0 the text is sampled.")]
Device = Annotated[str, typer.Option(help="Device of target and drafter: cpu, cuda, cuda:1, mps, ...")]
MaxNewTokens = Annotated[int, typer.Option(min=2, help="Longest answer in tokens.")]


@app.callback()
def main() -> None:
    """Lossless, faster generate() for causal LMs of Hugging Face transformers."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def generation_options(temperature: float, max_new_tokens: int) -> dict[str, Any]:
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": temperature > 0}
    if temperature > 0:
        options["temperature"] = temperature
    return options


def answer_all(pair: SideBySide, prompts: list[str], temperature: float, max_new_tokens: int) -> None:
    """Answers the prompts side by side, after a short warm-up of both ways, and prints the summary."""
    for drafter in (None, pair.drafter):
        warm_up = torch.arange(1, 9, device=pair.target.device)[None]
        pair.target.generate(warm_up, assistant_model=drafter, max_new_tokens=8, do_sample=False)
    for prompt in prompts:
        pair.answer(prompt, **generation_options(temperature, max_new_tokens))
    console.rule("summary")
    console.print(pair.summary(), highlight=False, markup=False)


@app.command()
def demo(
    prompt: Prompts = None,
    sweeps: Sweeps = None,
    temperature: Temperature = 0.0,
    device: Device = "cpu",
    max_new_tokens: MaxNewTokens = 96,
    target_folder: Annotated[str | None, typer.Option(help="Folder that holds the demo target's GGUF file.")] = None,
) -> None:
    """Answers prompts with the embedded target, plain and with the shipped drafter.

    Speed is shown in bfloat16, exactness in float32, where ids must be equal.
    """
    prompts = prompt or list(DEMO_PROMPTS)
    target, tokenizer = load_demo_target(target_folder, torch.bfloat16, device, console.print)
    exact, _ = load_demo_target(target_folder, torch.float32, device, console.print)
    drafter = load_demo_drafter(device=device)
    drafter.speculation.sweeps = sweeps
    console.print(f"target SmolLM2-135M-Instruct (bfloat16, {device}); drafter: {drafter.describe()}", highlight=False)
    answer_all(SideBySide(target, tokenizer, drafter, exact, console), prompts, temperature, max_new_tokens)
    with console.status("float32: comparing greedy ids with plain generate"):
        equal = check_exactness(exact, tokenizer, drafter.float(), prompts, max_new_tokens)
    console.print(
        f"float32, greedy: ids equal plain generate on {sum(equal)} of {len(equal)} prompts", highlight=False
    )
    if not all(equal):
        raise typer.Exit(1)


@app.command()
def generate(
    target: Annotated[str, typer.Option(help="Causal LM: folder or Hub id.")],
    drafter: Annotated[str, typer.Option(help="Drafter in any supported layout: folder or Hub id.")],
    prompt: Prompts = None,
    sweeps: Sweeps = None,
    temperature: Temperature = 0.0,
    device: Device = "cpu",
    max_new_tokens: MaxNewTokens = 256,
    dtype: Annotated[
        str, typer.Option(help="dtype of target and drafter: auto, bfloat16, float16, float32.")
    ] = "auto",
    revision: Annotated[str | None, typer.Option(help="Revision of the target.")] = None,
) -> None:
    """Answers prompts with any target, plain and with any drafter made for it."""
    console.print(f"loading {target} and {drafter}", highlight=False)
    model = AutoModelForCausalLM.from_pretrained(target, revision=revision, dtype=dtype).to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(target, revision=revision)
    loaded = XPressDrafter.from_pretrained(drafter, dtype=model.dtype).to(device).eval()
    loaded.speculation.sweeps = sweeps
    console.print(f"drafter: {loaded.describe()}", highlight=False)
    pair = SideBySide(model, tokenizer, loaded, console=console)
    answer_all(pair, prompt or list(DEMO_PROMPTS), temperature, max_new_tokens)


def run() -> None:
    """Entry point: errors that name their cause are printed without a traceback."""
    try:
        app()
    except (ValueError, OSError, RuntimeError) as error:
        Console(stderr=True).print(f"error: {error}", style="red", markup=False, highlight=False)
        raise SystemExit(2) from error


if __name__ == "__main__":
    run()
