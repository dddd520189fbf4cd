"""Replay: the cycles that greedy generate() would run on a text that the target itself wrote, without the target."""

from __future__ import annotations

import torch

from ..decoding.acceptance import AcceptanceRecord
from ..decoding.target import Target
from ..modeling.drafter import XPressDrafter


@torch.no_grad()
def replay(
    target: Target,
    drafter: XPressDrafter,
    input_ids: torch.Tensor,
    prompt_length: int,
    context_hidden_states: torch.Tensor,
    end_ids: torch.Tensor | None = None,
) -> AcceptanceRecord:
    """Drafts through an answer block by block, by the code that generate() drafts with; a draft is kept while it
    agrees with the text. Where the text is the target's greedy answer, the record is that of
    `generate(max_new_tokens=S - prompt_length)`.

    Args:
        target: embeddings and head of the drafter's target.
        input_ids: [S] prompt and answer.
        prompt_length: tokens of the prompt; the token behind it is the first anchor.
        context_hidden_states: [S, L * H] taps; the last row is not read.
        end_ids: [E] ids that end a text; as in generate() a draft is cut before them.
    """
    ids, length = input_ids[None], len(input_ids)
    limit = drafter.speculation.draft_length or drafter.config.num_draft_tokens
    record, cache = AcceptanceRecord(drafter.config.num_draft_tokens), drafter.new_cache()
    first, anchor = 0, prompt_length
    while (room := min(length - anchor - 2, limit)) > 0:
        rows = context_hidden_states[None, first:anchor]
        draft = drafter.draft_block(target, ids[:, max(anchor - 1, 0) : anchor + 1], rows, cache).ids[0, :room]
        if end_ids is not None and (ends := torch.isin(draft, end_ids.to(draft.device)).nonzero()).numel():
            draft = draft[: int(ends[0])]
        hits = draft == input_ids[anchor + 1 : anchor + 1 + len(draft)].to(draft.device)
        kept = int(hits.long().cumprod(dim=0).sum())
        if len(draft):
            record.add(kept, len(draft))
        first, anchor = anchor, anchor + kept + 1
    return record
