"""Sharing a drafter: a model card that says what was measured, and the push to the Hub.

The card is `model_cards/template.md` filled with what the checkpoint says of itself and with facts that only people
know (`CardFacts`). Facts that are missing leave their line out; nothing is guessed.
"""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from huggingface_hub import HfApi, ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers.utils import GENERATION_CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME

from .checkpoints.export import as_checkpoint
from .checkpoints.inspection import describe_checkpoint
from .checkpoints.loading import Checkpoint
from .modeling.drafter import XPressDrafter, unwrap_drafter

LIBRARY = "xpress-hf"
TAGS = ("speculative-decoding", "block-diffusion", "drafter")
MARKER = "<!-- Written by `xpress-hf card`: change the facts, not this file. -->"
# In the wheel the template lies beside this file, in a checkout in the folder of cards.
TEMPLATES = (
    Path(__file__).parent / "card_template.md",
    Path(__file__).parents[2] / "model_cards" / "template.md",
)
TEXTS = ("title", "summary", "license", "mask_token", "intended_use", "limits", "usage", "notes")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass
class CardFacts:
    """What a card says beyond the checkpoint. Every field may be missing; a text stands for a list of one.

    Args:
        title, summary: heading and first paragraph.
        license: identifier as the Hub knows it, for example "apache-2.0".
        language: language codes.
        tags: further tags.
        datasets: Hub ids; anything else is left out of the metadata.
        target: `id` on the Hub, `revision`, `description`.
        mask_token: the token behind the mask id, and why it is free.
        intended_use, limits, usage, notes: text. `usage` replaces the generated example.
        training: `data`, `recipe`, `hardware` as text, `commands` as a list of lines.
        acceptance, speed: tables: `columns`, `rows`, and `setting`, which must say on what they were measured.
    """

    title: str | None = None
    summary: str | None = None
    license: str | None = None
    language: list[str] = field(default_factory=list)
    tags: list[str] = field(default_factory=list)
    datasets: list[str] = field(default_factory=list)
    target: dict[str, Any] = field(default_factory=dict)
    mask_token: str | None = None
    intended_use: str | None = None
    limits: str | None = None
    usage: str | None = None
    training: dict[str, Any] = field(default_factory=dict)
    acceptance: dict[str, Any] = field(default_factory=dict)
    speed: dict[str, Any] = field(default_factory=dict)
    notes: str | None = None

    def __post_init__(self):
        for name, known in (
            ("target", {"id", "revision", "description"}),
            ("training", {"data", "recipe", "commands", "hardware"}),
            ("acceptance", {"setting", "columns", "rows"}),
            ("speed", {"setting", "columns", "rows"}),
        ):
            value = getattr(self, name)
            if not isinstance(value, dict) or (unknown := sorted(set(value) - known)):
                bad = unknown if isinstance(value, dict) else value
                raise ValueError(f"`{name}` of the facts must be a dict with keys of {sorted(known)}, got {bad!r}.")
        for name in ("language", "tags", "datasets"):
            setattr(self, name, as_list(getattr(self, name), name))
        self.training = {**self.training, "commands": as_list(self.training.get("commands"), "training.commands")}
        self._check_texts()
        for name in ("acceptance", "speed"):
            self._check_table(name)

    def _check_texts(self) -> None:
        values = {name: getattr(self, name) for name in TEXTS}
        for name, keys in (("training", ("data", "recipe", "hardware")), ("target", ("revision", "description"))):
            values |= {f"{name}.{key}": getattr(self, name).get(key) for key in keys}
        values |= {f"{name}.setting": getattr(self, name).get("setting") for name in ("acceptance", "speed")}
        lists = {"language": self.language, "tags": self.tags, "training.commands": self.training["commands"]}
        values |= {f"{name}[{place}]": one for name, entries in lists.items() for place, one in enumerate(entries)}
        for name, value in values.items():
            if value is not None and not isinstance(value, str):
                raise ValueError(f"`{name}` of the facts must be a text or null, got {value!r}.")

    def _check_table(self, name: str) -> None:
        value = getattr(self, name)
        columns, rows = value.get("columns") or [], value.get("rows") or []
        if not all(isinstance(one, list | tuple) for one in (columns, rows, *rows)):
            raise ValueError(f"`{name}` of the facts: `columns`, `rows` and every row must be lists, got {value!r}.")
        widths = {len(row) for row in (columns, *rows)}
        if len(widths) > 1:
            raise ValueError(f"`{name}` of the facts: every row needs one cell per column, got {sorted(widths)}.")
        if rows and not value.get("setting"):
            raise ValueError(f"`{name}.setting` is missing: figures need prompts, hardware, dtype and versions.")

    @classmethod
    def read(cls, path: str | Path) -> CardFacts:
        """Facts from a JSON file.

        Raises:
            ValueError: the file holds unknown keys or is no JSON object.
        """
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:  # no JSON, or no UTF-8
            raise ValueError(f"{str(path)!r} is no valid JSON ({error}).") from error
        known = {one.name for one in dataclasses.fields(cls)}
        if not isinstance(values, dict) or (unknown := sorted(set(values) - known)):
            bad = unknown if isinstance(values, dict) else type(values).__name__
            raise ValueError(f"{str(path)!r} must hold an object with keys of {sorted(known)}, got {bad!r}.")
        return cls(**values)


