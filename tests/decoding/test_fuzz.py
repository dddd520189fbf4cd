"""Random valid arguments of generate(): with a drafter the answer is that of plain generate, ids, streamed ids and
everything else that is returned. More cases: `XPRESS_HF_FUZZ_CASES=3000 pytest tests/decoding/test_fuzz.py`."""

import random
import re

import pytest
import torch
from transformers import set_seed

from tests.conftest import build_config, build_drafter, fuzz_seeds
from tests.decoding.arguments import OUTPUTS, Case, draw_case, refusal
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
    """New tokens of each row, padding behind them left out."""
    if len(ids) == 1:
        return [ids.shape[1] - case.ids.shape[1]]
    new = ids[:, case.ids.shape[1] :]
    return [
        max([0, *(new[row] != case.options["pad_token_id"]).nonzero().flatten().add(1).tolist()])
        for row in range(len(new))
    ]


def settings(case: Case, drafter: XPressDrafter) -> list[dict]:
    target = case.target
    return [
        one.to_dict() for one in (target.config, target.generation_config, drafter.config, drafter.generation_config)
    ]


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
    if isinstance(drafter, RandomOracle) and drafter.rate == 0 and case.num_rows == 1:
        assert drafter.last_acceptance.accepted == drafter.last_acceptance.verified, "no draft was wrong"
    if isinstance(expected, torch.Tensor):
        assert isinstance(found, torch.Tensor)
        return
    width = case.ids.shape[1]
    assert_same(found, expected, steps_of(case, text), [width - one.shape[1] for one in case.prompts])
    assert cache_of(found).get_seq_length() == cache_of(expected).get_seq_length()


def shapes(output) -> dict[str, list]:
    """Shapes of every step of every entry that was asked for."""
    found = {}
    for name in OUTPUTS:
        if (steps := getattr(output, name)) is not None:
            found[name] = [[one.shape for one in (step if isinstance(step, tuple) else (step,))] for step in steps]
    return found


def check_end(case: Case, new: list[int]) -> None:
    """A row goes on until a stop rule, and nothing but padding stands behind its end."""
    options = case.options
    budget = options.get("max_new_tokens", options.get("max_length", 0) - case.ids.shape[1])
    ends = torch.tensor(options.get("eos_token_id", [])).flatten().tolist()
    end = next((place for place, token in enumerate(new) if token in ends), None)
    assert len(new) <= budget
    if end is not None:
        assert set(new[end + 1 :]) <= {options["pad_token_id"]}
    elif not {"stop_strings", "stopping_criteria", "max_time"} & set(options):
        assert len(new) == budget


@pytest.mark.parametrize("seed", [10**6 + seed for seed in fuzz_seeds(60)])
def test_random_arguments_of_sampled_texts(seed):
    """Another draw than plain generate's, so that form alone is compared; laws are tested in test_sampling."""
    case = draw_case(seed, sampled=True)
    drafter = build_drafter(seed, **case.overrides)
    if (words := refusal(case)) is not None:
        return check_refusal(case, words)
    set_seed(seed)
    expected, _ = answer(case)
    before = settings(case, drafter)
    found, ids = answer(case, drafter)
    assert settings(case, drafter) == before
    assert type(found) is type(expected)
    assert torch.equal(ids[:, : case.ids.shape[1]], case.ids.repeat_interleave(len(ids) // len(case.ids), dim=0))
    for row in ids[:, case.ids.shape[1] :].tolist():
        check_end(case, row)
    if isinstance(expected, torch.Tensor):
        return
    assert list(found) == list(expected)
    assert cache_of(found).get_seq_length() == ids.shape[1] - 1
    ours, theirs = shapes(found), shapes(expected)
    assert list(ours) == list(theirs)
    for name, steps in ours.items():
        assert len(steps) == ids.shape[1] - case.ids.shape[1]
        assert all(one == other for one, other in zip(steps, theirs[name], strict=False)), name
