"""`DrafterTrainer`: trains a drafter against a frozen target with the Hugging Face Trainer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel, Trainer, TrainingArguments

from ..decoding.target import Target, check_pair
from ..hub import write_training_card
from ..modeling.backbone import additive_mask
from ..modeling.drafter import XPressDrafter, unwrap_drafter
from .blocks import Blocks, block_visibility, cut_blocks
from .data import BlockCollator
from .features import FeatureDataset, target_states
from .losses import RECIPES, BlockTargets, LossVocabulary, Recipe, block_loss
from .optimizer import MuonWithAdamW


@dataclass
class DrafterTrainingArguments(TrainingArguments):
    """[`TrainingArguments`] and what training blocks need.

    Args:
        recipe: name of the loss recipe: "dflash" (cross entropy with position decay) or "xpress".
        num_anchors: blocks cut out of each text.
        chunk_blocks: blocks whose logits [rows, V] exist at one time.
        loss_vocab_size: tokens that enter the softmaxes of the loss (`LossVocabulary`), redrawn for every batch;
            `None` =
            the whole vocabulary. A quarter of the vocabulary makes steps on a CPU about three times as fast.
        matrix_optimizer: "adamw", or "muon" for the hidden matrices with AdamW for the rest.
        matrix_learning_rate: learning rate of Muon; `learning_rate` stays that of AdamW.
    """

    recipe: str = field(default="dflash", metadata={"help": "Loss recipe: " + ", ".join(RECIPES)})
    num_anchors: int = field(default=512, metadata={"help": "Blocks cut out of each text."})
    chunk_blocks: int = field(default=64, metadata={"help": "Blocks whose logits exist at one time."})
    loss_vocab_size: int | None = field(default=None, metadata={"help": "Tokens in the softmaxes of the loss."})
    matrix_optimizer: str = field(default="adamw", metadata={"help": "adamw | muon"})
    matrix_learning_rate: float = field(default=2e-3, metadata={"help": "Learning rate of Muon."})
    remove_unused_columns: bool = field(default=False, metadata={"help": "Batches hold more than the model reads."})

    def __post_init__(self):
        super().__post_init__()
        if self.recipe not in RECIPES:
            raise ValueError(f"`recipe` must be one of {sorted(RECIPES)}, got {self.recipe!r}.")
        if self.matrix_optimizer not in ("adamw", "muon"):
            raise ValueError(f"`matrix_optimizer` must be 'adamw' or 'muon', got {self.matrix_optimizer!r}.")
        for name in ("num_anchors", "chunk_blocks", "loss_vocab_size"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be >= 1, got {getattr(self, name)}.")


class DrafterTrainer(Trainer):
    """Trains an [`XPressDrafter`] on answers of its target.

    The target stays outside the wrapped model: frozen, in eval mode, in its own dtype and on its own device. Its
    hidden states come from one forward per batch, or from the batch (`FeatureDataset`).

    The loss is the recipe's sum over slots, divided by the sum of slot weights over all accumulated batches and ranks.

    Args:
        model: the drafter.
        args: `DrafterTrainingArguments`.
        target: the frozen causal LM.
        recipe: overrides the recipe that `args.recipe` names.
    """

    # The loss is normalised over all accumulated batches, so the Trainer must not divide it again.
    loss_is_scaled_for_ga = True
    optimizer: Any

    def __init__(
        self,
        model: XPressDrafter,
        args: DrafterTrainingArguments,
        target: PreTrainedModel,
        recipe: Recipe | None = None,
        **kwargs: Any,
    ):
        drafter = unwrap_drafter(model)
        check_pair(target, drafter.config)
        self.recipe = recipe or RECIPES[args.recipe]
        if self.recipe.uses_refiner and drafter.refiner is None:
            raise ValueError(
                f"`recipe`={args.recipe!r} trains a refiner, but the drafter's config has `refiner`=None."
            )
        for dataset in (kwargs.get("train_dataset"), kwargs.get("eval_dataset")):
            if (
                isinstance(dataset, FeatureDataset)
                and dataset.meta.target_layer_ids != drafter.config.target_layer_ids
            ):
                raise ValueError(
                    f"`target_layer_ids`: the features were read at layers {dataset.meta.target_layer_ids}, the "
                    f"drafter taps {drafter.config.target_layer_ids}; read the features anew."
                )
        kwargs.setdefault("data_collator", BlockCollator(drafter.config, args.num_anchors))
        super().__init__(model=model, args=args, **kwargs)
        self.model_accepts_loss_kwargs = True
        self.target_model = target.requires_grad_(False)
        self.target = Target.for_drafter(target, drafter.config)
        if args.loss_vocab_size is not None and not self.target.has_linear_head:
            raise ValueError(
                "`loss_vocab_size` reads rows of the target's head, which this target's head does not allow."
            )
        self._sums: dict[str, float] = {}

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        if self.optimizer is None and self.args.matrix_optimizer == "muon":
            named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
            self.optimizer = MuonWithAdamW(
                named, self.args.matrix_learning_rate, self.args.learning_rate, self.args.weight_decay
            )
        return self.optimizer or super().create_optimizer()

    def _blocks(self, inputs: dict[str, torch.Tensor]) -> Blocks:
        config = unwrap_drafter(self.model).config
        return cut_blocks(inputs["input_ids"], inputs["loss_mask"], inputs["anchors"], config)

    def _weight_sum(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        num_drafts = unwrap_drafter(self.model).config.num_draft_tokens
        weights = self._blocks(inputs).weights[..., -num_drafts:]
        return (weights * self.recipe.slot_weights(num_drafts, weights.device)).sum()

    def get_batch_samples(
        self, epoch_iterator: Iterator, num_batches: int, device: torch.device
    ) -> tuple[list, torch.Tensor | None]:
        """As in `Trainer`; the count that losses are divided by is the sum of slot weights over batches and ranks."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        if not batches:
            return batches, None
        total = sum(self._weight_sum(batch) for batch in batches).to(device)
        return batches, self.accelerator.gather(total).sum()

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, torch.Tensor],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> Any:
        """Loss of one batch, already divided; gradients of all batches of a step add up to that of the global mean."""
        blocks = self._blocks(inputs)
        context, teacher = self._states(inputs)
        hidden_states = self._draft(model, blocks, inputs["attention_mask"], context)
        loss, figures = self._loss(hidden_states, blocks, teacher)
        if num_items_in_batch is None:
            total = self._weight_sum(inputs)
        else:
            # Gradients are averaged over ranks afterwards.
            total = num_items_in_batch / self.accelerator.num_processes
        self._count(figures, blocks)
        loss = loss / torch.as_tensor(total, device=loss.device).clamp(min=1e-8)
        return (loss, {"loss": loss}) if return_outputs else loss

    def prediction_step(
        self, model: Any, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[torch.Tensor, None, None]:
        """Loss of a held-out batch; figures are added up for `log`. Nothing else is kept."""
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad():
            return self.compute_loss(model, inputs).detach(), None, None

    def _states(self, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        if "context_hidden_states" in inputs:
            return inputs["context_hidden_states"], inputs["teacher_hidden_states"]
        layers = unwrap_drafter(self.model).config.target_layer_ids
        ids, mask = (inputs[key].to(self.target_model.device) for key in ("input_ids", "attention_mask"))
        return target_states(self.target_model, ids, mask, layers)

    def _draft(self, model: Any, blocks: Blocks, attention_mask: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        """Drafter hidden states of all blocks. [B, A, K] blocks, [B, S, L * H] context -> [B * A, K, H]"""
        config = unwrap_drafter(self.model).config
        device = blocks.input_ids.device
        embeds = self.target.embed(blocks.input_ids.flatten(1)).to(device)
        batch, length = attention_mask.shape
        rows = torch.arange(length, device=device).expand(batch, -1)
        kinds = dict(zip(config.layer_types, config.block_attention_per_layer, strict=True))
        masks = {
            kind: additive_mask(
                block_visibility(blocks.anchors, attention_mask, config, kind, causal=direction == "causal"),
                self._compute_dtype(),
            )
            for kind, direction in kinds.items()
        }
        output = model(
            noise_embeds=embeds,
            context_hidden_states=context.to(device),
            attention_mask=masks,
            position_ids=torch.cat([rows, blocks.positions.flatten(1)], dim=1),
        )
        return output.last_hidden_state.view(-1, config.block_size, config.hidden_size)

    def _compute_dtype(self) -> torch.dtype:
        names = {"bf16": torch.bfloat16, "fp16": torch.float16}
        return names.get(self.accelerator.mixed_precision, unwrap_drafter(self.model).dtype)

    def _loss(self, hidden_states: torch.Tensor, blocks: Blocks, teacher: torch.Tensor) -> tuple[torch.Tensor, dict]:
        drafter = unwrap_drafter(self.model)
        num_drafts = drafter.config.num_draft_tokens
        # Places without a block carry no weight; running the head on them would only cost time.
        keep = (blocks.anchors >= 0).flatten()
        batch = torch.arange(len(teacher), device=keep.device).repeat_interleave(blocks.anchors.shape[1])[keep]
        positions = blocks.teacher_positions.flatten(0, 1)[keep][:, -num_drafts:]
        weights = blocks.weights.flatten(0, 1)[keep][:, -num_drafts:]
        labels = blocks.labels.flatten(0, 1)[keep][:, -num_drafts:]
        vocabulary = None
        # Held-out figures are those of the whole vocabulary, as in decoding.
        if self.args.loss_vocab_size is not None and self.model.training:
            vocabulary = LossVocabulary.draw(labels, self.target.config.vocab_size, self.args.loss_vocab_size)
        token_ids = vocabulary.ids if vocabulary else None

        def teacher_logits(chunk: slice) -> torch.Tensor:
            rows = teacher[batch[chunk].to(teacher.device)[:, None], positions[chunk].to(teacher.device)]
            with torch.no_grad():
                return self.target.logits(rows, token_ids).to(positions.device)

        def head(rows: torch.Tensor) -> torch.Tensor:
            return self.target.logits(rows, token_ids).to(rows.device)

        targets = BlockTargets(
            labels=labels,
            weights=weights * self.recipe.slot_weights(num_drafts, weights.device),
            previous_ids=blocks.previous_ids.flatten(0, 1)[keep],
            teacher_logits=teacher_logits,
            vocabulary=vocabulary,
        )
        progress = self.state.global_step / max(self.state.max_steps, 1)
        # The prepared model casts inside its forward only; the refiner is run by the loss.
        with self.accelerator.autocast():
            return block_loss(
                hidden_states[keep], targets, head, drafter.refiner, self.recipe, progress, self.args.chunk_blocks
            )

    def _count(self, figures: dict[str, torch.Tensor], blocks: Blocks) -> None:
        prefix = "" if self.model.training else "eval_"
        figures = {**figures, "blocks": (blocks.weights.sum(dim=-1) > 0).sum()}
        for key, value in figures.items():
            self._sums[prefix + key] = self._sums.get(prefix + key, 0.0) + float(value)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Adds the mean acceptance length (bonus included) of the blocks behind these figures, bare and refined, where
        every slot is held against the text."""
        prefix = "eval_" if "eval_loss" in logs else ""
        if not prefix and "loss" not in logs:
            return super().log(logs, *args, **kwargs)
        blocks = self._sums.pop(f"{prefix}blocks", 0.0)
        for name in ("base", "refined"):
            accepted = self._sums.pop(f"{prefix}{name}_accepted", None)
            if blocks and accepted is not None:
                logs[f"{prefix}{name}_acceptance_length"] = round(1 + accepted / blocks, 4)
        super().log(logs, *args, **kwargs)

    def create_model_card(self, **kwargs: Any) -> None:
        """Writes the card of the drafter into `output_dir`; arguments as in `Trainer`."""
        if self.is_world_process_zero():
            write_training_card(self, **kwargs)
