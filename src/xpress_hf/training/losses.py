"""Losses of the recipes, one chunk of blocks at a time so that [rows, V] never exists for all anchors.

Symbols: N blocks, B slots, D predicted slots, H hidden, V vocabulary, r refiner rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from ..modeling.refiner import CausalRefiner

Terms = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Recipe:
    """What is minimised. All sums are weighted by slot and divided by the global sum of slot weights.

    Args:
        ce: weight of the cross entropy against the text's own tokens.
        l1: weight of sum_v |p_v - q_v| = 2 TV against the target's law (facts/xpress 4.1).
        gamma: decay of the slot weights exp(-(k - 1) / gamma), k = 1 for the first predicted slot; None = flat.
        teacher_forced: weight of the refined logits given the true previous tokens.
        free_running: weight of the mean over `sweeps` rounds in which the refiner reads its own tokens.
        sweeps: number of free-running rounds.
        base: weight of the bare drafter's logits at the start of training and, linearly, at its end.
    """

    ce: float = 1.0
    l1: float = 0.0
    gamma: float | None = 4.0
    teacher_forced: float = 0.0
    free_running: float = 0.0
    sweeps: int = 3
    base: tuple[float, float] = (1.0, 1.0)

    @property
    def uses_refiner(self) -> bool:
        return self.teacher_forced > 0 or self.free_running > 0

    def base_weight(self, progress: float) -> float:
        """Weight of the base term after `progress` (0..1) of the run."""
        start, end = self.base
        return start + (end - start) * min(max(progress, 0.0), 1.0)

    def slot_weights(self, num_drafts: int, device: torch.device | None = None) -> torch.Tensor:
        """[D] weights of the predicted slots, first one 1."""
        slots = torch.arange(num_drafts, dtype=torch.float32, device=device)
        return torch.ones_like(slots) if self.gamma is None else torch.exp(-slots / self.gamma)


RECIPES = {
    "dflash": Recipe(),
    "xpress": Recipe(ce=0.1, l1=0.9, teacher_forced=1.0, free_running=0.3, sweeps=3, base=(0.6, 0.2)),
}


@dataclass(frozen=True)
class LossVocabulary:
    """The W columns of the vocabulary over which softmaxes of the loss run (sampled softmax, arXiv 1412.2007).

    ids: [W] sorted token ids. correction: [W] added to logits before a softmax: 0 for ids that are always taken,
    log(rest / sampled) for uniformly sampled ones, so that the partition function keeps its expectation.
    """

    ids: torch.Tensor
    correction: torch.Tensor

    @classmethod
    def draw(
        cls, labels: torch.Tensor, vocab_size: int, size: int, generator: torch.Generator | None = None
    ) -> LossVocabulary:
        """Takes all `labels`, the `2 * size / 3` lowest ids, and a uniform sample of the rest, W = `size` ids in
        all (more
        only if the labels need it). Merge-based tokenizers number their tokens roughly by frequency."""
        taken = torch.zeros(vocab_size, dtype=torch.bool)
        taken[: 2 * size // 3] = True
        taken[labels.flatten().cpu()] = True
        rest = (~taken).nonzero().flatten()
        count = max(min(size - int(taken.sum()), len(rest)), 0)
        sampled = rest[torch.randperm(len(rest), generator=generator)[:count]]
        correction = torch.zeros(vocab_size)
        if count:
            correction[sampled] = math.log(len(rest) / count)
        taken[sampled] = True
        ids = taken.nonzero().flatten()
        return cls(ids.to(labels.device), correction[ids].to(labels.device))

    def columns(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Columns of tokens that are in `ids`, any shape."""
        return torch.searchsorted(self.ids, token_ids.contiguous())


@dataclass
class BlockTargets:
    """Labels and weights of the predicted slots of N blocks, and what the teacher says about them.

    labels, weights: [N, D]. previous_ids: [N, B]. teacher_logits: maps a slice of blocks to [n, D, V] logits of the
    target, float32 softmax is taken inside; `None` when the recipe does without. With a `vocabulary`, W takes the
    place of V in all logits; ids stay token ids.
    """

    labels: torch.Tensor
    weights: torch.Tensor
    previous_ids: torch.Tensor
    teacher_logits: Callable[[slice], torch.Tensor] | None = None
    vocabulary: LossVocabulary | None = None


def slot_loss(
    logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor, teacher: torch.Tensor | None, recipe: Recipe
) -> torch.Tensor:
    """Weighted sum of ce * CE + l1 * L1 over slots (the style loss S of facts/xpress 4.1, before division).

    logits [n, D, V], labels and weights [n, D], teacher probabilities [n, D, V] -> scalar, float32.
    """
    rows = logits.flatten(0, 1).float()
    log_probs = rows.log_softmax(dim=-1)
    loss = rows.new_zeros(())
    if recipe.ce:
        nll = F.nll_loss(log_probs, labels.flatten(), reduction="none")
        loss = loss + recipe.ce * (weights.flatten() * nll).sum()
    if recipe.l1:
        distance = (log_probs.exp() - teacher.flatten(0, 1)).abs().sum(dim=-1)
        loss = loss + recipe.l1 * (weights.flatten() * distance).sum()
    return loss


