"""`inspect`, `convert` and `card`: what a checkpoint is, the same drafter in another layout, and its model card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig

from ..checkpoints.export import LAYOUTS_OUT, export
from ..checkpoints.inspection import describe_checkpoint, misfits
from ..checkpoints.loading import Checkpoint, open_checkpoint
from ..demo.drafter import DRAFTER_FOLDER
from ..hub import CardFacts, model_card
from .common import DEMO, AsJson

Source = Annotated[str, typer.Argument(help="Drafter in any supported layout: folder, Hub id, or `demo`.")]
Revision = Annotated[str | None, typer.Option(help="Revision on the Hub: branch, tag or commit.")]
TapOffset = Annotated[
    int | None, typer.Option(help="speculators files: stored tap ids minus zero-based layers. [default: 1]")
]
AllowPickle = Annotated[bool, typer.Option(help="Read the training file of xPress, a pickle.")]


def open_source(name: str, revision: str | None, tap_offset: int | None, allow_pickle: bool) -> Checkpoint:
    source = DRAFTER_FOLDER if name == DEMO else name
    return open_checkpoint(source, {"revision": revision}, tap_offset=tap_offset, allow_pickle=allow_pickle)


def inspect(
    checkpoint: Source,
    target: Annotated[str | None, typer.Option(help="Causal LM to compare with: folder or Hub id.")] = None,
    revision: Revision = None,
    tap_offset: TapOffset = None,
    allow_pickle: AllowPickle = False,
    as_json: AsJson = False,
) -> None:
    """Shows layout, sizes, taps, fitting targets and ignored tensors of a checkpoint; reads no weights.

    With --target, exit code 1 says that the pair does not fit.
    """
    opened = open_source(checkpoint, revision, tap_offset, allow_pickle)
    facts = describe_checkpoint(opened)
    if target is not None:
        facts["misfits"] = misfits(opened.config, AutoConfig.from_pretrained(target))
    if as_json:
        typer.echo(json.dumps(facts))
    else:
        print_facts(facts)
    if facts.get("misfits"):
        raise typer.Exit(1)


def print_facts(facts: dict[str, Any]) -> None:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows(facts):
        table.add_row(name, value)
    Console().print(table, markup=False, highlight=False)


def rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    size, count, needs = facts["sizes"], facts["parameters"], facts["target"]
    heads = f"{size['num_attention_heads']} heads ({size['num_key_value_heads']} for keys) of {size['head_dim']}"
    shown = [
        ("source", facts["source"]),
        ("layout", f"{facts['layout']}: {facts['reason']}"),
        ("block", f"{facts['block_size']} slots, {facts['num_draft_tokens']} drafts ({facts['slot_layout']} layout)"),
        ("attention in the block", str(facts["block_attention"])),
        ("taps", f"{facts['target_layer_ids']} (zero-based layers), fusion {facts['fusion']}"),
        ("mask token id", str(facts["mask_token_id"])),
        ("layers", f"{size['num_hidden_layers']}, hidden {size['hidden_size']}, MLP {size['intermediate_size']}"),
        ("", heads),
    ]
    if size["sliding_window"]:
        shown.append(("", f"{', '.join(size['layer_types'])}; window {size['sliding_window']}"))
    shown.append(("refiner", part(facts["refiner"])))
    shown.append(("length head", part(facts["length_head"])))
    parts = ", ".join(f"{name} {number:,}" for name, number in count.items() if name != "all")
    shown.append(("parameters", f"{count['all']:,} ({parts})"))
    shown.append(("stored as", f"{', '.join(facts['dtypes'])}, {facts['num_bytes'] / 1e6:.1f} MB"))
    shown.append(("hashes", "yes" if facts["has_hashes"] else "none"))
    shown.append(("fits a target with", fitting(needs)))
    if needs["named"]:
        shown.append(("made for", str(needs["named"])))
    if "misfits" in facts:
        shown.append(("this target", "; ".join(facts["misfits"]) or "fits"))
    reasons: dict[str, list[str]] = {}
    for name, reason in facts["ignored"].items():
        reasons.setdefault(reason, []).append(name)
    shown += [("ignored", f"{', '.join(names)}: {reason}") for reason, names in reasons.items()]
    return shown + [("note", note) for note in facts["notes"]]


def part(values: dict[str, Any] | None) -> str:
    return "none" if values is None else ", ".join(f"{name} {value}" for name, value in values.items())


def fitting(needs: dict[str, Any]) -> str:
    layers = needs["num_hidden_layers"]
    counted = f"{layers} layers" if layers is not None else f"{needs['fewest_layers']} layers or more"
    tokens = needs["vocab_size"]
    vocabulary = f"{tokens:,} tokens" if tokens is not None else f"{needs['fewest_tokens']:,} tokens or more"
    return f"hidden size {needs['hidden_size']}, {counted}, {vocabulary}"


def convert(
    checkpoint: Source,
    output: Annotated[str, typer.Argument(help="Folder to write; must not exist or be empty.")],
    to: Annotated[str, typer.Option(help=f"Layout: {', '.join(LAYOUTS_OUT)}.")],
    drop_refiner: Annotated[bool, typer.Option(help="Leave the refiner out.")] = False,
    drop_length_head: Annotated[bool, typer.Option(help="Leave the length head out.")] = False,
    max_shard_size: Annotated[str, typer.Option(help="Longest file of weights; memory stays near it.")] = "2GB",
    revision: Revision = None,
    tap_offset: TapOffset = None,
    allow_pickle: AllowPickle = False,
) -> None:
    """Writes a drafter in the layout of another project; says what was left aside and what that layout cannot hold."""
    opened = open_source(checkpoint, revision, tap_offset, allow_pickle)
    lost = export(opened, output, to, drop_refiner, drop_length_head, max_shard_size)
    console = Console()
    console.print(f"{opened.layout} -> {to}: {output}", highlight=False, markup=False)
    for line in opened.remarks():
        console.print(f"note: {line}", highlight=False, markup=False)
    for line in lost:
        console.print(f"not written: {line}", highlight=False, markup=False)


def card(
    checkpoint: Source,
    facts: Annotated[str | None, typer.Option(help="JSON file of facts; see docs/checkpoints.md.")] = None,
    output: Annotated[str | None, typer.Option(help="File to write. [default: standard output]")] = None,
    repo_id: Annotated[str | None, typer.Option(help="Where the drafter will be found, for the example.")] = None,
    revision: Revision = None,
) -> None:
    """Writes the model card of a drafter from what its files say and a file of facts."""
    opened = open_source(checkpoint, revision, None, False)
    text = str(model_card(opened, None if facts is None else CardFacts.read(facts), repo_id))
    if output is None:
        typer.echo(text, nl=False)
    else:
        Path(output).write_text(text, encoding="utf-8")
