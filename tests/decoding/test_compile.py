"""`SpeculationConfig(compile=True)`: compiled forwards on static caches give the same drafts and the same text."""

import pytest
import torch
import transformers
from transformers import CompileConfig
from transformers.cache_utils import StaticLayer

from tests.conftest import FAMILIES, HIDDEN, build_cycle_target, build_drafter, build_target, plain, prompt
from tests.decoding.test_batches import LENGTHS, ragged
from xpress_hf import SpeculationConfig, XPressDrafter
from xpress_hf.decoding.static_shapes import LENGTHS as CACHE_LENGTHS
from xpress_hf.modeling.drafter import BlockDraft

needs_rollback = pytest.mark.skipif(
    not StaticLayer.is_croppable, reason=f"static caches of transformers {transformers.__version__} cannot be cropped"
)
NEW = 40
# The target that counts has one dimension per token.
VOCAB = HIDDEN


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class CountingDrafter(XPressDrafter):
    """Keeps the logits of its blocks and drafts n + 1, n + 2, ... behind n instead, but for every fifth token: right
    in part on a target that counts."""

    def draft_block(self, target, known_ids, context_hidden_states, cache, choose=None, **kwargs):
        own = super().draft_block(target, known_ids, context_hidden_states, cache, **kwargs)
        self.blocks.append(own.logits)
        vocab = target.config.vocab_size
        ids = (known_ids[:, -1:] + 1 + torch.arange(self.config.num_draft_tokens)) % vocab
        ids = torch.where(ids % 5 == 0, 1, ids)
        logits = torch.nn.functional.one_hot(ids, vocab) * 40.0 - 20.0
        return BlockDraft(choose(logits, None), logits)


def counting(**overrides) -> CountingDrafter:
    drafter = build_drafter(kind=CountingDrafter, vocab_size=VOCAB, mask_token_id=VOCAB - 1, **overrides)
    drafter.blocks = []
    return drafter


def text(length: int = 9, seed: int = 5) -> torch.Tensor:
    return prompt(length, seed, VOCAB - 1)


