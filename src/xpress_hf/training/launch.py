"""One training run from options: where drafter and data come from, what is built fresh, and block expansion."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ..decoding.acceptance import AcceptanceRecord
from ..decoding.target import Target
from ..evaluation.replay import end_ids, replay
from ..modeling.drafter import XPressDrafter
from ..modeling.rebuilding import rebuild
from .data import ConversationDataset
from .features import FeatureDataset, target_states
from .initialization import config_for_target, initialize_from_target
from .packing import pack
from .recipes import Recipe

logger = logging.get_logger(__name__)


@dataclass
class RunOptions:
    """What `xpress-hf train` and `expand` read beside `DrafterTrainingArguments`.

    The data are either conversations or features; a drafter is either loaded or built fresh for the target.
    """

    target: str = field(default="demo", metadata={"help": "Causal LM: folder, Hub id, or `demo`."})
    dtype: str = field(default="auto", metadata={"help": "dtype of the target."})
    drafter: str | None = field(default=None, metadata={"help": "Drafter to go on from: folder, Hub id, or `demo`."})
    conversations: str | None = field(default=None, metadata={"help": "Answers: JSONL, saved dataset, or a name."})
    features: str | None = field(default=None, metadata={"help": "Folder of features, in place of conversations."})
    eval_conversations: str | None = field(default=None, metadata={"help": "Held-out answers."})
    eval_features: str | None = field(default=None, metadata={"help": "Folder of features of held-out answers."})
    max_length: int = field(default=3072, metadata={"help": "Tokens kept at most of each text."})
    pack: bool = field(default=False, metadata={"help": "Several conversations in one row of `max_length`."})
    block_size: int | None = field(default=None, metadata={"help": "Slots of a block, anchor included."})
    num_layers: int = field(default=5, metadata={"help": "Layers of a fresh drafter."})
    taps: str | None = field(default=None, metadata={"help": "Tapped layers of a fresh drafter, such as 1,7,14."})
    mask_token_id: int | None = field(default=None, metadata={"help": "Mask id of a fresh drafter."})
    refiner_rank: int = field(default=256, metadata={"help": "Rank of a fresh refiner."})
    refiner_sweeps: int = field(default=2, metadata={"help": "Sweeps that a fresh refiner is run with."})

    def __post_init__(self):
        for name in ("conversations", "eval_conversations"):
            other = name.replace("conversations", "features")
            if getattr(self, name) is not None and getattr(self, other) is not None:
                raise ValueError(f"Give either `{name}` or `{other}`, not both.")
        if self.conversations is None and self.features is None:
            raise ValueError(
                "`conversations` or `features` is missing: there is nothing to learn from; `xpress-hf regenerate` "
                "lets the target answer prompts."
            )


def even_taps(num_target_layers: int, count: int = 5) -> list[int]:
    """Tapped layers spread evenly from the second to the third from last, as published drafters have them."""
    last = max(num_target_layers - 3, 1)
    return sorted({round(1 + index * (last - 1) / max(count - 1, 1)) for index in range(count)})


def find_mask_token(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int:
    """The tokenizer's mask token, else the first row of the embedding table that no token uses.

    Raises:
        ValueError: there is neither; `mask_token_id` must then name a token that no text holds.
    """
    if tokenizer.mask_token_id is not None:
        return tokenizer.mask_token_id
    if len(tokenizer) < target.get_input_embeddings().num_embeddings:
        return len(tokenizer)
    raise ValueError(
        "`mask_token_id`: the tokenizer has no mask token and the target's table no unused row; name a token that no "
        "text holds, such as a reserved one."
    )


def build_drafter(
    options: RunOptions,
    recipe: Recipe,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    start: XPressDrafter | None,
) -> XPressDrafter:
    """`start` with what the recipe needs added (a refiner, a longer block), or a fresh drafter for the target."""
    rank = options.refiner_rank
    refiner = {"rank": rank, "mlp_width": 2 * rank, "sweeps": options.refiner_sweeps}
    if start is not None:
        changes: dict[str, Any] = {}
        if recipe.uses_refiner and start.refiner is None:
            changes["refiner"] = refiner
        if options.block_size not in (None, start.config.block_size):
            changes["block_size"] = options.block_size
        return rebuild(start.float(), **changes)
    num_target_layers = target.config.get_text_config().num_hidden_layers
    layers = [int(one) for one in options.taps.split(",")] if options.taps else even_taps(num_target_layers)
    mask = find_mask_token(target, tokenizer) if options.mask_token_id is None else options.mask_token_id
    sizes: dict[str, Any] = {"num_hidden_layers": options.num_layers, "block_size": options.block_size or 16}
    sizes |= {"fusion": recipe.fusion, "block_attention": recipe.block_attention}
    sizes |= {"refiner": refiner if recipe.uses_refiner else None}
    drafter = XPressDrafter(config_for_target(target, layers, mask, **sizes))
    try:
        initialize_from_target(drafter, target)
    except ValueError as error:
        logger.warning(f"The drafter starts from random weights: {error}")
    return drafter


def load_texts(
    conversations: str | None,
    features: str | None,
    options: RunOptions,
    drafter: XPressDrafter,
    tokenizer: PreTrainedTokenizerBase,
) -> Dataset | list | None:
    """Texts to train on or to hold out, or None where neither source was given."""
    if features is not None:
        return FeatureDataset(features)
    if conversations is None:
        return None
    mask = drafter.config.mask_token_id
    texts = ConversationDataset(conversations, tokenizer, options.max_length, mask_token_id=mask)
    return pack([texts[index] for index in range(len(texts))], options.max_length) if options.pack else texts


@torch.no_grad()
def measure(target: PreTrainedModel, drafter: XPressDrafter, texts: Any, limit: int | None = None) -> AcceptanceRecord:
    """Cycles of generate() on answers of the target (`evaluation.replay`), pooled over texts."""
    parts = Target.for_drafter(target, drafter.config)
    record = AcceptanceRecord(drafter.config.num_draft_tokens)
    drafter = drafter.eval()
    for index in range(min(len(texts), limit or len(texts))):
        text = texts[index]
        answer = text["loss_mask"].nonzero()
        if not len(answer):
            continue
        context = text.get("context_hidden_states")
        if context is None:
            ids = text["input_ids"][None].to(target.device)
            context = target_states(target, ids, torch.ones_like(ids), drafter.config.target_layer_ids)[0][0]
        record += replay(parts, drafter, text["input_ids"], int(answer[0]), context, end_ids(target))
    return record
