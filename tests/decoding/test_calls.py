"""generate() around the drafter: streamers, threads, caches, outputs, and other assistants."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import GenerationConfig, SynthIDTextWatermarkingConfig
from transformers.cache_utils import StaticLayer
from transformers.generation import (
    EosTokenCriteria,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
    SuppressTokensLogitsProcessor,
)
from transformers.generation.streamers import BaseStreamer

import xpress_hf
from tests.conftest import OracleDrafter, build_drafter, build_target, plain, prompt
from xpress_hf.decoding.candidates import confident_slots

NEW = 20


class Collector(BaseStreamer):
    """Keeps what it is given, in order."""

    def __init__(self):
        self.ids, self.ended = [], 0

    def put(self, value):
        assert not self.ended
        self.ids += value.flatten().tolist()

    def end(self):
        self.ended += 1


def test_streamed_ids_are_the_returned_ids(target, drafter):
    streamer = Collector()
    out = target.generate(prompt(), assistant_model=drafter, streamer=streamer, max_new_tokens=30, do_sample=False)
    assert streamer.ids == out[0].tolist()
    assert streamer.ended == 1


def test_threads_do_not_see_each_other(target):
    """One target, two drafters, two threads: each call gets its own text and its own record."""
    jobs = [(build_drafter(seed), prompt(6 + seed, seed)) for seed in range(2)]
    alone = []
    for drafter, ids in jobs:
        text = target.generate(ids, assistant_model=drafter, max_new_tokens=40, do_sample=False)
        alone.append((text, drafter.last_acceptance.accepted))

    def run(job):
        drafter, ids = job
        return target.generate(ids, assistant_model=drafter, max_new_tokens=40, do_sample=False)

    with ThreadPoolExecutor(2) as pool:
        texts = list(pool.map(run, jobs * 4))
    for (drafter, _), (text, accepted), found in zip(jobs * 4, alone * 4, texts, strict=True):
        assert torch.equal(found, text)
        assert drafter.last_acceptance.accepted == accepted


def test_other_assistants_are_left_alone(target, drafter):
    ids = prompt()
    expected = plain(target, ids, max_new_tokens=20)
    assistant = build_target(seed=3)
    assert torch.equal(target.generate(ids, assistant_model=assistant, max_new_tokens=20, do_sample=False), expected)
    out = target.generate(ids, prompt_lookup_num_tokens=3, max_new_tokens=20, do_sample=False)
    assert torch.equal(out, expected)
    assert drafter.last_acceptance is None


def test_installing_twice_changes_nothing(target, drafter):
    method = type(target)._assisted_decoding
    xpress_hf.install()
    assert type(target)._assisted_decoding is method


def test_outputs_as_a_dict(target, drafter):
    ids = prompt()
    out = target.generate(
        ids,
        assistant_model=drafter,
        max_new_tokens=20,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
    )
    expected = target.generate(
        ids, max_new_tokens=20, do_sample=False, return_dict_in_generate=True, output_scores=True
    )
    assert torch.equal(out.sequences, expected.sequences)
    assert len(out.scores) == len(expected.scores)
    for found, right in zip(out.scores, expected.scores, strict=True):
        torch.testing.assert_close(found, right, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("implementation", ["static", "dynamic"])
def test_cache_implementations(target, drafter, implementation):
    ids = prompt()
    options = {"max_new_tokens": 24, "do_sample": False, "cache_implementation": implementation}
    if implementation == "static" and not StaticLayer.is_croppable:
        with pytest.raises(ValueError, match="cannot be rolled back"):
            target.generate(ids, assistant_model=drafter, **options)
    else:
        out = target.generate(ids, assistant_model=drafter, **options)
        assert torch.equal(out, plain(target, ids, max_new_tokens=24))


def test_configurations_are_unchanged_afterwards(target, drafter):
    before = target.generation_config.to_dict(), drafter.generation_config.to_dict(), drafter.config.to_dict()
    target.generate(prompt(), assistant_model=drafter, max_new_tokens=12, do_sample=False)
    assert (
        target.generation_config.to_dict(),
        drafter.generation_config.to_dict(),
        drafter.config.to_dict(),
    ) == before


@pytest.mark.parametrize("length", [1, 3, 7, 50])
def test_draft_length_bounds_what_is_verified(target, drafter, length):
    drafter.speculation.draft_length = length
    ids = prompt()
    out = target.generate(ids, assistant_model=drafter, max_new_tokens=30, do_sample=False)
    assert torch.equal(out, plain(target, ids, max_new_tokens=30))
    assert max(drafter.last_acceptance.verified) == min(length, 7)


def test_a_generation_config_object(target, drafter):
    ids = prompt()
    config = GenerationConfig(max_new_tokens=16, do_sample=False)
    out = target.generate(ids, generation_config=config, assistant_model=drafter)
    assert torch.equal(out, plain(target, ids, max_new_tokens=16))


def test_embeddings_without_ids_are_refused_by_name(target, drafter):
    ids = prompt()
    embeds = target.get_input_embeddings()(ids)
    with pytest.raises(ValueError, match="inputs_embeds"):
        target.generate(inputs_embeds=embeds, assistant_model=drafter, max_new_tokens=16, do_sample=False)
    expected = plain(target, ids, max_new_tokens=16)
    out = target.generate(ids, inputs_embeds=embeds, assistant_model=drafter, max_new_tokens=16, do_sample=False)
    assert torch.equal(out, expected)


def oracle_for(target, ids, new=30):
    drafter = build_drafter(kind=OracleDrafter)
    drafter.continuation = plain(target, ids, max_new_tokens=new + 16)[0].tolist()
    return drafter


@pytest.mark.parametrize("loop", ["own", "stock"])
@pytest.mark.parametrize("kind", ["end", "length", "sampled end"])
def test_criteria_of_the_user_take_the_place_of_the_defaults(target, loop, kind):
    """An end id or a length that only a criterion object knows stops the text inside a block."""
    ids = prompt()
    drafter = oracle_for(target, ids)
    drafter.speculation.loop = loop
    new = drafter.continuation[ids.shape[1] :]
    options = {"max_new_tokens": 30, "do_sample": False, "pad_token_id": 0}
    if kind == "sampled end":
        options |= {"do_sample": True, "top_k": 1, "eos_token_id": new[4]}
    rule = MaxLengthCriteria(14) if kind == "length" else EosTokenCriteria(eos_token_id=new[4])
    rules = StoppingCriteriaList([rule])
    expected = target.generate(ids, stopping_criteria=rules, **options)
    out = target.generate(ids, stopping_criteria=rules, assistant_model=drafter, **options)
    assert torch.equal(out, expected)
    assert out.shape[1] == 14


def test_a_longer_length_criterion_than_the_budget_is_refused(target, drafter):
    rules = StoppingCriteriaList([MaxLengthCriteria(50)])
    with pytest.raises(ValueError, match="MaxLengthCriteria"):
        target.generate(prompt(), stopping_criteria=rules, assistant_model=drafter, max_new_tokens=5)


class BansLast(SuppressTokensLogitsProcessor):
    """A subclass of a warper that ignores ids, which looks at them all the same."""

    def __init__(self):
        super().__init__([0])

    def __call__(self, input_ids, scores):
        return scores.scatter(-1, input_ids[:, -3:], -torch.inf)


@pytest.mark.parametrize("loop", ["own", "stock"])
def test_a_subclass_of_a_position_free_warper_sees_every_place(target, loop):
    ids = prompt()
    options = {"logits_processor": LogitsProcessorList([BansLast()]), "max_new_tokens": 30, "do_sample": False}
    expected = target.generate(ids, **options)
    drafter = build_drafter(kind=OracleDrafter)
    drafter.continuation, drafter.speculation.loop = expected[0].tolist(), loop
    assert torch.equal(target.generate(ids, assistant_model=drafter, **options), expected)


@pytest.mark.parametrize("loop", ["own", "stock"])
@pytest.mark.parametrize("warper", [{}, {"eta_cutoff": 1e-3}, {"typical_p": 0.9}], ids=str)
def test_a_law_without_its_candidates_can_be_drawn_from(target, loop, warper):
    """The refiner's only candidate of a slot may be suppressed."""
    drafter = build_drafter()
    drafter.speculation.top_candidates, drafter.speculation.loop = 1, loop
    options = {"do_sample": True, "max_new_tokens": 20, "suppress_tokens": list(range(0, 60, 2)), **warper}
    out = target.generate(prompt(), assistant_model=drafter, **options)
    assert not [token for token in out[0, 9:].tolist() if token < 60 and token % 2 == 0]