def counter():
    """A backend that runs graphs as they are and lists them. Configs copy objects that count themselves."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    return graphs, backend


def compiled(target, ids, drafter, backend="eager", **options) -> torch.Tensor:
    drafter.speculation.compile = True
    return target.generate(
        ids,
        assistant_model=drafter,
        compile_config=CompileConfig(backend=backend, dynamic=False, mode="default"),
        do_sample=options.pop("do_sample", False),
        **options,
    )


@needs_rollback
@pytest.mark.parametrize("family", FAMILIES)
def test_texts_equal_plain_ones(family):
    target, drafter, ids = build_target(family), build_drafter(), prompt()
    assert torch.equal(compiled(target, ids, drafter, max_new_tokens=NEW), plain(target, ids, max_new_tokens=NEW))
    assert drafter.last_acceptance.num_cycles > 0


@needs_rollback
@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"slot_layout": "shift"},
        {"fusion": "layerwise"},
        {"block_attention": "causal"},
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 12},
        {"refiner": None},
    ],
    ids=["fill", "shift", "layerwise", "causal", "window", "bare"],
)
def test_blocks_equal_those_of_a_growing_cache(overrides):
    """New context rows that do not count, the block behind them, windows: nothing of it shows in a logit."""
    target, ids = build_cycle_target(VOCAB), text(20)
    drafter = counting(**overrides)
    expected = target.generate(ids, assistant_model=drafter, max_new_tokens=NEW, do_sample=False)
    blocks, record = drafter.blocks, drafter.last_acceptance
    drafter.blocks = []
    assert torch.equal(compiled(target, ids, drafter, max_new_tokens=NEW), expected)
    assert drafter.last_acceptance == record
    assert len(set(record.accepted)) > 2, "blocks follow different numbers of new rows"
    assert len(drafter.blocks) == len(blocks) > 5
    for found, right in zip(drafter.blocks, blocks, strict=True):
        torch.testing.assert_close(found, right, atol=1e-4, rtol=1e-4)


@needs_rollback
def test_a_pair_is_compiled_once():
    """One graph for verifications, one for blocks, whatever the prompt, until the longest text needs another cache;
    and one for a last step that has no room for a draft."""
    target, drafter = build_cycle_target(VOCAB), counting()
    graphs, backend = counter()
    compiled(target, text(), drafter, backend, max_new_tokens=NEW)
    assert len(graphs) == 2
    for length, new in ((1, 7), (30, NEW), (9, 2 * NEW)):
        ids = text(length, seed=length)
        out = compiled(target, ids, drafter, backend, max_new_tokens=new)
        assert torch.equal(out, plain(target, ids, max_new_tokens=new))
    assert len(graphs) == 2
    compiled(target, text(), drafter, backend, max_new_tokens=CACHE_LENGTHS)
    assert len(graphs) == 5


@needs_rollback
def test_plain_steps_in_between(monkeypatch):
    """What they leave for the next block to read has no fixed number of rows, so that block is not compiled."""
    from xpress_hf.decoding.budget import AutoLength

    lengths = iter([7, 0, 0, 3] * NEW)
    monkeypatch.setattr(AutoLength, "choose", lambda self, rows: next(lengths))
    target, drafter, ids = build_cycle_target(VOCAB), counting(), text()
    drafter.speculation.draft_length = "auto"
    graphs, backend = counter()
    out = compiled(target, ids, drafter, backend, max_new_tokens=NEW)
    assert torch.equal(out, plain(target, ids, max_new_tokens=NEW))
    assert len(graphs) == 3, "verifications of one token and of eight, blocks"


@needs_rollback
@pytest.mark.parametrize("sampled", [False, True])
def test_stop_rules_and_outputs(sampled):
    target, drafter, ids = build_cycle_target(VOCAB), counting(), text()
    options = {"max_new_tokens": NEW, "eos_token_id": 30, "return_dict_in_generate": True, "output_scores": True}
    options |= {"output_hidden_states": True, "do_sample": sampled, "top_k": 1 if sampled else None}
    out = compiled(target, ids, drafter, **options)
    expected = target.generate(ids, **options)
    assert torch.equal(out.sequences, expected.sequences)
    for found, right in zip(out.hidden_states, expected.hidden_states, strict=True):
        assert [one.shape for one in found] == [one.shape for one in right]
        torch.testing.assert_close(found[-1], right[-1], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(out.scores, expected.scores, atol=1e-3, rtol=1e-4)
    # Another call must not write into the cache that this one returned.
    compiled(target, text(seed=6), drafter, max_new_tokens=NEW)
    more = {"max_new_tokens": 9, "do_sample": False}
    on = target.generate(out.sequences, past_key_values=out.past_key_values, **more)
    assert torch.equal(on, target.generate(out.sequences, **more))


@needs_rollback
def test_after_an_exception_the_next_call_is_right():
    target, drafter, ids = build_cycle_target(VOCAB), counting(), text()

    def broken(text, scores):
        if text.shape[1] > ids.shape[1] + 12:
            raise RuntimeError("stop here")
        return scores

    compiled(target, ids, drafter, max_new_tokens=NEW)
    with pytest.raises(RuntimeError, match="stop here"):
        compiled(target, ids, drafter, max_new_tokens=NEW, logits_processor=[broken])
    assert torch.equal(compiled(target, ids, drafter, max_new_tokens=NEW), plain(target, ids, max_new_tokens=NEW))
    drafter.speculation.compile = None
    out = target.generate(ids, assistant_model=drafter, max_new_tokens=NEW, do_sample=False)
    assert torch.equal(out, plain(target, ids, max_new_tokens=NEW))


@needs_rollback
def test_another_dtype_gets_other_caches():
    target, drafter, ids = build_cycle_target(VOCAB), counting(), text()
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        target, drafter = target.to(dtype), drafter.to(dtype)
        out = compiled(target, ids, drafter, max_new_tokens=NEW)
        assert torch.equal(out, plain(target, ids, max_new_tokens=NEW))


def test_what_it_does_not_serve_is_named(target, drafter):
    drafter.speculation.compile = True
    ids, mask, _ = ragged(LENGTHS)
    with pytest.raises(ValueError, match=r"compile.*does not serve a batch"):
        target.generate(ids, attention_mask=mask, assistant_model=drafter, max_new_tokens=9, pad_token_id=0)
    options = {"assistant_model": drafter, "max_new_tokens": 9, "do_sample": False}
    with pytest.raises(ValueError, match=r"compile.*does not serve `cache_implementation`"):
        target.generate(text(), cache_implementation="static", **options)
    with pytest.raises(ValueError, match=r"compile.*does not serve `output_attentions`"):
        target.generate(text(), output_attentions=True, return_dict_in_generate=True, **options)
    drafter.speculation.loop = "stock"
    with pytest.raises(ValueError, match=r"`compile`=True takes our own loop"):
        target.generate(text(), **options)
    with pytest.raises(ValueError, match=r"`compile` must be True, False or None, got 'yes'"):
        SpeculationConfig(compile="yes")


@needs_rollback
@pytest.mark.slow
def test_inductor():
    target, drafter, ids = build_target(), build_drafter(), text()
    out = compiled(target, ids, drafter, "inductor", max_new_tokens=NEW)
    assert torch.equal(out, plain(target, ids, max_new_tokens=NEW))
