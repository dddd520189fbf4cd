"""Random valid arguments of generate(): with a drafter the answer is that of plain generate, ids, streamed ids and
everything else that is returned. More cases: `XPRESS_HF_FUZZ_CASES=3000 pytest tests/decoding/test_fuzz.py`."""

import random
import re

import pytest
import torch
from transformers import set_seed

from tests.conftest import build_config, build_drafter, fuzz_seeds
from tests.decoding.arguments import Case, draw_case, refusal
from tests.decoding.test_batches import BatchOracle
from tests.decoding.test_calls import Collector
from tests.decoding.test_outputs import assert_same, cache_of
from xpress_hf import SpeculationConfig, XPressDrafter


class RandomOracle(BatchOracle):
    """Wrong at random places."""

    def errs(self, place: int, row: int) -> bool:
        return random.Random(f"{self.seed} {place} {row}").random() < self.rate


def oracle(case: Case, expected: torch.Tensor, seed: int) -> RandomOracle:
    torch.manual_seed(seed)
    drafter = RandomOracle(build_config(**case.overrides)).eval()
    drafter.seed, drafter.rate = seed, random.Random(seed).choice([0.0, 0.1, 0.3])
    width = case.ids.shape[1]
    drafter.texts = [row[width - one.shape[1] :].tolist() for row, one in zip(expected, case.prompts, strict=True)]
    return drafter


def answer(case: Case, drafter: XPressDrafter | None = None):
    """What generate() returns, its ids, and the ids that it streamed."""
    options, streamer = case.arguments(), Collector() if case.streamed else None
    if drafter is not None:
        drafter.speculation = SpeculationConfig(**case.speculation)
        options |= {"assistant_model": drafter, **case.ours}
    out = case.target.generate(case.ids, streamer=streamer, **options)
    ids = out if isinstance(out, torch.Tensor) else out.sequences
    if streamer is not None:
        assert streamer.ended == 1
        assert streamer.ids == ids[0].tolist()
    return out, ids


def steps_of(case: Case, ids: torch.Tensor) -> list[int]:
    """New tokens of each row up to the first end id."""
    new = ids[:, case.ids.shape[1] :]
    if "eos_token_id" not in case.options:
        return [new.shape[1]] * len(ids)
    ends = torch.isin(new, torch.tensor(case.options["eos_token_id"]))
    return [int(row.nonzero()[0]) + 1 if row.any() else len(row) for row in ends]


def settings(case: Case, drafter: XPressDrafter) -> list[dict]:
    target = case.target
    return [one.to_dict() for one in (target.config, target.generation_config, drafter.config, drafter.generation_config)]


def check_refusal(case: Case, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        answer(case, build_drafter(**case.overrides))


@pytest.mark.parametrize("seed", fuzz_seeds(300))
def test_random_arguments(seed):
    """Greedy, or sampling that leaves one candidate."""
    case = draw_case(seed)
    if (words := refusal(case)) is not None:
        return check_refusal(case, words)
    expected, text = answer(case)
    drafter = oracle(case, text, seed) if seed % 4 else build_drafter(seed, **case.overrides)
    before = settings(case, drafter)
    found, ids = answer(case, drafter)
    assert torch.equal(ids, text), case
    assert settings(case, drafter) == before
    if isinstance(expected, torch.Tensor):
        assert isinstance(found, torch.Tensor)
        return
    width = case.ids.shape[1]
    assert_same(found, expected, steps_of(case, text), [width - one.shape[1] for one in case.prompts])
    assert cache_of(found).get_seq_length() == cache_of(expected).get_seq_length()
