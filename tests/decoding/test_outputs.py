"""What generate() returns beside ids, caches that come in and go out, and prompts that are read in pieces.

Rows of the bug reports: D2 (windowed layers of the returned cache), D5 (static caches), D6 and D8 (going on from a
cache), D11 (chunked prefill), G2 (scores and logits, one per new token).
"""

import pytest
import torch
from transformers import StaticCache
from transformers.cache_utils import StaticLayer

from tests.conftest import OracleDrafter, build_drafter, build_target, plain, prompt
from tests.decoding.test_batches import oracle, ragged

NEW = 20
EVERYTHING = {
    "return_dict_in_generate": True,
    "output_scores": True,
    "output_logits": True,
    "output_hidden_states": True,
    "output_attentions": True,
}


def cache_of(output):
    return getattr(output, "cache", None) or output.past_key_values


def pair(target, ids, period=3, new=NEW, **overrides):
    """An oracle drafter that is wrong at every `period`th position."""
    drafter = build_drafter(kind=OracleDrafter, **overrides)
    drafter.continuation = plain(target, ids, max_new_tokens=new + 16)[0].tolist()
    drafter.is_wrong = lambda position: position % period == 0
    return drafter


def assert_same(found, expected, rows=None, pads=None):
    """Same entries, same ids, and every tensor of every step of the same shape and value.

    Args:
        rows: steps that each row took; plain decoding runs padding after them. pads: padding before each prompt, whose
            own states and attentions mean nothing.
    """
    assert type(found) is type(expected)
    assert list(found) == list(expected)
    assert torch.equal(found.sequences, expected.sequences)
    for name in ("scores", "logits", "hidden_states", "attentions"):
        ours, right = getattr(found, name), getattr(expected, name)
        if right is None:
            assert ours is None
            continue
        assert type(ours) is type(right)
        assert len(ours) == len(right)
        by_token = name in ("scores", "logits")
        for step, (one, other) in enumerate(zip(ours, right, strict=True)):
            for layer, wanted in zip((one,) if by_token else one, (other,) if by_token else other, strict=True):
                assert layer.shape == wanted.shape, (name, step)
                for row in range(len(layer)):
                    if rows is not None and step >= rows[row]:
                        continue
                    first = 0 if pads is None or by_token or step else pads[row]
                    places = (
                        (row, slice(first, None)) if name != "attentions" else (row, slice(None), slice(first, None))
                    )
                    if by_token:
                        places = (row,)
                    torch.testing.assert_close(layer[places], wanted[places], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("family", ["qwen3", "mistral-window", "gemma3", "gpt2"])
def test_every_output_of_one_sequence(family):
    target, ids = build_target(family, attn_implementation="eager"), prompt()
    drafter = pair(target, ids)
    options = {"max_new_tokens": NEW, "do_sample": False, **EVERYTHING}
    found = target.generate(ids, assistant_model=drafter, **options)
    assert_same(found, target.generate(ids, **options))
    assert drafter.last_acceptance.acceptance_length > 1.5


def test_every_output_of_a_batch():
    """Rows end apart; what a row holds after its end is not compared, since plain decoding runs padding there."""
    target = build_target(attn_implementation="eager")
    ids, mask, prompts = ragged((9, 4, 6))
    alone = [plain(target, one, max_new_tokens=NEW)[0, one.shape[1] :].tolist() for one in prompts]
    end = alone[1][4]
    options = {"attention_mask": mask, "max_new_tokens": NEW, "do_sample": False}
    options.update(eos_token_id=end, pad_token_id=0)
    found = target.generate(ids, assistant_model=oracle(target, prompts), **options, **EVERYTHING)
    steps = [row.index(end) + 1 if end in row else NEW for row in alone]
    assert min(steps) < max(steps)
    expected = target.generate(ids, **options, **EVERYTHING)
    assert_same(found, expected, steps, pads=[0, 5, 3])


def test_attentions_of_a_batch_whose_prompt_is_read_in_pieces():
    """Layers with a window show as many columns of earlier pieces as they keep."""
    target = build_target("mistral-window", attn_implementation="eager")
    ids, mask, prompts = ragged((20, 13))
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    options.update(EVERYTHING, prefill_chunk_size=6)
    expected = target.generate(ids, **options)
    assert expected.attentions[0][0].shape == (2, 4, 2, 8 - 1 + 2)
    assert_same(target.generate(ids, assistant_model=oracle(target, prompts), **options), expected, pads=[0, 7])


@pytest.mark.parametrize("family", ["qwen3", "mistral-window"])
def test_going_on_from_the_returned_cache(family):
    """D2, D6, D8: the cache holds all tokens but the last, layers with a window at most that many; going on with it
    gives the text of one long call, and acceptance as without a cache."""
    target, ids = build_target(family), prompt()
    drafter = pair(target, ids, period=5, new=2 * NEW)
    options = {"do_sample": False, "return_dict_in_generate": True}
    first = target.generate(ids, assistant_model=drafter, max_new_tokens=NEW, **options)
    cache = cache_of(first)
    assert cache.get_seq_length() == first.sequences.shape[1] - 1
    if family == "mistral-window":
        assert all(layer.keys.shape[2] <= 8 for layer in cache.layers)
    options["max_new_tokens"] = NEW
    warm = target.generate(first.sequences, past_key_values=cache, assistant_model=drafter, **options)
    warm_length = drafter.last_acceptance.acceptance_length
    assert torch.equal(warm.sequences, plain(target, ids, max_new_tokens=2 * NEW))
    assert cache_of(warm) is cache
    assert cache.get_seq_length() == warm.sequences.shape[1] - 1
    target.generate(first.sequences, assistant_model=drafter, **options)
    assert warm_length == drafter.last_acceptance.acceptance_length > 2


def test_the_drafter_reads_a_cached_prefix(target):
    """D10 on a warm start: the context rows are those of a cold call."""
    ids = prompt(14)
    seen = []
    drafter = build_drafter()
    drafter.fusion.register_forward_pre_hook(lambda _, args: seen.append(args[0].clone()))
    first = target.generate(ids[:, :6], max_new_tokens=1, do_sample=False, return_dict_in_generate=True)
    for cache in (None, cache_of(first)):
        target.generate(ids, past_key_values=cache, assistant_model=drafter, do_sample=False, max_new_tokens=3)
    cold, warm = (rows for rows in seen if rows.shape[1] == ids.shape[1])
    torch.testing.assert_close(warm, cold, atol=1e-5, rtol=1e-5)


def test_a_prefix_that_only_the_cache_knows_is_refused(target, drafter):
    ids = prompt(12)
    first = target.generate(ids, max_new_tokens=1, do_sample=False, return_dict_in_generate=True)
    with pytest.raises(ValueError, match=r"`past_key_values` holds 12 tokens.*ids of the whole text"):
        target.generate(
            ids[:, -1:],
            attention_mask=torch.ones(1, 13),
            past_key_values=cache_of(first),
            assistant_model=drafter,
            max_new_tokens=4,
        )


def test_rows_go_on_from_the_cache_of_a_batch(target):
    """Rows that ended apart, put together again: the next token of each row is as without a cache."""
    ids, mask, prompts = ragged((9, 4, 6))
    alone = [plain(target, one, max_new_tokens=NEW)[0, one.shape[1] :].tolist() for one in prompts]
    end = alone[1][4]
    options = {"do_sample": False, "pad_token_id": 0}
    found = target.generate(
        ids,
        attention_mask=mask,
        assistant_model=oracle(target, prompts),
        max_new_tokens=NEW,
        eos_token_id=end,
        return_dict_in_generate=True,
        **options,
    )
    cache, text = cache_of(found), found.sequences
    assert cache.get_seq_length() == text.shape[1] - 1
    rows = [ids.shape[1] + (row.index(end) + 1 if end in row else NEW) for row in alone]
    assert min(rows) < text.shape[1] == max(rows)
    width = cache.get_seq_length()
    for row, length in enumerate(rows):
        # The last token of a row has not been run, and columns behind it are empty.
        columns = mask.new_zeros(1, width + 1)
        columns[0, : mask.shape[1]] = mask[row]
        columns[0, mask.shape[1] : length - 1] = 1
        own = text[row : row + 1, :width][:, columns[0, :-1].bool()]
        columns[0, -1] = 1
        states = type(cache)()
        for number, layer in enumerate(cache.layers):
            states.update(layer.keys[row : row + 1], layer.values[row : row + 1], number)
        last, position = text[row : row + 1, length - 1, None], torch.tensor([[own.shape[1]]])
        found = target(last, attention_mask=columns, position_ids=position, past_key_values=states).logits[0, -1]
        expected = target(torch.cat([own, last], dim=1)).logits[0, -1]
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("size", [1, 4, 7, 50])
@pytest.mark.parametrize("rows", [(23,), (23, 11)])
def test_a_prompt_in_pieces(target, size, rows):
    """D11: the drafter sees every row of the prompt, whatever the pieces."""
    ids, mask, _ = ragged(rows)
    seen = []
    drafter = build_drafter()
    drafter.fusion.register_forward_pre_hook(lambda _, args: seen.append(args[0].clone()))
    options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    whole = target.generate(ids, assistant_model=drafter, **options)
    expected = seen[0]
    seen.clear()
    assert torch.equal(target.generate(ids, assistant_model=drafter, prefill_chunk_size=size, **options), whole)
    real = mask[..., None].bool() if len(rows) > 1 else slice(None)
    difference = (seen[0] - expected).abs()
    assert float((difference * real if len(rows) > 1 else difference).max()) < 1e-4
    assert torch.equal(whole, target.generate(ids, **options))


def test_a_static_cache_object(target, drafter):
    """D5"""
    ids = prompt()
    cache = StaticCache(config=target.config, max_cache_len=64)
    options = {"max_new_tokens": NEW, "do_sample": False}
    if StaticLayer.is_croppable:
        out = target.generate(ids, past_key_values=cache, assistant_model=drafter, **options)
        assert torch.equal(out, target.generate(ids, **options))
    else:
        with pytest.raises(ValueError, match=r"StaticCache.*cannot be rolled back"):
            target.generate(ids, past_key_values=cache, assistant_model=drafter, **options)


@pytest.mark.skipif(not StaticLayer.is_croppable, reason="static caches cannot be cropped in this transformers")
def test_attentions_over_a_static_cache():
    """One column for every place of the cache, empty ones included."""
    target, ids = build_target(attn_implementation="eager"), prompt()
    options = {"max_new_tokens": NEW, "do_sample": False, "cache_implementation": "static", **EVERYTHING}
    found = target.generate(ids, assistant_model=pair(target, ids), **options)
    expected = target.generate(ids, **options)
    assert_same(found, expected)
    assert expected.attentions[1][0].shape[-1] == ids.shape[1] + NEW - 1


def test_embeddings_behind_a_cached_prefix(target):
    """The drafter reads the prefix by the same embeddings as the target."""
    ids = prompt(12)
    embeds = target.get_input_embeddings()(ids)
    options = {"inputs_embeds": embeds, "max_new_tokens": NEW, "do_sample": False}
    expected = target.generate(ids, **options)
    first = target.generate(ids[:, :5], max_new_tokens=1, do_sample=False, return_dict_in_generate=True)
    drafter = pair(target, ids)
    out = target.generate(ids, past_key_values=cache_of(first), assistant_model=drafter, **options)
    assert torch.equal(out, expected)
    assert drafter.last_acceptance.acceptance_length > 1.5


def test_a_cache_that_cannot_be_rolled_back_is_refused(target, drafter):
    class Once(type(cache_of(target.generate(prompt(), max_new_tokens=1, return_dict_in_generate=True)))):
        is_croppable = False

    with pytest.raises(ValueError, match=r"Once.*cannot be rolled back"):
        target.generate(prompt(), past_key_values=Once(), assistant_model=drafter, max_new_tokens=4)