def chunk_loss(
    hidden_states: torch.Tensor,
    targets: BlockTargets,
    blocks: slice,
    head: Callable[[torch.Tensor], torch.Tensor],
    refiner: CausalRefiner | None,
    recipe: Recipe,
    base_weight: float,
) -> tuple[torch.Tensor, Terms]:
    """Loss sum of a few blocks [n, B, H] and detached figures for logging (facts/xpress 4.3)."""
    labels, weights, vocabulary = targets.labels[blocks], targets.weights[blocks], targets.vocabulary
    num_drafts = labels.shape[1]
    correction = vocabulary.correction if vocabulary else 0.0
    columns = vocabulary.columns(labels) if vocabulary else labels
    teacher = None
    if recipe.l1:
        teacher = (targets.teacher_logits(blocks).float() + correction).softmax(dim=-1)

    def loss_of(logits: torch.Tensor) -> torch.Tensor:
        return slot_loss(logits + correction if vocabulary else logits, columns, weights, teacher, recipe)

    def choice(logits: torch.Tensor) -> torch.Tensor:
        best = logits.detach().argmax(dim=-1)
        return vocabulary.ids[best] if vocabulary else best

    base_logits = head(hidden_states[:, -num_drafts:])
    loss = base_logits.new_zeros((), dtype=torch.float32)
    if base_weight:
        loss = loss + base_weight * loss_of(base_logits)
    draft_ids = choice(base_logits)
    figures = {"base_accepted": accepted(draft_ids, labels, weights)}
    if not recipe.uses_refiner:
        return loss, figures
    state = refiner.begin(hidden_states)

    def refined(previous_ids: torch.Tensor) -> torch.Tensor:
        latent = refiner.latent(state, previous_ids)[:, -num_drafts:]
        return base_logits + refiner.read(latent, vocabulary.ids if vocabulary else None)

    truth = targets.previous_ids[blocks]
    known = truth[:, : truth.shape[1] - num_drafts + 1]  # tokens before the first predicted slot
    if recipe.teacher_forced:
        loss = loss + recipe.teacher_forced * loss_of(refined(truth))
    for _ in range(recipe.sweeps if recipe.free_running else 0):
        logits = refined(torch.cat([known, draft_ids[:, :-1]], dim=1))
        loss = loss + recipe.free_running / recipe.sweeps * loss_of(logits)
        draft_ids = choice(logits)
    figures["refined_accepted"] = accepted(draft_ids, labels, weights)
    return loss, figures


def accepted(draft_ids: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Number of leading slots of each block that match the text, summed. [n, D] -> scalar"""
    hits = (draft_ids == labels) & (weights > 0)
    return hits.long().cumprod(dim=1).sum()


class _ChunkedLoss(torch.autograd.Function):
    """Runs the loss chunk by chunk and keeps only gradients, so that logits live for one chunk at a time.

    Forward and backward of a chunk follow each other at once; nothing is computed twice.
    """

    @staticmethod
    def forward(ctx, run, num_blocks, chunk, hidden_states, *parameters):
        detached = hidden_states.detach()
        grads = [torch.zeros_like(detached)] + [torch.zeros_like(p, dtype=torch.float32) for p in parameters]
        total = detached.new_zeros((), dtype=torch.float32)
        figures: Terms = {}
        for start in range(0, num_blocks, chunk):
            blocks = slice(start, min(start + chunk, num_blocks))
            with torch.enable_grad():
                rows = detached[blocks].requires_grad_()
                loss, terms = run(rows, blocks)
                found = torch.autograd.grad(loss, [rows, *parameters], allow_unused=True)
            total += loss.detach()
            grads[0][blocks] = found[0]
            for grad, part in zip(grads[1:], found[1:], strict=True):
                if part is not None:
                    grad += part
            for key, value in terms.items():
                figures[key] = figures.get(key, 0) + value
        ctx.save_for_backward(*[g.to(p.dtype) for g, p in zip(grads, (hidden_states, *parameters), strict=True)])
        run.figures = figures
        return total

    @staticmethod
    def backward(ctx, grad_output):
        return (None, None, None, *[grad_output * grad for grad in ctx.saved_tensors])


class _ChunkRunner:
    """Callable over (rows, slice of blocks); collects figures of the last pass."""

    def __init__(self, **arguments):
        self.arguments = arguments
        self.figures: Terms = {}

    def __call__(self, rows: torch.Tensor, blocks: slice) -> tuple[torch.Tensor, Terms]:
        return chunk_loss(rows, blocks=blocks, **self.arguments)


def block_loss(
    hidden_states: torch.Tensor,
    targets: BlockTargets,
    head: Callable[[torch.Tensor], torch.Tensor],
    refiner: CausalRefiner | None,
    recipe: Recipe,
    progress: float = 0.0,
    chunk_blocks: int = 64,
) -> tuple[torch.Tensor, Terms]:
    """Weighted loss sum of N blocks.

    Args:
        hidden_states: [N, B, H] drafter output.
        targets: labels, weights and teacher of the predicted slots.
        head: frozen output head, hidden states [n, D, H] -> logits [n, D, V].
        refiner: needed by recipes that train it.
        progress: share of the run that is done, for the annealed base term.
        chunk_blocks: blocks whose logits exist at one time.

    Returns:
        scalar sum; the caller divides by the global sum of weights. Figures: `base_accepted`, `refined_accepted`,
        summed over blocks, bonus not counted.
    """
    if recipe.uses_refiner and refiner is None:
        raise ValueError("The recipe trains a refiner, but the drafter has none: set `refiner` in its config.")
    run = _ChunkRunner(
        targets=targets, head=head, refiner=refiner, recipe=recipe, base_weight=recipe.base_weight(progress)
    )
    parameters: list[nn.Parameter] = []
    if recipe.uses_refiner:
        parameters = [p for p in refiner.parameters() if p.requires_grad]
    loss = _ChunkedLoss.apply(run, hidden_states.shape[0], chunk_blocks, hidden_states, *parameters)
    return loss, run.figures
