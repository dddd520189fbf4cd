"""`DrafterTrainingArguments`: what `DrafterTrainer` can be told beside the fields of `TrainingArguments`."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from transformers import TrainingArguments

from .recipes import RECIPES, Recipe, build_recipe


@dataclass
class DrafterTrainingArguments(TrainingArguments):
    """[`TrainingArguments`] and what training blocks need.

    Args:
        recipe: name of the loss recipe, see `RECIPES`.
        recipe_options: fields of `Recipe` that replace those of the recipe, as a dict or JSON.
        num_anchors: blocks cut out of each text, redrawn in every step.
        chunk_blocks: blocks whose logits [rows, V] exist at one time; `None` = as many as fit `loss_memory_mb`.
        loss_memory_mb: memory in MiB that logits, softmaxes and their gradients may take.
        loss_vocab_size: tokens that enter the softmaxes of the loss (`LossVocabulary`), redrawn for every batch;
            `None` = the whole vocabulary. A quarter of the vocabulary makes steps on a CPU about three times as fast.
        freeze_backbone: train the refiner alone.
        backbone_lr_scale: learning rate of everything but the refiner, as a multiple of that of the refiner; no effect
            on a drafter without refiner. A new refiner on a trained backbone wants a higher rate than the backbone.
        replay_texts: held-out texts that an evaluation also drafts through cycle by cycle, as generate() does.
        matrix_optimizer: "adamw", or "muon" for the hidden matrices with AdamW for the rest.
        matrix_learning_rate: learning rate of Muon; `learning_rate` stays that of AdamW.

    Raises:
        ValueError: a value out of range, an unknown recipe or an unknown recipe field.
    """

    recipe: str = field(default="dflash", metadata={"help": "Loss recipe: " + ", ".join(RECIPES)})
    recipe_options: str | None = field(default=None, metadata={"help": "Fields of the recipe to replace, as JSON."})
    num_anchors: int = field(default=512, metadata={"help": "Blocks cut out of each text."})
    chunk_blocks: int | None = field(default=None, metadata={"help": "Blocks whose logits exist at one time."})
    loss_memory_mb: int = field(default=2048, metadata={"help": "Memory of the loss in MiB, sets `chunk_blocks`."})
    loss_vocab_size: int | None = field(default=None, metadata={"help": "Tokens in the softmaxes of the loss."})
    freeze_backbone: bool = field(default=False, metadata={"help": "Train the refiner alone."})
    backbone_lr_scale: float = field(default=1.0, metadata={"help": "Rate of the backbone / rate of the refiner."})
    replay_texts: int = field(default=16, metadata={"help": "Held-out texts drafted through as generate() does."})
    matrix_optimizer: str = field(default="adamw", metadata={"help": "adamw | muon"})
    matrix_learning_rate: float = field(default=2e-3, metadata={"help": "Learning rate of Muon."})
    remove_unused_columns: bool = field(default=False, metadata={"help": "Batches hold more than the model reads."})

    def __post_init__(self):
        super().__post_init__()
        self.build_recipe()
        if self.matrix_optimizer not in ("adamw", "muon"):
            raise ValueError(f"`matrix_optimizer` must be 'adamw' or 'muon', got {self.matrix_optimizer!r}.")
        if not self.backbone_lr_scale > 0:
            raise ValueError(
                f"`backbone_lr_scale` must be > 0, got {self.backbone_lr_scale}; to train the refiner alone set "
                "`freeze_backbone`."
            )
        for name in ("num_anchors", "chunk_blocks", "loss_vocab_size", "loss_memory_mb"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be >= 1, got {getattr(self, name)}.")

    @property
    def recipe_fields(self) -> dict[str, Any]:
        """`recipe_options` as a dict."""
        if isinstance(self.recipe_options, dict):
            return self.recipe_options
        try:
            found = json.loads(self.recipe_options or "{}")
        except json.JSONDecodeError as error:
            found = error
        if not isinstance(found, dict):
            raise ValueError(f"`recipe_options` must be a JSON object, got {self.recipe_options!r} ({found}).")
        return found

    def build_recipe(self) -> Recipe:
        """The recipe that these arguments name."""
        return build_recipe(self.recipe, self.recipe_fields)
