"""Recipes: what a run minimises, as data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

POSITION_WEIGHTS = ("decay", "dpace")
LABELS = ("text", "teacher")


@dataclass(frozen=True)
class Recipe:
    """Loss of a run. Sums run over slots, weighted by slot, and are divided by the global sum of slot weights.

    One set of logits costs S = ce * CE + l1 * L1 + kl * KL (+ chain); a run minimises
    base * S(bare) + teacher_forced * S(refined by true tokens) + free_running * mean S(refined by own tokens).

    Args:
        ce: weight of the cross entropy against `labels`.
        l1: weight of sum_v |p_v - q_v| = 2 TV against the target's law (xPress).
        kl: weight of the forward divergence KL(target || draft) (JetSpec).
        chain: weight of sum_k (1 - a_1 ... a_k), a_k = 1 - TV_k: the drafts that a block is expected to lose. It is
            summed over the slots of a block without slot weights.
        labels: "text", the tokens of the data, or "teacher", the target's most likely token on that text (DBloom).
        gamma: decay of the slot weights exp(-(k - 1) / gamma), k = 1 for the first predicted slot; None = flat.
        gamma_growth: added to `gamma` after each epoch, so that weights flatten as the drafter learns (DFlare).
        position_weights: "decay", or "dpace": weights that follow the drafter's own confidence (`dpace_weights`), on
            top of `gamma`.
        dpace_alpha: smoothing of "dpace".
        old_drafts: predicted slots that the drafter had before its block was expanded; the later ones weigh
            `new_slot_weight` (DBloom).
        teacher_forced: weight of the refined logits given the true previous tokens.
        free_running: weight of the mean over `sweeps` rounds in which the refiner reads its own tokens.
        sweeps: number of free-running rounds.
        base: weight of the bare drafter's logits at the start of training and, linearly, at its end.
        fusion, block_attention: what the drafter's config must say, None = anything.
    """

    ce: float = 1.0
    l1: float = 0.0
    kl: float = 0.0
    chain: float = 0.0
    labels: str = "text"
    gamma: float | None = 4.0
    gamma_growth: float = 0.0
    position_weights: str = "decay"
    dpace_alpha: float = 0.5
    old_drafts: int | None = None
    new_slot_weight: float = 3.0
    teacher_forced: float = 0.0
    free_running: float = 0.0
    sweeps: int = 3
    base: tuple[float, float] = (1.0, 1.0)
    fusion: str | None = None
    block_attention: str | None = None

    def __post_init__(self):
        for name, allowed in (("position_weights", POSITION_WEIGHTS), ("labels", LABELS)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"`{name}` must be one of {list(allowed)}, got {getattr(self, name)!r}.")
        for name in ("ce", "l1", "kl", "chain", "teacher_forced", "free_running", "gamma_growth", "new_slot_weight"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"`{name}` must be >= 0, got {getattr(self, name)!r}.")
        if self.gamma is not None and not self.gamma > 0:
            raise ValueError(f"`gamma` must be > 0, or None for flat weights, got {self.gamma!r}.")
        if not 0 <= self.dpace_alpha <= 1:
            raise ValueError(f"`dpace_alpha` must lie in [0, 1], got {self.dpace_alpha!r}.")
        if len(self.base) != 2 or min(self.base) < 0:
            raise ValueError(f"`base` must be two weights >= 0 (start, end), got {self.base!r}.")
        if not (self.ce or self.l1 or self.kl or self.chain):
            raise ValueError("`ce`, `l1`, `kl` and `chain` are all 0: nothing would be learned.")

    @property
    def uses_refiner(self) -> bool:
        return self.teacher_forced > 0 or self.free_running > 0

    @property
    def uses_distance(self) -> bool:
        return self.l1 > 0 or self.chain > 0

    @property
    def uses_teacher_law(self) -> bool:
        return self.uses_distance or self.kl > 0

    @property
    def uses_teacher(self) -> bool:
        return self.uses_teacher_law or self.labels == "teacher"

    def base_weight(self, progress: float) -> float:
        """Weight of the base term after `progress` (0..1) of the run."""
        start, end = self.base
        return start + (end - start) * min(max(progress, 0.0), 1.0)

    def slot_weights(self, num_drafts: int, device: torch.device | None = None, epoch: int = 0) -> torch.Tensor:
        """[D] weights of the predicted slots, known before a batch is run; the first one is 1."""
        slots = torch.arange(num_drafts, dtype=torch.float32, device=device)
        if self.gamma is None:
            weights = torch.ones_like(slots)
        else:
            weights = torch.exp(-slots / (self.gamma + self.gamma_growth * epoch))
        if self.old_drafts is not None:
            weights[self.old_drafts :] *= self.new_slot_weight
        return weights


RECIPES = {
    "dflash": Recipe(),
    "xpress": Recipe(ce=0.1, l1=0.9, teacher_forced=1.0, free_running=0.3, base=(0.6, 0.2)),
    "dflare": Recipe(gamma=4.5, gamma_growth=1.0, fusion="layerwise"),
    "jetspec": Recipe(ce=0.0, kl=1.0, gamma=None, block_attention="causal"),
    "dbloom": Recipe(gamma=None, labels="teacher"),
}


def build_recipe(name: str, options: dict[str, Any] | None = None) -> Recipe:
    """The recipe of that name with some of its fields replaced.

    Raises:
        ValueError: no such recipe, no such field, or values that contradict each other.
    """
    if name not in RECIPES:
        raise ValueError(f"`recipe` must be one of {sorted(RECIPES)}, got {name!r}.")
    options = dict(options or {})
    if unknown := sorted(set(options) - set(Recipe.__dataclass_fields__)):
        raise ValueError(f"`recipe_options` has unknown keys {unknown}; known: {sorted(Recipe.__dataclass_fields__)}.")
    if "base" in options:
        options["base"] = tuple(options["base"])
    return replace(RECIPES[name], **options)


def dpace_weights(nll: torch.Tensor, valid: torch.Tensor, alpha: float) -> torch.Tensor:
    """Position weights of D-PACE (arXiv 2605.18810), detached.

    The drafter's probability q of each label is smoothed to (1 - alpha) q + alpha; slot j weighs the sum of the
    products of these up to slot k, over all valid k >= j: what the block still gains if slot j is right.

    Args:
        nll: [n, D] -log q. valid: [n, D]; slots that are not valid count 1 in products and add nothing.
    """
    smoothed = (1 - alpha) * torch.exp(-nll.detach()) + alpha
    prefix = torch.where(valid, smoothed, 1.0).cumprod(dim=-1) * valid
    return prefix.flip(-1).cumsum(dim=-1).flip(-1)
