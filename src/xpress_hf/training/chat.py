"""A conversation in the target's own chat template -> ids, and a mask of those that the assistant writes.

What belongs to the assistant is found in the first of three ways that works:

1. the template marks it with `{% generation %}`;
2. prefixes: what an answer adds to the text before it, generation prompt included;
3. exchange: the part of the text that changes with the answer, for templates that show earlier answers in another way
   than the last one (a dropped chain of thought) and so have no prefixes.

In all of them the end-of-turn token that closes an answer belongs to it, and what a template writes behind that token
does not.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]
Span = tuple[int, int]

MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
# A character of the private use area: no text holds it, so it shares no first or last character with an answer.
STAND_IN = "\ue000"


@dataclass(frozen=True)
class ChatTemplate:
    """The chat template of a tokenizer with everything that changes its text.

    Args:
        tokenizer: the target's.
        tools: tools that the template shows, as `apply_chat_template` takes them.
        kwargs: switches of the template, such as `{"enable_thinking": False}`.
    """

    tokenizer: PreTrainedTokenizerBase
    tools: list[Any] | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)

    def render(self, messages: list[Message], add_generation_prompt: bool = False) -> str:
        """Text of a conversation.

        Raises:
            ValueError: there is no template, or it refuses the conversation.
        """
        try:
            return self.tokenizer.apply_chat_template(
                messages,
                tools=self.tools,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **self.kwargs,
            )
        except Exception as error:
            # Templates raise what they like: jinja errors of their own, TypeError where a field is missing.
            if not self.tokenizer.chat_template:
                raise ValueError(
                    "`tokenizer` has no chat template; set `tokenizer.chat_template` to the one that the target was "
                    "trained with."
                ) from error
            roles = [message.get("role") for message in messages]
            raise ValueError(f"The chat template refuses a conversation of the roles {roles}: {error}") from error

    def prompt_ids(self, messages: list[Message]) -> list[int]:
        """Ids that the target reads before it answers."""
        return self._ids(self.render(messages, add_generation_prompt=True))

    def encode(self, messages: list[Message], add_generation_prompt: bool = False) -> tuple[list[int], list[int]]:
        """Ids [S] of a conversation and a mask [S] that is 1 on what the assistant writes, end-of-turn ids included.

        Raises:
            ValueError: the template cannot mark the assistant's part.
        """
        text = self.render(messages, add_generation_prompt)
        spans = self._marked_spans(messages, text, add_generation_prompt)
        if spans is None:
            spans = self._spans(messages, text, add_generation_prompt)
        ids, ranges = self._tokenize(text, spans)
        mask = [0] * len(ids)
        for start, stop in ranges:
            stop = self._close_turn(ids, start, stop)
            mask[start:stop] = [1] * (stop - start)
        return ids, mask

    def end_id(self) -> int | None:
        """The id that ends an answer in this template, else the tokenizer's end-of-text id."""
        try:
            ids, mask = self.encode([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
        except ValueError:
            return self.tokenizer.eos_token_id
        last = max((place for place, one in enumerate(mask) if one), default=None)
        return ids[last] if last is not None and ids[last] in self.special_ids else self.tokenizer.eos_token_id

    @property
    def special_ids(self) -> set[int]:
        """Ids that can end an answer: all special ones but the one that starts a text."""
        added = {key for key, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        start, end = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        return (added | set(self.tokenizer.all_special_ids)) - ({start} if start != end else set())

    def _ids(self, text: str) -> list[int]:
        # As in `apply_chat_template`: the template itself writes the special tokens.
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _marked_spans(self, messages: list[Message], text: str, add_generation_prompt: bool) -> list[Span] | None:
        template = self.tokenizer.get_chat_template(None, self.tools)
        if not MARK.search(template) or not self.tokenizer.is_fast:
            return None
        encoded = self.tokenizer.apply_chat_template(
            messages,
            tools=self.tools,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            add_generation_prompt=add_generation_prompt,
            **self.kwargs,
        )
        runs = mask_runs(encoded["assistant_masks"])
        if not runs and any(message["role"] == "assistant" for message in messages):
            raise ValueError(
                "The chat template has `{% generation %}` marks, but none around the answers of this conversation; "
                "put them around the assistant's text and its end-of-turn token, or remove them all."
            )
        # Back to characters: the mask of some versions misses the last bytes of a character of several tokens.
        offsets = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        return [(offsets[start][0], offsets[stop - 1][1]) for start, stop in runs]

    def _spans(self, messages: list[Message], text: str, add_generation_prompt: bool) -> list[Span]:
        spans: list[Span] = []
        for place, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            span = self._span_by_prefixes(messages, place, text)
            span = span or self._span_by_exchange(messages, place, text, add_generation_prompt)
            if span is None or (spans and span[0] < spans[-1][1]):
                raise ValueError(
                    f"The chat template cannot mark what the assistant writes: the text before message {place} is no "
                    "prefix of the whole text, and another answer in its place changes more than its own part (or "
                    "nothing). Put `{% generation %}` and `{% endgeneration %}` around the assistant's text in "
                    "`tokenizer.chat_template`, or train on one answer at a time, with its `response_ids`."
                )
            spans.append(span)
        return spans

    def _span_by_prefixes(self, messages: list[Message], place: int, text: str) -> Span | None:
        try:
            bare = self.render(messages[:place])
            before = self.render(messages[:place], add_generation_prompt=True)
            after = self.render(messages[: place + 1])
        except ValueError:
            return None
        # Without a generation prompt the header of the assistant would count as its words.
        if bare == before or not (after.startswith(before) and text.startswith(after)):
            return None
        return len(before), len(after)

    def _span_by_exchange(
        self, messages: list[Message], place: int, text: str, add_generation_prompt: bool
    ) -> Span | None:
        stand_in = {"role": "assistant", "content": STAND_IN}
        other = self.render([*messages[:place], stand_in, *messages[place + 1 :]], add_generation_prompt)
        start = shared_start(text, other)
        shared_end = shared_start(text[start:][::-1], other[start:][::-1])
        changed = other[start : len(other) - shared_end]
        # A chain of thought goes with its answer, so more may change before the stand-in, inside of the same turn.
        before = self.render(messages[:place]) if place else ""
        in_own_turn = text.startswith(before) and start >= len(before)
        if not changed.endswith(STAND_IN) or STAND_IN in changed[:-1] or (changed != STAND_IN and not in_own_turn):
            return None
        return start, len(text) - shared_end

    def _tokenize(self, text: str, spans: list[Span]) -> tuple[list[int], list[Span]]:
        """Ids of the text and the token range of each span of characters.

        A token that reaches over the edge of a span could not be written by the assistant: the text is then cut there
        and its pieces are tokenized one by one, as in a conversation that goes on, where that gives the same text.
        """
        whole = None
        if self.tokenizer.is_fast:
            encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            starts, ends = (
                [start for start, _ in encoded["offset_mapping"]],
                [end for _, end in encoded["offset_mapping"]],
            )
            ranges = [(bisect_right(ends, start), bisect_left(starts, stop)) for start, stop in spans]
            whole = encoded["input_ids"], [(first, max(first, last)) for first, last in ranges]
            inside = [
                first == last or (starts[first] >= start and ends[last - 1] <= stop)
                for (start, stop), (first, last) in zip(spans, whole[1], strict=True)
            ]
            if all(inside):
                return whole
        ids, ranges = self._tokenize_pieces(text, spans)
        if whole is not None and self.tokenizer.decode(ids) != self.tokenizer.decode(whole[0]):
            return whole
        return ids, ranges

    def _tokenize_pieces(self, text: str, spans: list[Span]) -> tuple[list[int], list[Span]]:
        ids: list[int] = []
        ranges, end = [], 0
        for start, stop in spans:
            ids += self._ids(text[end:start])
            first = len(ids)
            ids += self._ids(text[start:stop])
            ranges.append((first, len(ids)))
            end = stop
        return ids + self._ids(text[end:]), ranges

    def _close_turn(self, ids: list[int], start: int, stop: int) -> int:
        """End of a range of ids, moved to just behind the end-of-turn token; where there is none, as it was."""
        special = self.special_ids

        def is_blank(piece: list[int]) -> bool:
            return not set(piece) & special and not self.tokenizer.decode(piece).strip()

        last = max((place for place in range(start, stop) if ids[place] in special), default=None)
        if last is not None and is_blank(ids[last + 1 : stop]):
            return last + 1
        following = next((place for place in range(stop, len(ids)) if ids[place] in special), None)
        if following is not None and is_blank(ids[stop:following]):
            return following + 1
        return stop


def mask_runs(mask: Any) -> list[Span]:
    """Runs of ones: mask [S] -> (start, stop) pairs."""
    values = [0, *(int(bool(value)) for value in mask), 0]
    edges = [place for place in range(len(values) - 1) if values[place] != values[place + 1]]
    return list(zip(edges[::2], edges[1::2], strict=True))


def shared_start(left: str, right: str) -> int:
    """Number of characters that both texts start with."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((place for place, (one, other) in pairs if one != other), min(len(left), len(right)))
