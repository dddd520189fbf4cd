"""`train` and `expand`: one training run, from flags or a YAML file."""

from __future__ import annotations

import json
import sys
from dataclasses import fields
from typing import Any

import typer
import yaml
from rich.console import Console
from transformers import HfArgumentParser, PreTrainedModel, PreTrainedTokenizerBase

from ..evaluation.expansion_bound import ExpansionBound
from ..training.arguments import DrafterTrainingArguments
from ..training.expansion import expand_block
from ..training.launch import RunOptions, build_drafter, load_texts, measure
from ..training.trainer import DrafterTrainer
from .common import load_drafter, load_target

# All flags belong to the two dataclasses, whose parser also prints the help.
PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def parse(arguments: list[str], **fixed: Any) -> tuple[RunOptions, DrafterTrainingArguments]:
    """`[FILE.yaml] [--field value ...]` -> options; flags count more than the file, `fixed` more than both.

    Raises:
        ValueError: a field that no option has, or a file that is no mapping.
    """
    parser = HfArgumentParser((RunOptions, DrafterTrainingArguments), prog="xpress-hf train")
    known = {one.name for one in (*fields(RunOptions), *fields(DrafterTrainingArguments)) if one.init}
    values: dict[str, Any] = {}
    if arguments and arguments[0].endswith((".yaml", ".yml")):
        path, *arguments = arguments
        with open(path, encoding="utf-8") as file:
            values = yaml.safe_load(file) or {}
        if not isinstance(values, dict):
            raise ValueError(f"{path} must hold a mapping of fields to values, got {type(values).__name__}.")
        if unknown := sorted(set(values) - known):
            raise ValueError(f"{path} has unknown fields {unknown}; `xpress-hf train --help` lists the known ones.")
    given = {one[2:].split("=")[0].replace("-", "_") for one in arguments if one.startswith("--")} - {"help"}
    if unknown := sorted(name for name in given if not {name, name.removeprefix("no_")} & known):
        raise ValueError(f"Unknown fields {unknown}; `xpress-hf train --help` lists the known ones.")
    flags = parser.parse_args(arguments)
    chosen = {name: value for name, value in vars(flags).items() if name in given or name not in values}
    return parser.parse_dict({**values, **chosen, **fixed})


def load(options: RunOptions, args: DrafterTrainingArguments, console: Console) -> tuple:
    """(target, tokenizer, drafter to start from or None) on the device of the run."""
    target, tokenizer = load_target(options.target, options.dtype, str(args.device), None, console)
    start = None if options.drafter is None else load_drafter(options.drafter, target, options.target, console)
    return target, tokenizer, start


def run_training(
    options: RunOptions,
    args: DrafterTrainingArguments,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    drafter: Any,
) -> DrafterTrainer:
    """Trains, evaluates where texts are held out, and saves drafter and state."""
    texts = load_texts(options.conversations, options.features, options, drafter, tokenizer)
    held_out = load_texts(options.eval_conversations, options.eval_features, options, drafter, tokenizer)
    trainer = DrafterTrainer(drafter, args, target, train_dataset=texts, eval_dataset=held_out)
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()
    trainer.save_state()
    if held_out is not None:
        trainer.log_metrics("eval", trainer.evaluate())
    return trainer


def train(context: typer.Context) -> None:
    """Trains a drafter: `[FILE.yaml] [--field value ...]`; `--help` lists all fields."""
    console = Console()
    options, args = parse(context.args)
    target, tokenizer, start = load(options, args, console)
    drafter = build_drafter(options, args.build_recipe(), target, tokenizer, start)
    console.print(f"drafter: {drafter.describe()}", highlight=False)
    run_training(options, args, target, tokenizer, drafter)
    console.print(f"saved in {args.output_dir}", highlight=False, markup=False)


def expand(context: typer.Context) -> None:
    """Trains a drafter on for a longer block: fields of `train` with `drafter`, `block_size` and held-out texts.

    The ceiling bin of the held-out texts is measured first, and nothing is trained where it says that a longer block
    cannot pay; `--recipe dbloom` is implied.
    """
    console = Console()
    force = "--force" in context.args
    options, args = parse([one for one in context.args if one != "--force"], recipe="dbloom")
    if options.drafter is None or options.block_size is None:
        raise ValueError("`expand` needs `drafter`, the drafter to expand, and `block_size`, its new block.")
    if options.eval_conversations is None and options.eval_features is None:
        raise ValueError("`expand` needs `eval_conversations` or `eval_features`: the ceiling bin is measured there.")
    target, tokenizer, start = load(options, args, console)
    held_out = load_texts(options.eval_conversations, options.eval_features, options, start, tokenizer)
    before = measure(target, start, held_out)
    bound = ExpansionBound.of(before, options.block_size)
    console.print(f"{before}\n{bound}", highlight=False, markup=False)
    if not bound.pays() and not force:
        console.print("nothing was trained; `--force` trains all the same", highlight=False)
        raise typer.Exit(1)
    drafter = expand_block(start.float(), options.block_size)
    naive = measure(target, drafter, held_out)
    args.recipe_options = json.dumps({**args.recipe_fields, "old_drafts": start.config.num_draft_tokens})
    trainer = run_training(options, args, target, tokenizer, drafter)
    after = measure(target, trainer.drafter, held_out)
    old = [min(kept, start.config.num_draft_tokens) for kept in after.accepted]
    rows = [("before", before), ("naive", naive), ("trained", after)]
    for name, record in rows:
        console.print(f"{name}: {record}", highlight=False, markup=False)
    console.print(
        f"old slots keep {1 + sum(old) / len(old):.3f} tokens per cycle of the trained drafter, "
        f"{before.acceptance_length:.3f} before; the bound holds as long as they do not improve",
        highlight=False,
    )


def run() -> None:
    """`python -m xpress_hf.cli.train`, for `accelerate launch -m`."""
    options, args = parse(sys.argv[1:])
    target, tokenizer, start = load(options, args, Console())
    run_training(
        options, args, target, tokenizer, build_drafter(options, args.build_recipe(), target, tokenizer, start)
    )


if __name__ == "__main__":
    run()
