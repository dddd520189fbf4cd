"""Every target family, greedy and sampled from one candidate, one sequence and a ragged batch, both loops: the ids are
those of plain generate."""

import pytest
import torch

from tests.conftest import FAMILIES, build_target
from tests.decoding.test_batches import LENGTHS, oracle, ragged

NEW = 24
RULES = {"greedy": {"do_sample": False}, "top-k 1": {"do_sample": True, "top_k": 1}}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lengths", [LENGTHS[:1], LENGTHS], ids=["one", "ragged"])
def test_ids_are_those_of_plain_generate(family, lengths):
    target = build_target(family)
    ids, mask, prompts = ragged(lengths)
    options = {"attention_mask": mask, "max_new_tokens": NEW, "pad_token_id": 0}
    expected = target.generate(ids, do_sample=False, **options)
    drafter = oracle(target, prompts, expected)
    for name, rule in RULES.items():
        for loop in ("own", "stock") if len(ids) == 1 else ("own",):
            drafter.speculation.loop = loop
            out = target.generate(ids, assistant_model=drafter, **rule, **options)
            assert torch.equal(out, expected), (name, loop)
            assert drafter.last_acceptance.acceptance_length > 1.5
