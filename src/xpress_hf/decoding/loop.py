"""Decoding of one or many sequences with one drafter: every row keeps its own drafts and advances at its own pace.

Symbols: R rows still running, N tokens in a verification (anchor and drafts), D drafts, V vocabulary.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import LogitsProcessorList, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

from ..modeling.backbone import additive_mask, context_visibility
from ..modeling.drafter import XPressDrafter
from .acceptance import AcceptanceRecord
from .budget import AutoLength, history_of
from .caches import cache_name, on_device, row_columns
from .candidates import StopRules, confidence_threshold, confident_slots, draft_limit
from .choosers import chooser_for
from .forwards import TargetForwards
from .outputs import Requested
from .processors import RowProcessors, position_free
from .rows import Context, Row
from .static_shapes import StaticShapes
from .target import Target
from .verification import block_verification, match, token_rejection

logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class Draft:
    """Drafts of all rows: ids [R, D], the laws they were drawn from [R, D, V] or `None` for greedy ones, and how many
    of a row count [R]."""

    ids: torch.Tensor
    laws: torch.Tensor | None
    lengths: torch.Tensor


class DecodingLoop:
    """One generate() call.

    Args:
        model: the target. drafter: its drafter.
        input_ids: [R, S], left-padded where `attention_mask` says so.
        processors, criteria, config: as generate() prepared them.
        model_kwargs: arguments of the target's forward, the cache among them.
        streamer: gets the committed ids of one sequence, token by token.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        drafter: XPressDrafter,
        input_ids: torch.Tensor,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
        model_kwargs: dict[str, Any],
        streamer: BaseStreamer | None = None,
    ):
        self.drafter = drafter
        self.target = Target.for_drafter(model, drafter.config)
        self.processors, self.streamer = processors, streamer
        self.do_sample = bool(config.do_sample)
        self.requested = Requested.of(config, model.config, model_kwargs[cache_name(model_kwargs)])
        rules = StopRules(criteria, config)
        self.end_ids, self.max_length = rules.end_ids, rules.max_length
        self.rules = [*rules.others, *rules.times]
        self.batch = len(input_ids)
        if rules.others and self.end_ids is None and self.batch > 1:
            raise ValueError(
                "`stopping_criteria`: without an end id plain generate goes on with rows that a criterion has stopped "
                "until all have; set `eos_token_id` or generate row by row."
            )
        self.draft_limit = draft_limit(drafter, config)
        self.auto: AutoLength | None = None
        if drafter.speculation.draft_length == "auto" and self.draft_limit:
            self.auto = AutoLength(self.draft_limit, history_of(model, drafter), self.batch)
        self.threshold = confidence_threshold(drafter, config)
        self.judge = block_verification if drafter.speculation.verification == "block" else token_rejection
        self.static: StaticShapes | None = None
        if drafter.speculation.compile:
            self.static = StaticShapes(model, drafter, config, self.max_length, self.draft_limit)
        self.forwards = TargetForwards(
            model,
            input_ids,
            model_kwargs,
            drafter.config.target_layer_ids,
            self.requested.extras,
            config.prefill_chunk_size,
            self.static,
        )
        pads = (self.forwards.mask.cumsum(dim=1) == 0).sum(dim=1).tolist()
        self.rows = [
            Row(index, ids, pad, AcceptanceRecord(drafter.config.num_draft_tokens))
            for index, (ids, pad) in enumerate(zip(input_ids, pads, strict=True))
        ]
        self.row_processors = RowProcessors(processors, self.batch)
        self.finished: list[Row] = []
        self.context = Context(drafter, self.batch, self.static)

    @torch.no_grad()
    def run(self) -> list[Row]:
        """Decodes until every row has met a stop rule. Returns the rows in their order."""
        self._prefill()
        while self.rows:
            self._cycle()
        if self.streamer is not None:
            self.streamer.end()
        if self.auto is not None and self.auto.mostly_plain:
            logger.warning_once(
                f"`draft_length`='auto': speculation does not pay for {self.batch} sequences at a time on this "
                "machine; most steps ran without a draft."
            )
        return sorted(self.finished, key=lambda row: row.index)

    def _prefill(self) -> None:
        input_ids = torch.stack([row.ids for row in self.rows])
        outputs, states = self.forwards.prefill(input_ids)
        if self.draft_limit:
            self.context.add(states, [row.pads for row in self.rows], [row.length for row in self.rows])
        self._commit(self._no_draft(), outputs, first=True)

    def _cycle(self) -> None:
        if self.auto is None:
            self._step(self.draft_limit)
            return
        rows = list(self.rows)
        length, before = self.auto.choose(len(rows)), [row.record.num_cycles for row in rows]
        start = time.perf_counter()
        length = self._step(length)
        seconds = time.perf_counter() - start
        records = [row.record for row, count in zip(rows, before, strict=True) if row.record.num_cycles > count]
        self.auto.note(len(rows), length, seconds, [(one.accepted[-1], one.verified[-1]) for one in records])

    def _step(self, limit: int) -> int:
        """One cycle that verifies at most `limit` drafts of a row; 0 = a plain step. Returns how many it verified."""
        draft = self._draft(limit)
        anchors = torch.stack([row.ids[-1] for row in self.rows])[:, None]
        outputs = self.forwards.verify(torch.cat([anchors, draft.ids], dim=1), [row.length - 1 for row in self.rows])
        self._commit(draft, outputs)
        return draft.ids.shape[1]

    def _no_draft(self) -> Draft:
        device = self.rows[0].ids.device
        nothing = torch.zeros(len(self.rows), 0, dtype=torch.long, device=device)
        return Draft(nothing, None, nothing.sum(dim=1))

    def _draft(self, limit: int) -> Draft:
        """One block behind every row, cut to the room that the longest answer leaves."""
        room = [min(max(self.max_length - len(row.ids) - 1, 0), limit) for row in self.rows]
        if not max(room):
            return self._no_draft()
        device = self.rows[0].ids.device
        anchors = torch.stack([row.ids[-2:] if row.length > 1 else row.ids[-1].expand(2) for row in self.rows])
        chooser = chooser_for(self.rows, self.row_processors, self.do_sample)
        new = self.context.take()
        draft = self.drafter.draft_block(
            self.target, anchors, new, self.context.cache, chooser, **self._block_inputs(new.shape[1])
        )
        del new
        self.context.pack()
        lengths = torch.minimum(on_device(room, device), chooser.usable.to(device))
        if self.threshold:
            lengths = torch.minimum(lengths, confident_slots(chooser.laws, self.threshold).to(device))
        laws = None
        if self.do_sample:
            laws = chooser.laws[:, : max(room)].float().softmax(dim=-1).nan_to_num(0.0)
        return Draft(draft.ids[:, : max(room)].to(device), laws, lengths)

    def _block_inputs(self, num_new: int) -> dict[str, Any]:
        """Positions and masks of the next block behind `num_new` new context rows, and what runs it; nothing where all
        rows count."""
        context, config = self.context, self.drafter.config
        if self.static is not None:
            return self.static.block_inputs(self.drafter, context.counts[0], num_new)
        if context.dense:
            return {}
        device = context.valid.device
        starts = on_device([row.length - 1 for row in self.rows], device)
        block = starts[:, None] + torch.arange(config.block_size, device=device)
        kinds = dict(zip(config.layer_types, config.block_attention_per_layer, strict=True))
        masks = {
            kind: additive_mask(
                context_visibility(context.positions, context.valid, block, config, kind, direction == "causal"),
                self.drafter.dtype,
            ).to(self.drafter.device)
            for kind, direction in kinds.items()
        }
        new = context.positions[:, -num_new:]
        return {"position_ids": torch.cat([new, block], dim=1), "attention_mask": masks}

    def _judged(self, draft_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Logits after the processors, each place with the drafts before it counted. [R, N, V]"""
        if not self.processors:
            return logits
        if position_free(self.processors):
            places = logits.flatten(0, 1).clone()
            ids = self.rows[0].ids[None].expand(len(places), -1)
            return self.processors(ids, places).view(logits.shape)
        return self.row_processors.judge(self.rows, draft_ids, logits)

    def _accept(self, draft: Draft, judged: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Kept drafts [R] and all tokens of the cycle, what follows the kept drafts included [R, N]."""
        if draft.laws is not None:
            kept, tokens = self.judge(draft.ids, draft.laws, judged.softmax(dim=-1), draft.lengths)
            chosen = torch.cat([draft.ids, tokens[:, None]], dim=1)
            return kept, chosen.scatter(1, kept[:, None], tokens[:, None])
        if self.do_sample:
            chosen = torch.multinomial(judged.flatten(0, 1).softmax(dim=-1), 1).view(judged.shape[:2])
        else:
            chosen = judged.argmax(dim=-1)
        return match(draft.ids, chosen, draft.lengths), chosen

    def _commit(self, draft: Draft, outputs: Any, first: bool = False) -> None:
        """Accepts, stops rows that are done, and leaves both caches with committed tokens only."""
        device = draft.ids.device
        logits = outputs.logits[:, -1 - draft.ids.shape[1] :].to(device, torch.float32)
        judged = self._judged(draft.ids, logits)
        kept, tokens = self._accept(draft, judged)
        run = [row.length - 1 for row in self.rows]
        counts, going = [], []
        for number, (accepted, drafted, ends) in enumerate(self._numbers(kept, draft, tokens)):
            row = self.rows[number]
            count, done = self._count(row, tokens[number], accepted, ends, judged[number])
            self.requested.note(row, number, count, judged, logits, outputs, first)
            new = tokens[number, :count]
            row.ids = torch.cat([row.ids, new])
            self._stream(new)
            if count <= accepted:
                # The text ended within the draft: its last token counts as the target's own, as in the stock loop.
                drafted = count - 1
            if drafted:
                row.record.add(count - 1, drafted)
            counts.append(count)
            if done:
                self.finished.append(row)
            else:
                going.append(number)
        if not first:
            if self.draft_limit:
                self.context.add(self.forwards.taps(outputs), [0] * len(counts), counts)
            self.forwards.drop(
                [tokens.shape[1] - count for count in counts],
                [length + count for length, count in zip(run, counts, strict=True)],
            )
        if len(going) < len(self.rows):
            self._keep(going)

    def _numbers(self, kept: torch.Tensor, draft: Draft, tokens: torch.Tensor) -> list[list[int]]:
        """Per row: kept drafts, drafts that counted, tokens before the first end id. The only wait for the device in a
        cycle, as long as no rule has to be asked token by token."""
        ends = self._before_end(tokens)
        drafted = torch.minimum(draft.lengths.to(kept.device), self._before_end(draft.ids))
        return torch.stack([kept, drafted, ends], dim=1).tolist()

    def _before_end(self, ids: torch.Tensor) -> torch.Tensor:
        """[R, N] -> [R] ids before the first end id."""
        if self.end_ids is None:
            return ids.new_full(ids.shape[:1], ids.shape[1])
        return (~torch.isin(ids, self.end_ids.to(ids.device))).long().cumprod(dim=1).sum(dim=1)

    def _count(
        self, row: Row, tokens: torch.Tensor, accepted: int, ends: int, judged: torch.Tensor
    ) -> tuple[int, bool]:
        """Number of new tokens up to the first at which plain decoding would stop, and whether there is one.

        Args:
            tokens: [N] new tokens; `accepted` + 1 of them stand. ends: tokens before the first end id.
            judged: [N, V] scores that they were chosen from.
        """
        left = self.max_length - len(row.ids)
        count = min(accepted + 1, ends + 1, left)
        for number in range(1, count + 1 if self.rules else 1):
            # A criterion may keep something per row of the batch: its own place is read.
            text = torch.cat([row.ids, tokens[:number]]).expand(self.batch, -1)
            scores = None
            if "scores" in self.requested.names:
                seen = [*row.steps.get("scores", []), *judged[:number]]
                scores = tuple(one.expand(self.batch, -1) for one in seen)
            if any(bool(rule(text, scores)[row.index]) for rule in self.rules):
                return number, True
        return count, count == left or count == ends + 1

    def _stream(self, new: torch.Tensor) -> None:
        if self.streamer is not None:
            for token in new.cpu().split(1):
                self.streamer.put(token)

    def _keep(self, going: list[int]) -> None:
        """Rows that ended stop costing."""
        if self.batch > 1 and self.requested.as_dict:
            for number, row in enumerate(self.rows):
                if number not in going:
                    row.cached = row_columns(self.forwards.cache, number, row.length - 1)
        self.rows = [self.rows[number] for number in going]
        if self.rows:
            self.forwards.keep(going)
            self.context.keep(going)
