"""`demo` and `generate`: prompts answered side by side, plain and with a drafter."""

from __future__ import annotations

from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from ..demo import DEMO_PROMPTS, load_demo_drafter, load_demo_target
from ..evaluation.side_by_side import SideBySide, check_exactness
from .common import (
    DTYPES,
    AsJson,
    Device,
    Folder,
    MaxNewTokens,
    Prompts,
    Sweeps,
    Temperature,
    finish,
    load_drafter,
    load_target,
)


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
