"""Whether a text equals the one of plain decoding and, where it does not, whether rounding alone explains it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

# Half precision keeps 8 significant bits, so a few roundings move a logit by 2^-7 of the largest one; doubled.
HALF_PRECISION_TIE = 2**-6
# Float32 sums of different order differ far less.
FLOAT32_TIE = 1e-4


@dataclass(frozen=True)
class Difference:
    """First place where two texts differ.

    position: index of the first differing id, prompt included.
    relative_gap: |logit(expected) - logit(found)| / max |logit| of the judge at that place.
    """

    position: int
    relative_gap: float


@torch.no_grad()
def first_difference(
    judge: PreTrainedModel, prompt_length: int, expected_ids: torch.Tensor, found_ids: torch.Tensor
) -> Difference | None:
    """Compares two continuations of one prompt; the judge computes the logits after their common prefix.

    Args:
        judge: the target, in float32 where it fits into memory.
        prompt_length: number of leading ids that are equal by construction.
        expected_ids, found_ids: [S], [S'] ids, prompt included. A text that ends earlier than the other one differs
            at its end; as there is no second id there, the gap is infinite.

    Returns:
        `None` if the texts are equal.
    """
    shared = min(len(expected_ids), len(found_ids))
    differ = (expected_ids[prompt_length:shared] != found_ids[prompt_length:shared]).nonzero()
    if not len(differ):
        return None if len(expected_ids) == len(found_ids) else Difference(shared, float("inf"))
    position = prompt_length + int(differ[0])
    logits = judge(expected_ids[None, :position].to(judge.device)).logits[0, -1].float()
    gap = (logits[expected_ids[position]] - logits[found_ids[position]]).abs() / logits.abs().max()
    return Difference(position, float(gap))
