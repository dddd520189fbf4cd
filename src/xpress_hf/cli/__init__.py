"""`xpress-hf`: the command line. Exit codes: 0 done, 1 done but a promise was broken, 2 bad input."""

from __future__ import annotations

import typer
from rich.console import Console
from transformers.utils import logging as transformers_logging

from .answer import demo, generate
from .benchmark import benchmark, report
from .checkpoint import card, convert, inspect
from .data import features, regenerate
from .evaluate import evaluate
from .train import PASSED_ON, expand, train

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def main() -> None:
    """Lossless, faster generate() for causal LMs of Hugging Face transformers."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


for command in (demo, generate, evaluate, benchmark, report, regenerate, features, convert, inspect, card):
    app.command()(command)
for run_command in (train, expand):
    app.command(context_settings=PASSED_ON)(run_command)


def run() -> None:
    """Entry point: errors that name their cause are printed without a traceback."""
    try:
        app()
    except (ValueError, OSError, RuntimeError) as error:
        Console(stderr=True).print(f"error: {error}", style="red", markup=False, highlight=False)
        raise SystemExit(2) from error
