"""generate() around the drafter: streamers, threads, caches, outputs, and other assistants."""

import inspect
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import GenerationConfig
from transformers.generation import GenerationMixin
from transformers.generation.streamers import BaseStreamer

import xpress_hf
from tests.conftest import build_drafter, build_target, plain, prompt

LOOP_REFUSES_STATIC = "Static cache" in inspect.getsource(GenerationMixin._assisted_decoding)


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
    if implementation == "static" and LOOP_REFUSES_STATIC:
        with pytest.raises(ValueError, match="Static cache"):
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
