"""Checks before and during a run: what does not fit, and numbers that are not finite."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, TrainerCallback
from transformers.utils import CONFIG_NAME

from ..configuration import XPressConfig
from ..modeling.drafter import XPressDrafter
from .arguments import DrafterTrainingArguments
from .features import FeatureDataset
from .recipes import Recipe


def check_recipe(recipe: Recipe, drafter: XPressDrafter, args: DrafterTrainingArguments) -> None:
    """Raises `ValueError` where recipe, drafter and arguments contradict each other."""
    config = drafter.config
    if recipe.uses_refiner and drafter.refiner is None:
        raise ValueError(f"`recipe`={args.recipe!r} trains a refiner, but the drafter's config has `refiner`=None.")
    if recipe.fusion is not None and config.fusion != recipe.fusion:
        raise ValueError(
            f"`recipe`={args.recipe!r} needs `fusion`={recipe.fusion!r}, the drafter has {config.fusion!r}."
        )
    if recipe.block_attention is not None and set(config.block_attention_per_layer) != {recipe.block_attention}:
        raise ValueError(
            f"`recipe`={args.recipe!r} needs `block_attention`={recipe.block_attention!r} in all layers, the drafter "
            f"has {config.block_attention!r}."
        )
    if recipe.labels == "teacher" and args.loss_vocab_size is not None:
        raise ValueError(
            "`loss_vocab_size` hides tokens from the teacher, whose most likely token is the label of this recipe; "
            "leave it out, or set `labels` to 'text' in `recipe_options` where the texts are greedy answers."
        )
    if args.freeze_backbone and not recipe.uses_refiner:
        raise ValueError(f"`freeze_backbone` leaves nothing to train: `recipe`={args.recipe!r} has no refiner.")
    if recipe.old_drafts is not None and not 0 < recipe.old_drafts < config.num_draft_tokens:
        raise ValueError(
            f"`old_drafts` must lie between 0 and the drafter's {config.num_draft_tokens} drafted slots, "
            f"got {recipe.old_drafts}."
        )


def check_dataset(dataset: Any, drafter: XPressDrafter, target: PreTrainedModel) -> None:
    """Raises `ValueError` for an empty data set and for features that another target or other taps gave."""
    for one in dataset.values() if isinstance(dataset, dict) else [dataset]:
        if hasattr(one, "__len__") and len(one) == 0:
            raise ValueError("The data set is empty: there is nothing to learn from; look at the filters before it.")
        if isinstance(one, FeatureDataset):
            one.check(target, target_layer_ids=drafter.config.target_layer_ids)


# Fields that say what a slot means; a run that goes on under other ones would unlearn what it has.
RESUMED_FIELDS = ("mask_token_id", "target_layer_ids", "block_size", "slot_layout", "block_attention", "fusion")


def check_resume(folder: str | Path, config: XPressConfig) -> None:
    """Raises `ValueError` where the checkpoint that a run goes on from was trained under other conventions."""
    path = Path(folder) / CONFIG_NAME
    # A checkpoint of an adapter holds no config of the drafter.
    if not path.exists():
        return
    saved = json.loads(path.read_text(encoding="utf-8"))
    for name in RESUMED_FIELDS:
        if name in saved and saved[name] != getattr(config, name):
            raise ValueError(
                f"`{name}` is {getattr(config, name)!r}, but the checkpoint {str(folder)!r} was trained with "
                f"{saved[name]!r}; resume with the same value, or start a new run from that drafter."
            )


class FiniteGradients(TrainerCallback):
    """Stops a run before the optimizer takes in a gradient that is not finite."""

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        # A scaler of half precision meets such gradients on purpose and skips their steps itself.
        if args.fp16:
            return
        if not all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None):
            raise FloatingPointError(
                f"Step {state.global_step}: a gradient is not finite. Look for values that are not finite in the "
                "target's hidden states, or lower the learning rate; nothing was updated."
            )
