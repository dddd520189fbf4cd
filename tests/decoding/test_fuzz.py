"""Random valid arguments of generate(): with a drafter the ids are those of plain generate, in both loops."""

import random

import pytest
import torch

from tests.conftest import FAMILIES, build_drafter, build_target
from tests.decoding.test_batches import oracle, ragged

CASES = 60


def draw_options(rng: random.Random) -> dict:
    """Arguments that plain generate accepts together."""
    options = {"max_new_tokens": rng.randint(1, 30), "do_sample": False, "pad_token_id": rng.choice([0, 5])}
    optional = {
        "repetition_penalty": lambda: rng.choice([0.8, 1.2]),
        "no_repeat_ngram_size": lambda: rng.choice([2, 3]),
        "min_new_tokens": lambda: rng.randint(0, options["max_new_tokens"]),
        "suppress_tokens": lambda: rng.sample(range(60), 5),
        "bad_words_ids": lambda: [[rng.randint(0, 60)], rng.sample(range(60), 2)],
        "sequence_bias": lambda: [[[rng.randint(0, 60)], 3.0]],
        "exponential_decay_length_penalty": lambda: (5, 1.2),
        "renormalize_logits": lambda: True,
    }
    for name in rng.sample(sorted(optional), rng.randint(0, 3)):
        options[name] = optional[name]()
    if rng.random() < 0.6 or "exponential_decay_length_penalty" in options:
        options["eos_token_id"] = rng.choice([rng.randint(0, 60), rng.sample(range(60), 6)])
    return options


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(CASES))
def test_random_arguments(seed):
    rng = random.Random(seed)
    target = build_target(rng.choice(sorted(FAMILIES)))
    lengths = rng.sample(range(1, 16), rng.choice([1, 1, 3]))
    ids, mask, prompts = ragged(lengths, pad=rng.choice([0, 7]))
    options = draw_options(rng)
    expected = target.generate(ids, attention_mask=mask, **options)
    overrides = {"block_size": rng.choice([2, 4, 8]), "slot_layout": rng.choice(["fill", "shift"])}
    for drafter in (build_drafter(seed, **overrides), oracle(target, prompts, expected, **overrides)):
        drafter.speculation.sweeps = rng.choice([0, 1, 3, None])
        drafter.speculation.loop = rng.choice(["own", "stock"]) if len(lengths) == 1 else None
        out = target.generate(ids, attention_mask=mask, assistant_model=drafter, **options)
        assert torch.equal(out, expected), (options, lengths, drafter.speculation)
