"""Causal refiner (xPress, arXiv 2608.02438): a logit bias per slot that depends on the tokens in earlier slots.

Symbols: N blocks, B block slots, H drafter hidden, V vocabulary, r rank, C candidates per slot.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from ..configuration import XPressConfig


@dataclass
class RefinerState:
    """What stays the same over the sweeps of a block.

    `hidden_part` [N, B, r]: product of the hidden cache with the first 2r columns of `in_proj`.
    `mixer` [r, B, B]: the folded mixer, lower triangle plus identity.
    """

    hidden_part: torch.Tensor
    mixer: torch.Tensor


class CausalRefiner(nn.Module):
    """Adds `readout(y)` to the drafter's base logits; slot k reads tokens of slots < k only.

    The mixer is stored raw (`mixer` [r, B, B], channel x target slot x source slot; entries above the diagonal have no
    effect) and folded once per block.
    """

    def __init__(self, config: XPressConfig):
        super().__init__()
        rank, width = config.refiner["rank"], config.refiner["mlp_width"]
        self.token_embed = nn.Embedding(config.vocab_size, rank)
        self.down_h = nn.Linear(config.hidden_size, rank, bias=False)
        self.down_g = nn.Linear(config.hidden_size, rank, bias=False)
        self.in_proj = nn.Linear(3 * rank, rank, bias=False)
        self.mixer = nn.Parameter(torch.zeros(rank, config.block_size, config.block_size))
        self.gate_proj = nn.Linear(rank, width, bias=False)
        self.up_proj = nn.Linear(rank, width, bias=False)
        self.down_proj = nn.Linear(width, rank, bias=False)
        self.readout = nn.Linear(rank, config.vocab_size, bias=False)

    def hidden_cache(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[N, B, H] -> [N, B, 2r]: own hidden and block mean (anchor slot included), projected (facts 1.2, step 3)."""
        block_mean = self.down_g(hidden_states.mean(dim=1, keepdim=True))
        return torch.cat([self.down_h(hidden_states), block_mean.expand(-1, hidden_states.shape[1], -1)], dim=-1)

    def fold_mixer(self) -> torch.Tensor:
        """raw [r, B, B] -> lower triangle (diagonal included) plus identity, so that one product mixes and adds."""
        identity = torch.eye(self.mixer.shape[-1], dtype=self.mixer.dtype, device=self.mixer.device)
        return self.mixer.tril() + identity

    def begin(self, hidden_states: torch.Tensor) -> RefinerState:
        """Post-norm drafter hidden states [N, B, H] of whole blocks -> state shared by all sweeps.

        Raises:
            ValueError: the block does not have the size the mixer was trained for.
        """
        if hidden_states.shape[1] != self.mixer.shape[-1]:
            raise ValueError(
                f"`hidden_states` must hold blocks of {self.mixer.shape[-1]} slots, got {hidden_states.shape[1]}."
            )
        for name in ("token_embed", "in_proj", "readout"):
            if type(getattr(self, name)) not in (nn.Embedding, nn.Linear):
                raise ValueError(
                    f"`refiner.{name}` is wrapped ({type(getattr(self, name)).__name__}), but its weight is read in "
                    "parts, so the wrapper would have no effect; exclude it from adapters and quantisation."
                )
        rank = self.in_proj.out_features
        cache = self.hidden_cache(hidden_states)
        return RefinerState(F.linear(cache, self.in_proj.weight[:, : 2 * rank]), self.fold_mixer())

    def latent(self, state: RefinerState, previous_ids: torch.Tensor) -> torch.Tensor:
        """One sweep's latent y [N, B, r] from the token before each slot, `previous_ids` [N, B] (steps 4-6)."""
        rank = self.in_proj.out_features
        tokens = F.linear(self.token_embed(previous_ids), self.in_proj.weight[:, 2 * rank :])
        fused = state.hidden_part + tokens  # [N, B, r]
        mixed = torch.einsum("ckj,njc->nkc", state.mixer.to(fused.dtype), fused)
        return mixed + self.down_proj(F.silu(self.gate_proj(mixed)) * self.up_proj(mixed))

    def bias(self, state: RefinerState, previous_ids: torch.Tensor) -> torch.Tensor:
        """Logit bias of every slot. [N, B] -> [N, B, V]"""
        return self.read(self.latent(state, previous_ids))

    def read(self, latent: torch.Tensor, token_ids: torch.Tensor | None = None) -> torch.Tensor:
        """Logit bias of every token, or of `token_ids` [W] only. [N, D, r] -> [N, D, V or W]"""
        weight = self.readout.weight if token_ids is None else self.readout.weight[token_ids]
        # A 3-D slice leaves the fast bf16 path of CPU kernels by two orders of magnitude; 2-D rows do not.
        return F.linear(latent.flatten(0, 1).contiguous(), weight).unflatten(0, latent.shape[:2])


