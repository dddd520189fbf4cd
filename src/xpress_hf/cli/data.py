"""`regenerate` and `features`: what a drafter learns from."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from ..training import regeneration
from ..training.data import ConversationDataset
from ..training.features import write_features
from .common import (
    AsJson,
    Device,
    DtypeName,
    Revision,
    Temperature,
    TemplateSwitches,
    finish,
    json_object,
    load_drafter,
    load_target,
)

Split = Annotated[str, typer.Option(help="Split of a named dataset.")]
TargetName = Annotated[str, typer.Option(help="Folder, Hub id, or `demo`; with --base-url the served name.")]


class TokensPerSecond(ProgressColumn):
    """New tokens per second since the start of the run."""

    def render(self, task: Task) -> Text:
        return Text(f"{task.fields['num_tokens'] / max(task.elapsed or 0, 1e-9):.1f} tokens/s")


def progress_bar(console: Console) -> Progress:
    """A bar with rows done and tokens/s; its tasks carry `num_tokens`."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TokensPerSecond())
    return Progress(*columns, TimeRemainingColumn(), console=console)


def regenerate(
    prompts: Annotated[str, typer.Option(help="JSONL file, saved dataset, or a name for `datasets`.")],
    output: Annotated[Path, typer.Option(help="JSONL file of answers; one that exists is continued.")],
    target: TargetName = "demo",
    split: Split = "train",
    limit: Annotated[int | None, typer.Option(min=1, help="Rows to answer at most.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer in tokens.")] = 1024,
    temperature: Temperature = 0.0,
    top_p: Annotated[float, typer.Option(help="Smallest set of tokens with this share of the law.")] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="This many best tokens; 0 = all.")] = 0,
    seed: Annotated[int, typer.Option(help="Seed of sampled answers.")] = 0,
    chat_template_kwargs: TemplateSwitches = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows that the target answers at a time.")] = 16,
    dtype: DtypeName = "auto",
    device: Device = "cpu",
    revision: Revision = None,
    base_url: Annotated[str | None, typer.Option(help="Server to ask, such as http://localhost:8000/v1.")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests to the server at a time.")] = 16,
    retries: Annotated[int, typer.Option(min=0, help="Further tries of a failed request, with growing delays.")] = 6,
    extra_body: Annotated[str | None, typer.Option(help="JSON object added to every request.")] = None,
    as_json: AsJson = False,
) -> None:
    """Lets the target answer prompts: what a drafter learns from.

    A killed run goes on with the same command. The key for a server is read from OPENAI_API_KEY.
    """
    console = Console(stderr=as_json)
    sampling = regeneration.Sampling(temperature, top_p, top_k, seed, max_new_tokens)
    rows = regeneration.read_prompts(
        prompts, split, limit, json_object("--chat-template-kwargs", chat_template_kwargs)
    )
    answerer: regeneration.Answerer
    if base_url is None:
        model, tokenizer = load_target(target, dtype, device, revision, console)
        answerer = regeneration.TargetAnswerer(model, tokenizer, target, batch_size)
    else:
        fields = json_object("--extra-body", extra_body)
        key = os.environ.get("OPENAI_API_KEY")
        server = regeneration.Server(base_url, target, key, retries, extra_body=fields)
        answerer = regeneration.ServerAnswerer(server, concurrency)
    with progress_bar(console) as progress:
        task = progress.add_task("answers", total=len(rows), num_tokens=0)

        def advance(num_rows: int, num_new_tokens: int) -> None:
            num_tokens = progress.tasks[0].fields["num_tokens"] + num_new_tokens
            progress.update(task, advance=num_rows, num_tokens=num_tokens)

        summary = regeneration.regenerate(rows, output, answerer, sampling, advance)
        progress.update(task, completed=summary.num_rows)
    console.print(
        f"{output}: {summary.num_rows} answers, {summary.num_written} of them new: {summary.num_new_tokens} tokens, "
        f"{summary.tokens_per_s:.1f} tokens/s",
        highlight=False,
        markup=False,
    )
    figures = {
        "num_rows": summary.num_rows,
        "num_written": summary.num_written,
        "num_new_tokens": summary.num_new_tokens,
        "tokens_per_s": summary.tokens_per_s,
    }
    finish(figures, True, as_json)


def features(
    conversations: Annotated[list[str], typer.Option(help="Answers: JSONL, saved dataset, or a name; repeatable.")],
    output: Annotated[Path, typer.Option(help="Folder of features; one that exists is continued.")],
    target: Annotated[str, typer.Option(help="Causal LM: folder, Hub id, or `demo`.")] = "demo",
    target_layer_ids: Annotated[str | None, typer.Option(help="Taps, zero-based, such as 1,7,14,20,27.")] = None,
    drafter: Annotated[str | None, typer.Option(help="Takes the taps and the mask id of this drafter.")] = None,
    mask_token_id: Annotated[int | None, typer.Option(help="The drafter's mask id; no text may hold it.")] = None,
    split: Split = "train",
    max_length: Annotated[int | None, typer.Option(min=2, help="Tokens kept at most of each text.")] = None,
    chat_template_kwargs: TemplateSwitches = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Texts of one forward of the target.")] = 8,
    dtype: DtypeName = "auto",
    device: Device = "cpu",
    revision: Revision = None,
    as_json: AsJson = False,
) -> None:
    """Reads the hidden states of the target on answers once; training then needs no forward of the target."""
    if (target_layer_ids is None) == (drafter is None):
        raise ValueError("Give the taps by either `--target-layer-ids` or `--drafter`.")
    console = Console(stderr=as_json)
    switches = json_object("--chat-template-kwargs", chat_template_kwargs)
    model, tokenizer = load_target(target, dtype, device, revision, console)
    if drafter is not None:
        config = load_drafter(drafter, model, target, console).config
        layers, mask_token_id = config.target_layer_ids, config.mask_token_id
    else:
        layers = parse_layers(target_layer_ids, model.config.get_text_config().num_hidden_layers)
    parts = [
        ConversationDataset(source, tokenizer, max_length, split, switches, mask_token_id) for source in conversations
    ]
    with progress_bar(console) as progress:
        task = progress.add_task("texts", total=sum(map(len, parts)), num_tokens=0)

        def advance(num_texts: int, num_tokens: int) -> None:
            progress.update(task, advance=num_texts, num_tokens=progress.tasks[0].fields["num_tokens"] + num_tokens)

        texts = (part[index] for part in parts for index in range(len(part)))
        count = write_features(model, texts, output, layers, batch_size, tokenizer, advance)
        progress.update(task, completed=count)
    console.print(f"{output}: {count} texts", highlight=False, markup=False)
    finish({"num_texts": count, "target_layer_ids": layers}, True, as_json)


def parse_layers(text: str, num_layers: int) -> list[int]:
    """Taps from a list with commas."""
    try:
        layers = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ValueError(f"`--target-layer-ids` must be numbers with commas between them, got {text!r}.") from error
    # The hidden state of the last layer comes behind the final norm only.
    if not all(0 <= layer < num_layers - 1 for layer in layers):
        raise ValueError(f"`--target-layer-ids` must lie in 0 .. {num_layers - 2}, got {text!r}.")
    return layers