def hub_id(name: Any) -> str | None:
    """`name` if it is an id on the Hub ("owner/name"), never a path on disk."""
    if not isinstance(name, str) or not _HUB_ID.fullmatch(name) or Path(name).exists():
        return None
    try:
        validate_repo_id(name)
    except HFValidationError:
        return None
    return name


def card_metadata(checkpoint: Checkpoint, facts: CardFacts) -> ModelCardData:
    """Metadata of the card. Missing facts leave their keys out, so that every combination is valid."""
    config = checkpoint.config
    base_model = hub_id(facts.target.get("id")) or hub_id((config.target or {}).get("name"))
    kinds = ["dflare" if config.fusion == "layerwise" else "dflash"]
    kinds += ["xpress"] if config.refiner is not None else []
    kinds += ["adaflash"] if config.length_head is not None else []
    tags = list(dict.fromkeys([*TAGS, *kinds, *[tag for tag in facts.tags if tag]]))
    datasets = [name for name in map(hub_id, facts.datasets) if name]
    languages = [one for one in facts.language if one]
    optional: dict[str, Any] = {"license": facts.license or None, "language": languages or None}
    # A drafter does not run without its target, which of the Hub's relations "adapter" says best.
    optional |= {"base_model": base_model, "base_model_relation": "adapter" if base_model else None}
    optional |= {"datasets": datasets or None}
    given = {key: value for key, value in optional.items() if value is not None}
    return ModelCardData(library_name=LIBRARY, pipeline_tag="text-generation", tags=tags, **given)


def model_card(
    source: XPressDrafter | Checkpoint, facts: CardFacts | None = None, repo_id: str | None = None
) -> ModelCard:
    """The card of a drafter.

    Args:
        source: a loaded drafter or an opened checkpoint.
        facts: what the checkpoint does not say.
        repo_id: where it will be found.

    Raises:
        ValueError: `repo_id` is no id of the Hub.
    """
    if repo_id is not None:
        validate_repo_id(repo_id)
    checkpoint, facts = as_checkpoint(source), facts or CardFacts()
    about = describe_checkpoint(checkpoint)
    data = card_metadata(checkpoint, facts)
    base_model = data.to_dict().get("base_model")
    name = base_model or facts.target.get("id") or about["target"]["named"]
    target_name = Path(str(name)).name if name else "an unnamed target"
    known = checkpoint.config.target or {}
    is_same = facts.target.get("id") in (None, known.get("name"))
    revision = facts.target.get("revision") or (known.get("revision") if is_same else None)
    described = facts.target.get("description") or (f"`{base_model}`" if base_model else target_name)
    template = next((path for path in TEMPLATES if path.is_file()), None)
    if template is None:
        raise FileNotFoundError("The card template is missing: this installation is incomplete; reinstall xpress-hf.")
    card = ModelCard.from_template(
        data,
        template_str=tidy_template(template.read_text(encoding="utf-8")),
        marker=MARKER,
        facts=facts,
        about=about,
        repo_id=repo_id,
        base_model=base_model,
        base_revision=revision if base_model else None,
        target_name=target_name,
        target_line=described + (f", revision {revision}" if revision else ""),
        default_summary=f"A drafter that speeds up `generate()` of {target_name}; the target decides every token.",
        millions=f"{about['parameters']['all'] / 1e6:.1f}",
        megabytes=f"{about['num_bytes'] / 1e6:.1f}",
        table=markdown_table,
        cell=table_cell,
    )
    return ModelCard(re.sub(r"\n{3,}", "\n\n", str(card)).rstrip() + "\n")


def tidy_template(text: str) -> str:
    """A line that holds nothing but a statement leaves no empty line behind."""
    return re.sub(r"^(\{%[^\n]*%\})\n", r"\1", text, flags=re.MULTILINE)