# (logits [N, D, W], drafted ids of the previous sweep [N, D] or None in the seed) -> column chosen per slot [N, D]
Chooser = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]


def greedy_choice(logits: torch.Tensor, draft_ids: torch.Tensor | None) -> torch.Tensor:
    """Largest logit per slot; ties go to the lowest index."""
    return logits.argmax(dim=-1)


def refine_block(
    refiner: CausalRefiner,
    hidden_states: torch.Tensor,
    base_logits: torch.Tensor,
    first_ids: torch.Tensor,
    num_sweeps: int,
    choose: Chooser = greedy_choice,
    top_candidates: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Jacobi decoding of blocks: all slots at once, old values only (facts 3.1).

    Args:
        hidden_states: [N, B, H] drafter output of the whole block, after its final norm.
        base_logits: [N, D, V] base logits of the drafted slots, float32; D = B - 1 (fill) or B (shift).
        first_ids: [N, 1 + B - D] the known tokens before the first drafted slot: in the fill layout the token before
            the anchor and the anchor, in the shift layout the anchor alone.
        num_sweeps: 0 = the bare drafter; D = the sequential decode.
        choose: picks a column per slot from logits; fixed noise for sampling lives in there.
        top_candidates: C, restrict every slot to its C best base logits; C = V equals the exact readout.

    Returns:
        drafted ids [N, D] and the logits they were chosen from [N, D, V]; with candidates, logits outside them are
        -inf.
    """
    num_drafts = base_logits.shape[1]
    candidates = None
    if top_candidates is not None and top_candidates < base_logits.shape[-1]:
        # Ascending ids keep the rule that ties go to the lowest id.
        candidates = base_logits.topk(top_candidates, dim=-1).indices.sort(dim=-1).values  # [N, D, C]
        weights = refiner.readout.weight[candidates]  # [N, D, C, r]
    state = refiner.begin(hidden_states)
    logits, draft_ids = base_logits, choose(base_logits, None)
    for _ in range(num_sweeps):
        previous_ids = torch.cat([first_ids, draft_ids[:, :-1]], dim=1)  # [N, B]
        if candidates is None:
            latent = refiner.latent(state, previous_ids)[:, -num_drafts:]
            logits = base_logits + refiner.read(latent)
        else:
            latent = refiner.latent(state, previous_ids)[:, -num_drafts:]
            bias = torch.einsum("ndcr,ndr->ndc", weights, latent).to(base_logits.dtype)
            logits = torch.full_like(base_logits, -torch.inf)
            logits.scatter_(-1, candidates, base_logits.gather(-1, candidates) + bias)
        refined_ids = choose(logits, draft_ids)
        # A block that repeats is a fixed point: further sweeps change neither ids nor logits. On an accelerator the
        # comparison would wait for the device and cost more than a sweep.
        settled = refined_ids.device.type == "cpu" and torch.equal(refined_ids, draft_ids)
        draft_ids = refined_ids
        if settled:
            break
    return draft_ids, logits
