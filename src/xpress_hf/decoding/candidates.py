"""`XPressCandidateGenerator`: drafts for the assisted-decoding loop of transformers (one sequence, one chain)."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import (
    CandidateGenerator,
    EosTokenCriteria,
    LogitsProcessorList,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
)

from ..modeling.drafter import XPressDrafter
from .acceptance import AcceptanceRecord
from .choosers import SlotChooser
from .target import Target, tap_request, taps


class StopRules:
    """Stopping criteria of a call, sorted by what a loop has to do about them. A criterion that the user gave has
    taken the place of the default one of its type, so the list alone counts, not the config.

    end_ids: ids that end a text. max_length: longest text. others: judged text by text, `MaxTimeCriteria` left out.
    """

    def __init__(self, criteria: StoppingCriteriaList, config: GenerationConfig):
        ends = [rule.eos_token_id.flatten() for rule in criteria if isinstance(rule, EosTokenCriteria)]
        self.end_ids = torch.cat(ends) if ends else None
        lengths = [rule.max_length for rule in criteria if isinstance(rule, MaxLengthCriteria)]
        if lengths and min(lengths) > config.max_length:
            raise ValueError(
                f"`stopping_criteria`: a `MaxLengthCriteria` of {min(lengths)} exceeds the call's `max_length` "
                f"{config.max_length}; raise `max_new_tokens` or leave the criterion out."
            )
        self.max_length = min([config.max_length, *lengths])
        known = (EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria)
        self.others = [rule for rule in criteria if not isinstance(rule, known)]
        self.times = [rule for rule in criteria if isinstance(rule, MaxTimeCriteria)]


class XPressCandidateGenerator(CandidateGenerator):
    """Drafts one block per call from the hidden states of the target's latest forward.

    Stop rules stay exact although the loop looks at them once per block: a draft never holds a token that would end
    the text, so such a token is always the target's own and always the last one. In greedy decoding the draft is cut
    before it. In sampling, where a cut that depends on the drawn token would bias the law, end ids have probability
    zero in the draft's law; with other stop rules the draft is a point mass (the target samples and compares).

    Args:
        model: the target.
        drafter: an `XPressDrafter`.
        generation_config: prepared config of the call (`max_length`, `do_sample`, end ids).
        logits_processor: processors of the call.
        stopping_criteria: criteria of the call, for the cut.
    """

    requires_model_outputs = True

    def __init__(
        self,
        model: PreTrainedModel,
        drafter: XPressDrafter,
        generation_config: GenerationConfig,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
    ):
        self.drafter = drafter
        self.target = Target.for_drafter(model, drafter.config)
        # Where the user wants hidden states too, the loop hands out what the forward gave.
        everything = generation_config.return_dict_in_generate and generation_config.output_hidden_states
        states = True if everything else tap_request(drafter.config.target_layer_ids)
        self.model_kwargs_overrides = {"output_hidden_states": states}
        self.processors = logits_processor
        rules = StopRules(stopping_criteria, generation_config)
        self.max_length, self.end_ids, self.stop_rules = rules.max_length, rules.end_ids, rules.others
        self.do_sample = bool(generation_config.do_sample)
        self.draws_draft = self.do_sample and not self.stop_rules
        self.draft_limit = draft_limit(drafter, generation_config)
        self.threshold = confidence_threshold(drafter, generation_config)
        self.cache = drafter.new_cache()
        self.record = AcceptanceRecord(drafter.config.num_draft_tokens)
        self.candidate_ids: torch.Tensor | None = None
        self._num_drafted = 0

    def get_candidates(
        self,
        input_ids: torch.LongTensor,
        model_kwargs: dict[str, Any] | None = None,
        model_outputs: Any = None,
        is_first_iteration: bool = True,
        n_last_matches: int = 0,
        **kwargs: Any,
    ) -> tuple[torch.LongTensor, torch.Tensor | None]:
        """[1, S] committed ids -> ([1, S + drafted], laws of the draft [1, drafted, V] or None)."""
        self._num_drafted = 0
        self.candidate_ids = input_ids
        room = min(self.max_length - input_ids.shape[1] - 1, self.draft_limit)
        if is_first_iteration or room <= 0:
            return input_ids, None
        attention_mask = (model_kwargs or {}).get("attention_mask")
        context = self._new_context(attention_mask, model_outputs, int(n_last_matches))
        chooser = SlotChooser(input_ids, self.processors, self.draws_draft, self.end_ids if self.draws_draft else None)
        draft = self.drafter.draft_block(
            self.target, self._known_ids(input_ids, attention_mask), context, self.cache, chooser
        )
        draft_ids = draft.ids.to(input_ids.device)[:, :room]
        if self.threshold:
            draft_ids = draft_ids[:, : int(confident_slots(chooser.laws, self.threshold))]
        if self.draws_draft:
            draft_ids = draft_ids[:, : int(chooser.usable[0])]
        else:
            draft_ids = draft_ids[:, : self._length_before_stop(input_ids, draft_ids)]
        self._num_drafted = draft_ids.shape[1]
        self.candidate_ids = torch.cat([input_ids, draft_ids], dim=1)
        laws = chooser.laws[:, : self._num_drafted] if self.draws_draft and self._num_drafted else None
        return self.candidate_ids, laws

    @property
    def num_drafting_tokens(self) -> int:
        """Drafts of a cycle at most: how far newer transformers must be able to roll its cache back."""
        return self.drafter.config.num_draft_tokens

    def update_candidate_strategy(self, input_ids: torch.LongTensor, scores: torch.Tensor, num_matches: int) -> None:
        if self._num_drafted:
            self.record.add(int(num_matches), self._num_drafted)

    def _new_context(self, attention_mask: torch.Tensor | None, outputs: Any, num_matches: int) -> torch.Tensor:
        """Taps of the rows that the drafter's cache lacks: prompt rows without padding, later the kept rows."""
        rows = taps(outputs.hidden_states, self.drafter.config.target_layer_ids, self.target.num_layers)
        if self.cache.get_seq_length():
            return rows[:, : num_matches + 1]
        if attention_mask is not None and rows.shape[1] <= attention_mask.shape[1]:
            rows = rows[:, attention_mask[0, : rows.shape[1]].bool().to(rows.device)]
        return rows

    def _known_ids(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        """The last two committed ids, padding excluded."""
        if attention_mask is not None and attention_mask.shape[1] >= 2 and not bool(attention_mask[0, -2]):
            return input_ids[:, -1:]
        return input_ids[:, -2:]

    def _length_before_stop(self, input_ids: torch.Tensor, draft_ids: torch.Tensor) -> int:
        """Number of leading draft tokens that do not end the text."""
        length = draft_ids.shape[1]
        if self.end_ids is not None:
            ends = torch.isin(draft_ids[0], self.end_ids.to(draft_ids.device)).nonzero()
            if len(ends):
                length = int(ends[0])
        for kept in range(1, length + 1 if self.stop_rules else 0):
            text = torch.cat([input_ids, draft_ids[:, :kept]], dim=1)
            if any(bool(rule(text, None).all()) for rule in self.stop_rules):
                return kept - 1
        return length


def _asked(drafter: XPressDrafter, generation_config: GenerationConfig, name: str) -> Any:
    """An option of assisted decoding: the generate() argument, else the drafter's generation config."""
    asked = getattr(generation_config, name)
    # generate() fills a global default in where the user gave nothing.
    if asked is None or asked == GenerationConfig._get_default_generation_params().get(name):
        return getattr(drafter.generation_config, name)
    return asked


def confidence_threshold(drafter: XPressDrafter, generation_config: GenerationConfig) -> float:
    """`assistant_confidence_threshold` of the call or the drafter, 0 = none."""
    return float(_asked(drafter, generation_config, "assistant_confidence_threshold") or 0.0)


def confident_slots(laws: torch.Tensor, threshold: float) -> torch.Tensor:
    """Leading slots up to the first whose largest probability is below the threshold, that slot included as in stock
    assisted decoding. The cut looks at the law and never at the drawn token, so it biases nothing.
    logits [R, D, V] -> [R]"""
    sure = laws.float().softmax(dim=-1).amax(dim=-1) >= threshold
    return (sure.long().cumprod(dim=1).sum(dim=1) + 1).clamp(max=laws.shape[1])


def draft_limit(drafter: XPressDrafter, generation_config: GenerationConfig) -> int:
    """Drafts verified per cycle: the generate() argument, the drafter's generation config, `speculation`, else D."""
    asked = _asked(drafter, generation_config, "num_assistant_tokens")
    if asked is None:
        asked = drafter.speculation.draft_length
    longest = drafter.config.num_draft_tokens
    return longest if asked in (None, "auto") else max(0, min(int(asked), longest))