def test_processors_with_a_memory_are_refused(target, drafter):
    config = SynthIDTextWatermarkingConfig(keys=[1, 2, 3, 4], ngram_len=3)
    with pytest.raises(ValueError, match="SynthID"):
        target.generate(prompt(), assistant_model=drafter, watermarking_config=config, max_new_tokens=4)


@pytest.mark.parametrize("loop", ["own", "stock"])
def test_a_confidence_threshold_cuts_behind_the_first_unsure_slot(target, drafter, loop):
    ids = prompt()
    drafter.speculation.loop, drafter.speculation.sweeps = loop, 0
    target.generate(ids, assistant_model=drafter, max_new_tokens=NEW, do_sample=False)
    whole = drafter.last_acceptance
    drafter.generation_config.assistant_confidence_threshold = 1.0
    out = target.generate(ids, assistant_model=drafter, max_new_tokens=NEW, do_sample=False)
    assert torch.equal(out, plain(target, ids, max_new_tokens=NEW))
    assert set(drafter.last_acceptance.verified) == {1}, "no slot is certain"
    target.generate(
        ids, assistant_model=drafter, max_new_tokens=NEW, do_sample=False, assistant_confidence_threshold=1e-6
    )
    assert drafter.last_acceptance == whole


def test_unsure_slots_in_closed_form():
    laws = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.7, 0.3]]).log()[None]
    for threshold, slots in ((0.5, 3), (0.65, 2), (0.95, 1)):
        assert confident_slots(laws, threshold).tolist() == [slots]


def test_a_text_longer_than_the_drafter_was_made_for_is_told_once(target, caplog):
    """D13"""
    drafter, ids = build_drafter(max_position_embeddings=16), prompt()
    for _ in range(2):
        out = target.generate(ids, assistant_model=drafter, max_new_tokens=NEW, do_sample=False)
        assert torch.equal(out, plain(target, ids, max_new_tokens=NEW))
    assert sum("was made for 16" in one.getMessage() for one in caplog.records) == 1


def test_a_compiled_drafter_is_recognised(target, drafter):
    ids = prompt()
    wrapped = torch.compile(drafter, backend="eager")
    assert torch.equal(
        target.generate(ids, assistant_model=wrapped, max_new_tokens=12, do_sample=False),
        plain(target, ids, max_new_tokens=12),
    )
