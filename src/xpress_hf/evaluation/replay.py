"""Replay: the cycles that greedy generate() would run on a text that the target itself wrote, without the target."""

from __future__ import annotations

import torch
from transformers import GenerationConfig, PreTrainedModel

from ..decoding.acceptance import AcceptanceRecord
from ..decoding.candidates import draft_limit
from ..decoding.target import Target
from ..modeling.drafter import XPressDrafter


def end_ids(model: PreTrainedModel) -> torch.Tensor | None:
    """Ids [E] that end a text in `model.generate()`, `None` where there are none."""
    found = model.generation_config.eos_token_id
    return None if found is None else torch.tensor(found).flatten()


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
    agrees with the text. Where the text is the target's greedy answer, the record is that of generate(): with
    `max_new_tokens=S - prompt_length`, or with room to spare where the text ends in an end id.

    Args:
        target: embeddings and head of the drafter's target.
        input_ids: [S] prompt and answer.
        prompt_length: tokens of the prompt; the token behind it is the first anchor.
        context_hidden_states: [S, L * H] taps; the last row is not read.
        end_ids: [E] ids that end a text; as in generate() a draft is cut before them.
    """
    ids, length = input_ids[None], len(input_ids)
    limit = draft_limit(drafter, GenerationConfig())
    ended = end_ids is not None and bool(torch.isin(input_ids[-1].cpu(), end_ids.cpu()))
    # A text that ended by itself says nothing about its budget; one that was cut used it up.
    max_length = length + drafter.config.block_size if ended else length
    record, cache = AcceptanceRecord(drafter.config.num_draft_tokens), drafter.new_cache()
    first, anchor = 0, prompt_length
    while anchor < length - 1 and (room := min(max_length - anchor - 2, limit)) > 0:
        rows = context_hidden_states[None, first:anchor]
        draft = drafter.draft_block(target, ids[:, max(anchor - 1, 0) : anchor + 1], rows, cache).ids[0, :room]
        if end_ids is not None and (ends := torch.isin(draft, end_ids.to(draft.device)).nonzero()).numel():
            draft = draft[: int(ends[0])]
        following = input_ids[anchor + 1 : anchor + 1 + len(draft)].to(draft.device)
        kept = int((draft[: len(following)] == following).long().cumprod(dim=0).sum())
        if len(draft):
            record.add(kept, len(draft))
        first, anchor = anchor, anchor + kept + 1
    return record
