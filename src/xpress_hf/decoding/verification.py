"""Acceptance rules for chains of drafted tokens; pure functions on tensors.

Symbols: B rows, D drafted tokens, V vocabulary. `lengths` [B] says how many of a row's D drafts count; the rest is
padding. Laws are probabilities, float32, after all logits processors: `target_laws` [B, D + 1, V], place k given the
drafts before it; `draft_laws` [B, D, V], the laws the drafts were really drawn from.
"""

from __future__ import annotations

import torch


def accepted_in_a_row(hits: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Leading hits among the first `lengths` places. bool [B, D], [B] -> [B]"""
    inside = torch.arange(hits.shape[1], device=hits.device) < lengths[:, None]
    return (hits & inside).long().cumprod(dim=1).sum(dim=1)


def match(draft_ids: torch.Tensor, target_ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Greedy rule, and the rule for point-mass drafts of a sampled target: drafts are kept while they are the target's
    own tokens. draft_ids [B, D], target_ids [B, D + 1] -> kept [B]; the next token is target_ids[kept]."""
    return accepted_in_a_row(draft_ids == target_ids[:, :-1], lengths)


def _at(laws: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Probability of a token per place. [B, D, V], [B, D] -> [B, D]"""
    return laws.gather(-1, ids[..., None])[..., 0]


def _draw(laws: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
    """One token per row of unnormalised laws. [B, V] -> [B]"""
    return torch.multinomial(laws, 1, generator=generator)[:, 0]


def _row(laws: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """laws [B, D, V] at one place per row [B] -> [B, V]"""
    return laws[torch.arange(len(laws), device=laws.device), places]


def _residual(target_law: torch.Tensor, draft_law: torch.Tensor, weight: torch.Tensor | float = 1.0) -> torch.Tensor:
    """max(c P - Q, 0); where rounding leaves nothing (P equals Q), P itself, which is then as right. [B, V]"""
    rest = (weight * target_law - draft_law).clamp(min=0)
    return torch.where(rest.sum(dim=-1, keepdim=True) > 0, rest, target_law)


def token_rejection(
    draft_ids: torch.Tensor,
    draft_laws: torch.Tensor,
    target_laws: torch.Tensor,
    lengths: torch.Tensor,
    generator: torch.Generator | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Speculative sampling, token by token (arXiv 2211.17192, algorithm 1).

    Keeps draft x_k with probability min(1, p_k / q_k); the first refused one is replaced by a draw from the normalised
    max(p - q, 0); after a whole chain the next token is drawn from p.

    Returns:
        num_accepted [B] and the token after the kept drafts [B].
    """
    uniform = torch.rand(draft_ids.shape, generator=generator, device=draft_ids.device)
    hits = uniform * _at(draft_laws, draft_ids) < _at(target_laws[:, :-1], draft_ids)
    kept = accepted_in_a_row(hits, lengths)
    target_law = _row(target_laws, kept)
    refused = _row(draft_laws, kept.clamp(max=draft_ids.shape[1] - 1))
    law = torch.where((kept < lengths)[:, None], _residual(target_law, refused), target_law)
    return kept, _draw(law, generator)


def block_weights(draft_ids: torch.Tensor, draft_laws: torch.Tensor, target_laws: torch.Tensor) -> torch.Tensor:
    """c_0 .. c_D of block verification: c_0 = 1, c_i = min(1, c_(i-1) P(x_i) / Q(x_i)). -> [B, D + 1]"""
    ratios = _at(target_laws[:, :-1], draft_ids) / _at(draft_laws, draft_ids)
    weights = [torch.ones_like(ratios[:, 0])]
    for place in range(ratios.shape[1]):
        weights.append((weights[-1] * ratios[:, place]).clamp(max=1.0))
    return torch.stack(weights, dim=1)


def block_acceptance(
    draft_ids: torch.Tensor, draft_laws: torch.Tensor, target_laws: torch.Tensor, lengths: torch.Tensor
) -> torch.Tensor:
    """Probability that block verification accepts length i, tested on its own, for i = 0 .. D (arXiv 2403.10444).

    i < length: m_i / (m_i + 1 - c_i) with m_i = sum of max(c_i P - Q, 0) after x_1 .. x_i, and 0 for 0 / 0;
    i = length: c_i; i > length: 0. -> [B, D + 1]
    """
    weights = block_weights(draft_ids, draft_laws, target_laws)
    mass = (weights[:, :-1, None] * target_laws[:, :-1] - draft_laws).clamp(min=0).sum(dim=-1)  # [B, D]
    # 1 - c_i first: a mass below the rounding of 1 would vanish beside it and leave x / 0.
    below = mass / (mass + (1 - weights[:, :-1]))
    below = torch.where(mass > 0, below, torch.zeros_like(below))
    places = torch.arange(weights.shape[1], device=weights.device)
    chances = torch.cat([below, weights[:, -1:]], dim=1)
    chances = torch.where(places == lengths[:, None], weights, chances)
    return torch.where(places <= lengths[:, None], chances, torch.zeros_like(chances))


def block_verification(
    draft_ids: torch.Tensor,
    draft_laws: torch.Tensor,
    target_laws: torch.Tensor,
    lengths: torch.Tensor,
    generator: torch.Generator | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Block verification (arXiv 2403.10444): accepts at least as much as `token_rejection` at the same law.

    Keeps the largest accepted length; the next token comes from the normalised max(c_i P - Q, 0) there, or from P
    after a whole chain. Arguments and results as `token_rejection`.
    """
    chances = block_acceptance(draft_ids, draft_laws, target_laws, lengths)
    accepted = torch.rand(chances.shape, generator=generator, device=chances.device) < chances
    places = torch.arange(chances.shape[1], device=chances.device)
    kept = torch.where(accepted, places, torch.zeros_like(places)).amax(dim=1)
    weights = block_weights(draft_ids, draft_laws, target_laws)
    target_law = _row(target_laws, kept)
    refused = _row(draft_laws, kept.clamp(max=draft_ids.shape[1] - 1))
    rest = _residual(target_law, refused, weights.gather(1, kept[:, None]))
    law = torch.where((kept < lengths)[:, None], rest, target_law)
    return kept, _draw(law, generator)
