"""`DrafterTrainer`: trains a drafter against a frozen target with the Hugging Face Trainer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedModel, Trainer
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils import logging

from ..decoding.target import Target, check_pair
from ..evaluation.replay import end_ids, replay
from ..hub import write_training_card
from ..modeling.backbone import additive_mask
from ..modeling.drafter import XPressDrafter, unwrap_drafter
from .arguments import DrafterTrainingArguments
from .blocks import Blocks, block_visibility, cut_blocks, draw_batch_anchors, seeded_generator
from .checks import FiniteGradients, check_dataset, check_recipe, check_resume
from .data import TextCollator
from .features import target_states
from .losses import BlockTargets, LossVocabulary, block_loss, chunk_for_memory
from .optimizer import MuonWithAdamW, scale_learning_rate
from .packing import packed_target_states
from .recipes import Recipe

__all__ = ["DrafterTrainer", "DrafterTrainingArguments"]

logger = logging.get_logger(__name__)

# Bare acceptance below this share of its first evaluation counts as erosion of the warm start.
EROSION = 0.97


class DrafterTrainer(Trainer):
    """Trains an [`XPressDrafter`] on answers of its target.

    The target stays outside the wrapped model: frozen, in eval mode, in its own dtype and on its own device. Its
    hidden states come from one forward per batch, or from the batch (`FeatureDataset`).

    The loss is the recipe's sum over slots, divided by the sum of slot weights over all accumulated batches and ranks.
    Anchors depend on the seed, the step and the text alone: neither on how texts are split into batches and ranks, nor
    on whether a run was interrupted.

    An evaluation logs, beside the loss, `*_block_acceptance_length` at random anchors (training logs it too) and
    `*_acceptance_length` of `args.replay_texts` texts, drafted through cycle by cycle by the code of generate(); both
    for the bare and, with a recipe that trains one, the refined drafter, the bonus token included.

    Args:
        model: the drafter, which may be wrapped by PEFT.
        args: `DrafterTrainingArguments`.
        target: the frozen causal LM.
        recipe: overrides the recipe that `args.recipe` names.

    Raises:
        ValueError: drafter, target, recipe and data do not fit each other; names the field.
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
        self.recipe = recipe or args.build_recipe()
        check_recipe(self.recipe, drafter, args)
        for dataset in (kwargs.get("train_dataset"), kwargs.get("eval_dataset")):
            check_dataset(dataset, drafter, target)
        if args.freeze_backbone:
            drafter.fusion.requires_grad_(False)
            drafter.backbone.requires_grad_(False)
        kwargs.setdefault("data_collator", TextCollator())
        super().__init__(model=model, args=args, **kwargs)
        self.add_callback(FiniteGradients())
        self.model_accepts_loss_kwargs = True
        self.target_model = target.requires_grad_(False).eval()
        self.target = Target.for_drafter(target, drafter.config)
        if args.loss_vocab_size is not None and not self.target.has_linear_head:
            raise ValueError(
                "`loss_vocab_size` reads rows of the target's head, which this target's head does not allow."
            )
        self._sums: dict[str, float] = {}
        self._first_bare: float | None = None

    @property
    def drafter(self) -> XPressDrafter:
        """The drafter inside whatever wraps the model."""
        return unwrap_drafter(self.accelerator.unwrap_model(self.model))

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> Any:
        """As in `Trainer`.

        Raises:
            ValueError: the checkpoint to go on from was trained with another mask id, other taps or another block.
        """
        folder = resume_from_checkpoint
        if folder is True:
            folder = get_last_checkpoint(self.args.output_dir)
        if folder:
            check_resume(folder, self.drafter.config)
        return super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        if self.optimizer is not None:
            return self.optimizer
        if self.args.matrix_optimizer == "muon":
            named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
            self.optimizer = MuonWithAdamW(
                named, self.args.matrix_learning_rate, self.args.learning_rate, self.args.weight_decay
            )
        else:
            super().create_optimizer()
        if self.drafter.refiner is not None and self.args.backbone_lr_scale != 1.0:
            scale_learning_rate(self.optimizer, self.drafter.refiner.parameters(), self.args.backbone_lr_scale)
        return self.optimizer

    def _with_anchors(self, inputs: dict[str, torch.Tensor], step: int) -> dict[str, torch.Tensor]:
        if "anchors" in inputs:
            return inputs
        anchors = draw_batch_anchors(inputs, self.args.num_anchors, (self.args.seed, step))
        return {**inputs, "anchors": anchors}

    def _blocks(self, inputs: dict[str, torch.Tensor]) -> Blocks:
        ids, loss_mask, documents = inputs["input_ids"], inputs["loss_mask"], inputs.get("document_ids")
        return cut_blocks(ids, loss_mask, inputs["anchors"], self.drafter.config, documents)

    def _slot_weights(self, blocks: Blocks) -> torch.Tensor:
        """[B, A, D]: validity times the recipe's weights."""
        valid = blocks.weights[..., -self.drafter.config.num_draft_tokens :]
        epoch = int(self.state.epoch or 0)
        return valid * self.recipe.slot_weights(valid.shape[-1], valid.device, epoch)

    def get_batch_samples(
        self, epoch_iterator: Iterator, num_batches: int, device: torch.device
    ) -> tuple[list, torch.Tensor | None]:
        """As in `Trainer`; the count that losses are divided by is the sum of slot weights over batches and ranks."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        if not batches:
            return batches, None
        batches = [self._with_anchors(batch, self.state.global_step) for batch in batches]
        total = sum(self._slot_weights(self._blocks(batch)).sum() for batch in batches).to(device)
        return batches, self.accelerator.gather(total).sum()

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, torch.Tensor],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> Any:
        """Loss of one batch, already divided; gradients of all batches of a step add up to that of the global mean.

        Raises:
            FloatingPointError: the loss is not finite; names the step. Parameters are as they were.
        """
        inputs = self._with_anchors(inputs, self.state.global_step if self.model.training else -1)
        blocks = self._blocks(inputs)
        weights = self._slot_weights(blocks)
        loss, figures = self._run(model, inputs, blocks, weights)
        if num_items_in_batch is None:
            total = weights.sum()
        else:
            # Gradients are averaged over ranks afterwards.
            total = num_items_in_batch / self.accelerator.num_processes
        self._count(figures, blocks)
        loss = loss / torch.as_tensor(total, device=loss.device).clamp(min=1e-8)
        if not torch.isfinite(loss):
            raise FloatingPointError(
                f"Step {self.state.global_step}: the loss is {loss.item()}. Look for values that are not finite in "
                "the target's hidden states, or lower the learning rate; nothing was updated."
            )
        return (loss, {"loss": loss}) if return_outputs else loss

    def prediction_step(
        self, model: Any, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[torch.Tensor, None, None]:
        """Loss of a held-out batch; figures are added up for the metrics. Nothing else is kept."""
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad():
            return self.compute_loss(model, inputs).detach(), None, None

    def _states(self, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        if "context_hidden_states" in inputs:
            return inputs["context_hidden_states"], inputs["teacher_hidden_states"]
        device = self.target_model.device
        ids, mask = (inputs[key].to(device) for key in ("input_ids", "attention_mask"))
        layers = self.drafter.config.target_layer_ids
        if "document_ids" in inputs:
            return packed_target_states(self.target_model, ids, inputs["document_ids"].to(device), layers)
        return target_states(self.target_model, ids, mask, layers)

    def _run(
        self, model: Any, inputs: dict[str, torch.Tensor], blocks: Blocks, weights: torch.Tensor
    ) -> tuple[torch.Tensor, dict]:
        """Loss sum over the blocks and figures. The loss runs inside the model's forward, so that whatever wraps the
        model (mixed precision, sharding) sees the refiner too."""
        config, device = self.drafter.config, blocks.input_ids.device
        context, teacher = self._states(inputs)
        embeds = self.target.embed(blocks.input_ids.flatten(1)).to(device)
        kinds = dict(zip(config.layer_types, config.block_attention_per_layer, strict=True))
        mask, documents = inputs["attention_mask"], inputs.get("document_ids")
        masks = {}
        for kind, direction in kinds.items():
            visible = block_visibility(blocks.anchors, mask, config, kind, direction == "causal", documents)
            masks[kind] = additive_mask(visible, self._compute_dtype())
        return model(
            noise_embeds=embeds,
            context_hidden_states=context.to(device),
            attention_mask=masks,
            position_ids=torch.cat([blocks.context_positions, blocks.positions.flatten(1)], dim=1),
            objective=lambda hidden_states: self._loss(hidden_states, blocks, weights, teacher),
        )

    def _compute_dtype(self) -> torch.dtype:
        names = {"bf16": torch.bfloat16, "fp16": torch.float16}
        return names.get(self.accelerator.mixed_precision, self.drafter.dtype)

    def _logit_bytes(self) -> int:
        """Width of a logit: the wider of what the head and what the refiner give."""
        if self.args.loss_vocab_size is not None:  # its correction is float32
            return 4
        return max(self.target.head_dtype.itemsize, self._compute_dtype().itemsize)

    def _loss(
        self, hidden_states: torch.Tensor, blocks: Blocks, weights: torch.Tensor, teacher: torch.Tensor
    ) -> tuple[torch.Tensor, dict]:
        """Drafter hidden states [B, A * K, H] -> loss sum and figures."""
        drafter, args = self.drafter, self.args
        num_drafts = drafter.config.num_draft_tokens
        # Places without a block carry no weight; running the head on them would only cost time.
        keep = (blocks.anchors >= 0).flatten()
        rows = hidden_states.view(-1, drafter.config.block_size, hidden_states.shape[-1])[keep]
        batch = torch.arange(len(teacher), device=keep.device).repeat_interleave(blocks.anchors.shape[1])[keep]
        positions, labels, valid = (
            values.flatten(0, 1)[keep][:, -num_drafts:]
            for values in (blocks.teacher_positions, blocks.labels, blocks.weights)
        )
        vocabulary = None
        # Held-out figures are those of the whole vocabulary, as in decoding.
        if args.loss_vocab_size is not None and self.model.training:
            generator = seeded_generator((args.seed, self.state.global_step), labels)
            vocabulary = LossVocabulary.draw(labels, self.target.config.vocab_size, args.loss_vocab_size, generator)
        token_ids = vocabulary.ids if vocabulary else None

        def teacher_logits(chunk: slice) -> torch.Tensor:
            states = teacher[batch[chunk].to(teacher.device)[:, None], positions[chunk].to(teacher.device)]
            with torch.no_grad():
                return self.target.logits(states, token_ids).to(positions.device)

        def head(states: torch.Tensor) -> torch.Tensor:
            return self.target.logits(states, token_ids).to(states.device)

        targets = BlockTargets(
            labels=labels,
            weights=weights.flatten(0, 1)[keep],
            valid=valid,
            previous_ids=blocks.previous_ids.flatten(0, 1)[keep],
            teacher_logits=teacher_logits,
            vocabulary=vocabulary,
        )
        progress = self.state.global_step / max(self.state.max_steps, 1)
        width = self.target.config.vocab_size if vocabulary is None else len(vocabulary.ids)
        chunk = args.chunk_blocks or chunk_for_memory(
            args.loss_memory_mb * 2**20, num_drafts, width, self.recipe, self._logit_bytes()
        )
        return block_loss(rows, targets, head, drafter.refiner, self.recipe, progress, chunk)

    def _count(self, figures: dict[str, torch.Tensor], blocks: Blocks) -> None:
        prefix = "" if self.model.training else "eval_"
        figures = {**figures, "blocks": (blocks.weights.sum(dim=-1) > 0).sum()}
        for key, value in figures.items():
            self._sums[prefix + key] = self._sums.get(prefix + key, 0.0) + float(value)

    def _block_acceptance(self, prefix: str) -> dict[str, float]:
        """Mean acceptance length of the blocks counted since the last call, and forgets them."""
        found = {}
        blocks = self._sums.pop(f"{prefix}blocks", 0.0)
        for name in ("bare", "refined"):
            kept = self._sums.pop(f"{prefix}{name}_accepted", None)
            if blocks and kept is not None:
                found[f"{name}_block_acceptance_length"] = round(1 + kept / blocks, 4)
        return found

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Adds the acceptance of the training blocks behind these figures."""
        if "loss" in logs:
            logs.update(self._block_acceptance(""))
        super().log(logs, *args, **kwargs)

    def evaluation_loop(
        self, dataloader: Any, description: str, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any
    ) -> Any:
        self._block_acceptance("eval_")
        output = super().evaluation_loop(dataloader, description, *args, metric_key_prefix=metric_key_prefix, **kwargs)
        figures = {**self._block_acceptance("eval_"), **self._replay(dataloader.dataset)}
        output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in figures.items()})
        self._warn(figures)
        return output

    @torch.no_grad()
    def _replay(self, dataset: Any) -> dict[str, float]:
        """Acceptance lengths of the first texts of a data set, pooled over cycles."""
        drafter = self.drafter
        count = min(self.args.replay_texts, len(dataset)) if hasattr(dataset, "__len__") else 0
        kept, ends = drafter.speculation.sweeps, end_ids(self.target_model)
        records: dict[str, list] = {"bare": [], "refined": []}
        for index in range(count):
            batch = self._prepare_inputs(TextCollator()([dataset[index]]))
            answer = batch["loss_mask"][0].nonzero()
            if "document_ids" in batch or not len(answer):
                continue
            context = self._states(batch)[0][0]
            for name, sweeps in (("bare", 0), ("refined", kept)):
                if name == "bare" or self.recipe.uses_refiner:
                    drafter.speculation.sweeps = sweeps
                    with self.accelerator.autocast():
                        record = replay(self.target, drafter, batch["input_ids"][0], int(answer[0]), context, ends)
                    records[name].append(record)
            drafter.speculation.sweeps = kept
        pooled = {name: sum(some[1:], start=some[0]) for name, some in records.items() if some}
        return {f"{name}_acceptance_length": record.acceptance_length for name, record in pooled.items()}

    def _warn(self, figures: dict[str, float]) -> None:
        bare, refined = (figures.get(f"{name}_block_acceptance_length") for name in ("bare", "refined"))
        if bare is None:
            return
        self._first_bare = self._first_bare or bare
        if bare < EROSION * self._first_bare:
            logger.warning(
                f"Step {self.state.global_step}: the bare drafter's acceptance fell from {self._first_bare:.3f} to "
                f"{bare:.3f}: training erodes the warm start. Lower the learning rate, raise `base` in "
                "`recipe_options`, or set `freeze_backbone`."
            )
        if refined is not None and refined <= bare and self.state.global_step >= self.state.max_steps > 0:
            logger.warning(
                f"The refiner does not pay: {refined:.3f} tokens per block with it, {bare:.3f} without. Train longer, "
                "or run this drafter with `speculation.sweeps = 0`."
            )

    def create_model_card(self, **kwargs: Any) -> None:
        """Writes the card of the drafter into `output_dir`; arguments as in `Trainer`."""
        if self.is_world_process_zero():
            write_training_card(self, **kwargs)
