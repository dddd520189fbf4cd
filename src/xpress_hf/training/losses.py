"""Losses of the recipes, one chunk of blocks at a time so that [rows, V] never exists for all anchors.

Symbols: N blocks, B slots, D predicted slots, H hidden, V vocabulary, r refiner rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from ..modeling.refiner import CausalRefiner
from .recipes import Recipe, dpace_weights

Terms = dict[str, torch.Tensor]


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

    labels, weights: [N, D]; a weight is 0 where a slot is not trained. valid: [N, D], slots that count for acceptance.
    previous_ids: [N, B]. teacher_logits: maps a slice of blocks to [n, D, V] logits of the target; `None` when the
    recipe does without. With a `vocabulary`, W takes the place of V in all logits; ids stay token ids.
    """

    labels: torch.Tensor
    weights: torch.Tensor
    valid: torch.Tensor
    previous_ids: torch.Tensor
    teacher_logits: Callable[[slice], torch.Tensor] | None = None
    vocabulary: LossVocabulary | None = None


# Softmaxes run over as many blocks at a time as one float32 buffer of this size holds, at least one: that takes little
# memory, and what the cache of a CPU still holds is read again at once.
BUFFER_BYTES = 2**24


def _slices(logits: torch.Tensor) -> Iterator[slice]:
    """Blocks of logits [n, D, V], some at a time."""
    step = max(BUFFER_BYTES // (4 * logits[0].numel()), 1) if len(logits) else 1
    for start in range(0, len(logits), step):
        yield slice(start, start + step)


def softmaxes(logits: torch.Tensor, correction: torch.Tensor | None) -> torch.Tensor:
    """Laws of logits [n, D, V] plus `correction` [V], in float32."""
    laws = torch.empty_like(logits, dtype=torch.float32)
    for part in _slices(logits):
        rows = logits[part].float()
        laws[part] = (rows if correction is None else rows + correction).softmax(dim=-1)
    return laws


class _SlotLoss(torch.autograd.Function):
    """S of one set of logits; its gradient in closed form is kept, in the dtype of the logits."""

    @staticmethod
    def forward(ctx, logits, labels, weights, teacher, recipe, correction):
        gradient = torch.empty_like(logits)
        loss = logits.new_zeros((), dtype=torch.float32)
        for part in _slices(logits):
            rows = logits[part] if correction is None else logits[part].float() + correction
            law = None if teacher is None else teacher[part]
            term, gradient[part] = _with_gradient(rows, labels[part], weights[part], law, recipe)
            loss += term
        ctx.save_for_backward(gradient)
        return loss

    @staticmethod
    def backward(ctx, grad_output):
        return ctx.saved_tensors[0] * grad_output, None, None, None, None, None


def _with_gradient(
    logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor, teacher: torch.Tensor | None, recipe: Recipe
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weighted sum of S and its derivative by the logits, float32 [n, D, V]; two float32 buffers are all it needs."""
    shape = labels.shape
    rows, columns = logits.flatten(0, 1), labels.reshape(-1, 1)
    probs = rows.log_softmax(dim=-1, dtype=torch.float32)
    nll = -probs.gather(1, columns).view(shape)
    if teacher is not None:
        teacher = teacher.flatten(0, 1)
    if recipe.position_weights == "dpace":
        weights = weights * dpace_weights(nll, weights > 0, recipe.dpace_alpha)
    loss = recipe.ce * (weights * nll).sum()
    if recipe.kl:
        # Term by term: entropy and cross entropy are large numbers next to their difference.
        divergence = torch.special.xlogy(teacher, teacher).addcmul_(teacher, probs, value=-1).sum(dim=-1)
        loss = loss + recipe.kl * (weights * divergence.view(shape)).sum()
    probs.exp_()
    # d CE / d z = p - onehot, d KL / d z = p - teacher, d L1 / d z = p * (s - <p, s>) with s = sign(p - teacher).
    scale = ((recipe.ce + recipe.kl) * weights).reshape(-1, 1)
    if recipe.uses_distance:
        signs = probs - teacher
        distance = torch.linalg.vector_norm(signs, ord=1, dim=-1).view(shape)
        lost, slope = _chain(distance, weights > 0)
        loss = loss + recipe.l1 * (weights * distance).sum() + recipe.chain * lost
        signs.sign_()
        slope = (recipe.l1 * weights + recipe.chain * slope).reshape(-1, 1)
        signs.sub_(_row_dot(probs, signs)[:, None]).mul_(slope).add_(scale)
        gradient = probs.mul_(signs)
    else:
        gradient = probs.mul_(scale)
    gradient.scatter_add_(1, columns, -recipe.ce * weights.reshape(-1, 1))
    if recipe.kl:
        gradient.addcmul_(teacher, recipe.kl * weights.reshape(-1, 1), value=-1)
    return loss, gradient.view(logits.shape)


def _row_dot(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Dot products of rows, without a third [rows, V]."""
    return torch.bmm(left[:, None], right[:, :, None])[:, 0, 0]


def _chain(distance: torch.Tensor, valid: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Drafts that blocks are expected to lose, sum over valid k of 1 - a_1 ... a_k with a = 1 - distance / 2, and the
    derivative by each distance. [n, D] -> scalar, [n, D]"""
    with torch.enable_grad():
        leaf = distance.detach().requires_grad_()
        kept = torch.where(valid, 1 - leaf / 2, 1.0).cumprod(dim=-1)
        lost = ((1 - kept) * valid).sum()
        (slope,) = torch.autograd.grad(lost, leaf)
    return lost.detach(), slope


def slot_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    weights: torch.Tensor,
    teacher: torch.Tensor | None,
    recipe: Recipe,
    correction: torch.Tensor | None = None,
) -> torch.Tensor:
    """Weighted sum over slots of S (`Recipe`), before division.

    logits [n, D, V], labels and weights [n, D], teacher probabilities [n, D, V] float32, correction of the logits [V]
    -> scalar, float32.
    """
    # Autocast would take products over V in half precision.
    with torch.autocast(logits.device.type, enabled=False):
        return _SlotLoss.apply(logits, labels, weights, teacher, recipe, correction)


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
    valid, num_drafts = targets.valid[blocks], labels.shape[1]
    correction = vocabulary.correction if vocabulary else None
    teacher = None
    if recipe.uses_teacher:
        teacher = targets.teacher_logits(blocks)
        if recipe.labels == "teacher":
            labels = teacher.argmax(dim=-1)
        teacher = softmaxes(teacher, correction) if recipe.uses_teacher_law else None
    columns = vocabulary.columns(labels) if vocabulary else labels

    def loss_of(logits: torch.Tensor) -> torch.Tensor:
        return slot_loss(logits, columns, weights, teacher, recipe, correction)

    def choice(logits: torch.Tensor) -> torch.Tensor:
        best = logits.detach().argmax(dim=-1)
        return vocabulary.ids[best] if vocabulary else best

    base_logits = head(hidden_states[:, -num_drafts:])
    loss = base_logits.new_zeros((), dtype=torch.float32)
    if base_weight:
        loss = loss + base_weight * loss_of(base_logits)
    draft_ids = choice(base_logits)
    figures = {"bare_accepted": accepted(draft_ids, targets.labels[blocks], valid)}
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
        del logits  # the next sweep needs the room
    figures["refined_accepted"] = accepted(draft_ids, targets.labels[blocks], valid)
    return loss, figures


def accepted(draft_ids: torch.Tensor, labels: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Number of leading slots of each block that match the text, summed. [n, D] -> scalar"""
    hits = (draft_ids == labels) & (valid > 0)
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
            found = part = None  # as large as the refiner, and the next chunk needs the room
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


def chunk_for_memory(limit: int, num_drafts: int, vocab_size: int, recipe: Recipe, logit_bytes: int = 4) -> int:
    """Blocks whose loss fits in `limit` bytes, at least 1 (docs/training.md has the arithmetic)."""
    return max(limit // (num_drafts * vocab_size * bytes_per_logit(recipe, logit_bytes)), 1)


def bytes_per_logit(recipe: Recipe, logit_bytes: int = 4) -> int:
    """Bytes that one logit of a chunk costs at the peak, which is the last term's.

    Float32: the teacher's law. In the dtype of the logits, `logit_bytes` wide: the logits and their gradient and, with
    refined terms, the base logits and a gradient for every earlier term.
    """
    terms = int(recipe.teacher_forced > 0) + (recipe.sweeps if recipe.free_running else 0)
    return 4 * int(recipe.uses_teacher_law) + logit_bytes * (2 + (1 + terms if terms else 0))


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
        scalar sum; the caller divides by the global sum of weights. Figures: `bare_accepted`, `refined_accepted`,
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
