"""One sequence in our own loop: streamers, criteria that read scores, exceptions. (G5)"""

import pytest
import torch
from transformers.generation import StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from tests.conftest import OracleDrafter, build_drafter, build_target, plain, prompt

NEW = 24


class Recorder(BaseStreamer):
    """Keeps every put; fails at the put of number `fails_at`."""

    def __init__(self, fails_at: int | None = None):
        self.puts, self.ended, self.fails_at = [], 0, fails_at

    def put(self, value):
        if len(self.puts) == self.fails_at:
            raise RuntimeError("no more paper")
        self.puts.append(value.flatten().tolist())

    def end(self):
        self.ended += 1


@pytest.fixture
def pair():
    target, ids = build_target(), prompt()
    drafter = build_drafter(kind=OracleDrafter)
    drafter.continuation = plain(target, ids, max_new_tokens=NEW + 16)[0].tolist()
    drafter.speculation.loop = "own"
    return target, drafter, ids


@pytest.mark.parametrize("offset", [None, *range(8)])
def test_streamed_ids_are_those_of_plain_decoding(pair, offset):
    """G5: with an end id at every offset of a block; the same puts as plain decoding, and nothing after the end."""
    target, drafter, ids = pair
    end = None if offset is None else drafter.continuation[ids.shape[1] + 1 + offset]
    streams = Recorder(), Recorder()
    options = {"max_new_tokens": NEW, "eos_token_id": end, "pad_token_id": 0}
    expected = plain(target, ids, streamer=streams[0], **options)
    out = plain(target, ids, streamer=streams[1], assistant_model=drafter, **options)
    assert torch.equal(out, expected)
    assert streams[1].puts == streams[0].puts
    assert [token for put in streams[1].puts for token in put] == out[0].tolist()
    assert streams[1].ended == 1


class HighScore(StoppingCriteria):
    """Stops at a given number of tokens and keeps what it saw."""

    def __init__(self, limit: int):
        self.limit, self.seen = limit, []

    def __call__(self, input_ids, scores, **kwargs):
        self.seen.append((input_ids[0].tolist(), None if scores is None else (len(scores), float(scores[-1].max()))))
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.limit)


@pytest.mark.parametrize("asked", [True, False])
def test_criteria_see_texts_and_scores_of_plain_decoding(pair, asked):
    target, drafter, ids = pair
    rules = HighScore(20), HighScore(20)
    options = {"max_new_tokens": NEW, "return_dict_in_generate": True, "output_scores": asked}
    expected = plain(target, ids, stopping_criteria=StoppingCriteriaList([rules[0]]), **options)
    out = plain(target, ids, stopping_criteria=StoppingCriteriaList([rules[1]]), assistant_model=drafter, **options)
    assert torch.equal(out.sequences, expected.sequences)
    assert [text for text, _ in rules[1].seen] == [text for text, _ in rules[0].seen]
    for (_, found), (_, right) in zip(rules[1].seen, rules[0].seen, strict=True):
        assert (found is None) == (right is None) == (not asked)
        if asked:
            assert found == (right[0], pytest.approx(right[1], abs=1e-3))


@pytest.mark.parametrize("where", ["streamer", "processor", "target"])
def test_a_call_after_an_exception_is_right(pair, where):
    target, drafter, ids = pair
    # transformers puts its own recorders of hidden states on a model, once, and leaves them there.
    target(ids, output_hidden_states=True)
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in target.modules()]
    options = {"max_new_tokens": NEW}
    if where == "streamer":
        options["streamer"] = Recorder(fails_at=6)
    elif where == "processor":
        options["logits_processor"] = [lambda ids, scores: scores if ids.shape[1] < 14 else scores / None]
    else:
        calls = []
        handle = target.register_forward_pre_hook(lambda *args: calls.append(1) or (len(calls) > 2 and 1 / 0) or None)
    with pytest.raises((RuntimeError, TypeError, ZeroDivisionError)):
        plain(target, ids, assistant_model=drafter, **options)
    if where == "target":
        handle.remove()
    assert [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in target.modules()] == hooks
    assert not target.training
    assert drafter.last_acceptance is None
    expected = plain(target, ids, max_new_tokens=NEW)
    assert torch.equal(plain(target, ids, assistant_model=drafter, max_new_tokens=NEW), expected)
