"""Decoding of one or many sequences with one drafter: every row keeps its own drafts and advances at its own pace.

Symbols: R rows still running, N tokens in a verification (anchor and drafts), D drafts, S new context rows, V
vocabulary.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.generation import (
    GenerateDecoderOnlyOutput,
    LogitsProcessorList,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from ..modeling.backbone import additive_mask, context_visibility
from ..modeling.drafter import XPressDrafter
from .acceptance import AcceptanceRecord
from .caches import aligned_columns, keep_columns, keep_rows, ragged_cache
from .candidates import StopRules, draft_limit, position_free
from .rows import Context, Row, RowChoosers, RowProcessors
from .target import Target, tap_request, taps
from .verification import block_verification, match, token_rejection


def check_forward_arguments(model_kwargs: dict[str, Any]) -> None:
    """Raises `ValueError` for arguments of the target's forward that hold something per token or row: the loop
    would have to extend them with every token and drop rows from them."""
    for name, value in model_kwargs.items():
        if isinstance(value, torch.Tensor | list | tuple) and name not in ("attention_mask", "position_ids"):
            raise ValueError(f"`{name}`: a batch with a drafter does not serve it yet; generate row by row.")


class DecodingLoop:
    """One generate() call.

    Args:
        model: the target. drafter: its drafter.
        input_ids: [B, S], left-padded where `attention_mask` says so.
        processors, criteria, config: as generate() prepared them.
        model_kwargs: arguments of the target's forward, the empty cache among them.
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
        self.model, self.drafter, self.config = model, drafter, config
        self.target = Target.for_drafter(model, drafter.config)
        self.processors, self.streamer = processors, streamer
        self.do_sample = bool(config.do_sample)
        self.keeps_scores = bool(config.return_dict_in_generate and config.output_scores)
        rules = StopRules(criteria, config)
        self.end_ids = set() if rules.end_ids is None else set(rules.end_ids.tolist())
        self.max_length = rules.max_length
        self.rules = [*rules.others, *rules.times]
        self.batch = len(input_ids)
        if rules.others and not self.end_ids and self.batch > 1:
            raise ValueError(
                "`stopping_criteria`: without an end id plain generate goes on with rows that a criterion has stopped "
                "until all have; set `eos_token_id` or generate row by row."
            )
        check_forward_arguments(model_kwargs)
        self.draft_limit = draft_limit(drafter, config)
        self.judge = block_verification if drafter.speculation.verification == "block" else token_rejection
        self.cache_name = "cache" if "cache" in model_kwargs else "past_key_values"
        self.model_kwargs = {**model_kwargs, self.cache_name: ragged_cache(model_kwargs[self.cache_name])}
        self.takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        mask = model_kwargs.get("attention_mask")
        mask = torch.ones_like(input_ids) if mask is None else mask
        if mask.shape != input_ids.shape or bool((mask.diff(dim=1) < 0).any()) or not bool(mask[:, -1].all()):
            raise ValueError(
                "`attention_mask`: a batch with a drafter takes padding on the left only. Set "
                "`tokenizer.padding_side='left'`; where a prompt itself holds the padding id, pass `attention_mask`."
            )
        pads = (mask.cumsum(dim=1) == 0).sum(dim=1).tolist()
        self.rows = [
            Row(index, ids, pad, RowProcessors(processors, index, len(input_ids)))
            for index, (ids, pad) in enumerate(zip(input_ids, pads, strict=True))
        ]
        self.finished: list[Row] = []
        self.prompt_mask = mask
        self.context = Context(drafter)
        self.record = AcceptanceRecord(drafter.config.num_draft_tokens)

    @property
    def cache(self) -> Cache:
        return self.model_kwargs[self.cache_name]

    @torch.no_grad()
    def run(self) -> list[Row]:
        """Decodes until every row has met a stop rule. Returns the rows in their order."""
        self._prefill()
        while self.rows:
            self._cycle()
        if self.streamer is not None:
            self.streamer.end()
        return sorted(self.finished, key=lambda row: row.index)

    def _prefill(self) -> None:
        input_ids = torch.stack([row.ids for row in self.rows])
        inputs = self.model.prepare_inputs_for_generation(input_ids, is_first_iteration=True, **self.model_kwargs)
        inputs["output_hidden_states"] = tap_request(self.layers)
        if inputs.get("position_ids") is not None and inputs["position_ids"].dim() > 2:
            raise ValueError(
                f"{type(self.model).__name__} has positions of several axes, which a batch with a drafter does not "
                "serve yet; generate row by row."
            )
        if "logits_to_keep" in inspect.signature(self.model.forward).parameters:
            inputs["logits_to_keep"] = 1
        outputs = self.model(**inputs)
        positions = (self.prompt_mask.cumsum(dim=1) - 1).clamp(min=0)
        given = inputs.get("position_ids")
        # Positions that the user chose go on where they ended.
        last = positions[:, -1] if given is None else given[..., -1].reshape(-1).expand(len(self.rows))
        self.offset = (last - positions[:, -1]).to(input_ids.device)
        self.context.set_new(
            taps(outputs.hidden_states, self.layers, self.target.num_layers), positions, self.prompt_mask.bool()
        )
        logits = outputs.logits[:, -1:].to(input_ids.device, torch.float32)
        no_drafts = torch.zeros(len(self.rows), 0, dtype=torch.long, device=input_ids.device)
        self._commit(no_drafts, None, torch.zeros(len(self.rows), dtype=torch.long, device=input_ids.device), logits)

    @property
    def layers(self) -> list[int]:
        return self.drafter.config.target_layer_ids

    def _cycle(self) -> None:
        device = self.rows[0].ids.device
        room = torch.tensor([self.max_length - len(row.ids) - 1 for row in self.rows], device=device)
        lengths = room.clamp(min=0, max=self.draft_limit)
        width = int(lengths.max())
        laws = None
        if width:
            draft_ids, laws, usable = self._draft()
            lengths = torch.minimum(lengths, usable.to(device))
            draft_ids, laws = draft_ids[:, :width], None if laws is None else laws[:, :width]
        else:
            draft_ids = torch.zeros(len(self.rows), 0, dtype=torch.long, device=device)
        anchors = torch.stack([row.ids[-1] for row in self.rows])[:, None]
        outputs = self._verify(torch.cat([anchors, draft_ids], dim=1))
        states = taps(outputs.hidden_states, self.layers, self.target.num_layers)
        starts = torch.tensor([row.length - 1 for row in self.rows], device=device)
        steps = torch.arange(states.shape[1], device=device)
        logits = outputs.logits.to(device, torch.float32)
        self._commit(draft_ids, laws, lengths, logits, states, starts[:, None] + steps)

    def _draft(self) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """Drafts of all rows [R, D], when sampling the laws they were drawn from [R, D, V], and how many count [R]."""
        config, context = self.drafter.config, self.context
        device = self.rows[0].ids.device
        starts = torch.tensor([row.length - 1 for row in self.rows], device=device)
        block = starts[:, None] + torch.arange(config.block_size, device=device)
        kinds = dict(zip(config.layer_types, config.block_attention_per_layer, strict=True))
        masks = {
            kind: additive_mask(
                context_visibility(context.positions, context.valid, block, config, kind, direction == "causal"),
                self.drafter.dtype,
            ).to(self.drafter.device)
            for kind, direction in kinds.items()
        }
        before = torch.stack([row.ids[-2] if row.length > 1 else row.ids[-1] for row in self.rows])
        anchors = torch.stack([row.ids[-1] for row in self.rows])
        choosers = RowChoosers(self.rows, self.processors, self.do_sample)
        draft = self.drafter.draft_block(
            self.target,
            torch.stack([before, anchors], dim=1),
            context.new,
            context.cache,
            choosers,
            position_ids=torch.cat([context.new_positions, block], dim=1),
            attention_mask=masks,
        )
        context.compact()
        if not self.do_sample:
            return draft.ids.to(device), None, torch.full((len(self.rows),), draft.ids.shape[1])
        return draft.ids.to(device), choosers.laws, choosers.num_usable

    def _verify(self, tokens: torch.Tensor) -> Any:
        """One forward of the target over anchors and drafts [R, N]."""
        device = tokens.device
        width = self.cache.get_seq_length()
        run = torch.tensor([row.length - 1 for row in self.rows], device=device)
        columns = torch.arange(width + tokens.shape[1], device=device)
        inputs: dict[str, Any] = {
            "input_ids": tokens,
            "attention_mask": (columns >= (width - run)[:, None]).long(),
            self.cache_name: self.cache,
            "use_cache": True,
            "output_hidden_states": tap_request(self.layers),
        }
        if self.takes_positions:
            inputs["position_ids"] = (run + self.offset)[:, None] + torch.arange(tokens.shape[1], device=device)
        return self.model(**inputs)

    def _judged(self, draft_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Logits after the processors, each place with the drafts before it counted. [R, N, V]"""
        if not self.processors:
            return logits
        judged = torch.empty_like(logits)
        free = position_free(self.processors)
        for number, row in enumerate(self.rows):
            if free:
                ids = row.ids[None].expand(logits.shape[1], -1)
                judged[number] = self.processors(ids, logits[number].clone())
                continue
            for place in range(logits.shape[1]):
                ids = torch.cat([row.ids, draft_ids[number, :place]])[None]
                judged[number, place] = row.processors(ids, logits[number, place][None])[0]
        return judged

    def _accept(
        self, draft_ids: torch.Tensor, laws: torch.Tensor | None, lengths: torch.Tensor, judged: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Kept drafts [R] and the token after them [R]."""
        if laws is not None:
            return self.judge(draft_ids, laws, judged.softmax(dim=-1), lengths)
        if self.do_sample:
            chosen = torch.multinomial(judged.flatten(0, 1).softmax(dim=-1), 1).view(judged.shape[:2])
        else:
            chosen = judged.argmax(dim=-1)
        kept = match(draft_ids, chosen, lengths)
        return kept, chosen.gather(1, kept[:, None])[:, 0]

    def _commit(
        self,
        draft_ids: torch.Tensor,
        laws: torch.Tensor | None,
        lengths: torch.Tensor,
        logits: torch.Tensor,
        states: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
    ) -> None:
        """Accepts, stops rows that are done, and leaves both caches with committed tokens only."""
        judged = self._judged(draft_ids, logits)
        kept, tokens = self._accept(draft_ids, laws, lengths, judged)
        going = []
        for number, row in enumerate(self.rows):
            count = int(kept[number])
            new = torch.cat([draft_ids[number, :count], tokens[number : number + 1]])
            scores = [*row.scores, *judged[number, : count + 1]]
            length, done = self._length_until_stop(row, new, scores)
            row.ids = torch.cat([row.ids, new[:length]])
            if self.keeps_scores:
                row.scores = scores[: len(row.scores) + length]
            if self.config.output_logits:
                row.logits += list(logits[number, :length])
            self._stream(new[:length])
            self._record(draft_ids[number, : int(lengths[number])], count, length)
            if done:
                self.finished.append(row)
            else:
                going.append(number)
        if states is not None:
            read = torch.arange(states.shape[1], device=states.device) <= kept.to(states.device)[:, None]
            self.context.set_new(states, positions.to(states.device), read)
            self._crop(kept, draft_ids.shape[1])
        if len(going) < len(self.rows):
            self._keep(torch.tensor(going, device=tokens.device, dtype=torch.long))

    def _record(self, draft_ids: torch.Tensor, count: int, length: int) -> None:
        """Notes a cycle that kept `count` of its drafts and gave `length` tokens. A drafted token that ends the text
        counts as the target's own, and nothing behind it as verified, as in the stock loop."""
        drafted = next((place for place, one in enumerate(draft_ids.tolist()) if one in self.end_ids), len(draft_ids))
        drafted = length - 1 if length <= count else drafted
        if drafted:
            self.record.add(length - 1, drafted)

    def _stream(self, new: torch.Tensor) -> None:
        if self.streamer is not None:
            for token in new.cpu().split(1):
                self.streamer.put(token)

    def _length_until_stop(self, row: Row, new: torch.Tensor, scores: list[torch.Tensor]) -> tuple[int, bool]:
        """Number of new tokens up to the first at which plain decoding would stop, and whether there is one.

        `scores`: [V] per token of the row, those of `new` at its end; criteria see them where the caller asked for
        scores, as in plain decoding.
        """
        for count in range(1, len(new) + 1):
            text = torch.cat([row.ids, new[:count]])
            if len(text) >= self.max_length or int(new[count - 1]) in self.end_ids:
                return count, True
            # A criterion may keep something per row of the batch: its own place is read.
            shown = text.expand(self.batch, -1)
            seen = tuple(score.expand(self.batch, -1) for score in scores[: len(scores) - len(new) + count])
            if any(bool(rule(shown, seen if self.keeps_scores else None)[row.index]) for rule in self.rules):
                return count, True
        return len(new), False

    def _crop(self, kept: torch.Tensor, num_drafts: int) -> None:
        """Drops rejected columns of the target's cache and aligns the rows again."""
        dropped = num_drafts - kept
        if len(self.rows) == 1:
            if int(dropped):
                self.cache.crop(-int(dropped))
            return
        total = self.cache.get_seq_length()
        valid = torch.tensor([row.length - 1 for row in self.rows], device=kept.device)
        if bool((dropped > 0).any()) or int(valid.max()) < total:
            keep_columns(self.cache, aligned_columns(total, dropped, valid))

    def _keep(self, rows: torch.Tensor) -> None:
        """Finished rows stop costing."""
        self.rows = [self.rows[index] for index in rows.tolist()]
        self.offset = self.offset[rows]
        if self.rows:
            keep_rows(self.cache, rows)
            self.context.keep(rows)


def generate_rows(loop: DecodingLoop) -> torch.Tensor | GenerateDecoderOnlyOutput:
    """Runs the loop and gives back what plain generate would: ids [B, S'], finished rows padded on the right.

    Scores and logits have one entry [B, V] per step of the longest row; a row that has finished holds zeros there.
    """
    rows = loop.run()
    pad = getattr(loop.config, "_pad_token_tensor", None)
    sequences = pad_sequence([row.ids for row in rows], batch_first=True, padding_value=0 if pad is None else int(pad))
    if not loop.config.return_dict_in_generate:
        return sequences

    def steps(name: str) -> tuple[torch.Tensor, ...]:
        stacked = pad_sequence([torch.stack(getattr(row, name)) for row in rows], batch_first=True)
        return tuple(stacked.transpose(0, 1))

    return GenerateDecoderOnlyOutput(
        sequences=sequences,
        scores=steps("scores") if loop.keeps_scores else None,
        logits=steps("logits") if loop.config.output_logits else None,
    )