def markdown_table(table: dict[str, Any]) -> str:
    columns = [str(one) for one in table["columns"]]
    lines = [columns, ["---"] * len(columns), *table["rows"]]
    return "\n".join("| " + " | ".join(table_cell(cell) for cell in line) + " |" for line in lines)


def table_cell(value: Any) -> str:
    """A value inside one cell: neither its bars nor its line ends may end the cell."""
    return " ".join(str(value).split()).replace("|", "\\|")


def push_to_hub(
    drafter: XPressDrafter,
    repo_id: str,
    *,
    facts: CardFacts | dict[str, Any] | None = None,
    commit_message: str | None = None,
    commit_description: str | None = None,
    private: bool | None = None,
    token: bool | str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    max_shard_size: int | str = "5GB",
    tags: str | list[str] | None = None,
) -> str:
    """Uploads the drafter, its hashes and its card; reached as `drafter.push_to_hub(...)`.

    A card that the repository already has stays as it is unless `facts` are given. Shards and limits of drafts of an
    earlier upload that this one does not replace are removed. Further arguments as in [`PreTrainedModel.push_to_hub`].

    Returns:
        address of the commit.
    """
    facts = CardFacts(**facts) if isinstance(facts, dict) else facts
    api = HfApi(token=token)
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    if revision is not None and not create_pr:
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    has_card = api.file_exists(repo_id, "README.md", revision=revision)
    with TemporaryDirectory() as folder:
        drafter.save_pretrained(folder, max_shard_size=max_shard_size)
        if facts is not None or not has_card:
            card_facts = facts or CardFacts()
            card_facts = dataclasses.replace(card_facts, tags=[*card_facts.tags, *as_list(tags, "tags")])
            model_card(drafter, card_facts, repo_id).save(Path(folder) / "README.md")
        commit = api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            commit_message=commit_message or "Upload drafter",
            commit_description=commit_description,
            revision=revision,
            create_pr=create_pr,
            delete_patterns=["model*.safetensors", SAFE_WEIGHTS_INDEX_NAME, GENERATION_CONFIG_NAME],
        )
    return str(commit.commit_url)


def write_training_card(
    trainer: Any,
    model_name: str | None = None,
    license: str | None = None,
    language: str | list[str] | None = None,
    tags: str | list[str] | None = None,
    dataset: str | list[str] | None = None,
    **kwargs: Any,
) -> None:
    """Writes the card of a `DrafterTrainer` into its output folder, unless one written by hand lies there.

    Arguments as in [`Trainer.create_model_card`]; those about tasks have no meaning for a drafter.
    """
    path = Path(trainer.args.output_dir) / "README.md"
    if path.is_file() and MARKER not in path.read_text(encoding="utf-8"):
        return
    drafter = unwrap_drafter(trainer.model)
    named = (drafter.config.target or {}).get("name") or trainer.target_model.config._name_or_path
    args = trainer.args
    steps = (
        f"{trainer.state.global_step} steps, learning rate {args.learning_rate:g}, {args.num_anchors} anchors a text"
    )
    facts = CardFacts(
        title=model_name,
        license=license,
        language=as_list(language, "language"),
        tags=as_list(tags, "tags"),
        datasets=as_list(dataset, "dataset"),
        target={"id": hub_id(named)},
        training={"recipe": f"Recipe `{args.recipe}` of `DrafterTrainer`: {steps}."},
        acceptance=held_out_acceptance(trainer.state.log_history),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    model_card(drafter, facts, trainer.hub_model_id).save(path)


def as_list(value: Any, name: str) -> list[Any]:
    """A list of texts that may be given as one text or be missing."""
    if value is None or isinstance(value, str):
        return [] if value is None else [value]
    if not isinstance(value, list | tuple):
        raise ValueError(f"`{name}` must be a list of texts, got {value!r}.")
    return list(value)


def held_out_acceptance(history: list[dict[str, float]]) -> dict[str, Any]:
    """Table of the latest held-out acceptance lengths that the Trainer logged; empty when there are none."""
    names = {"eval_base_acceptance_length": "bare", "eval_refined_acceptance_length": "refined"}
    last = next((row for row in reversed(history) if names.keys() & row.keys()), {})
    rows = [[label, f"{last[key]:.3f}"] for key, label in names.items() if key in last]
    if not rows:
        return {}
    setting = (
        f"mean of in-block acceptance at step {int(last.get('step', 0))} on the held-out texts of training, bonus "
        "included. Anchors are drawn at random there, which is easier than decoding."
    )
    return {"setting": setting, "columns": ["", "acceptance length"], "rows": rows}
