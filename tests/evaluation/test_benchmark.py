"""Arms on tiny models: same texts, rows whose times add up, hooks that leave no trace, runs that go on."""

import types

import pytest
import torch

from tests.conftest import build_cycle_target, build_drafter, build_target, prompt
from xpress_hf.evaluation.answering import EvaluationSettings
from xpress_hf.evaluation.arms import MEANINGS, Arm, default_arms, parse_arms
from xpress_hf.evaluation.benchmark import Benchmark, float32_twin
from xpress_hf.evaluation.prompts import BenchmarkPrompt, PromptSet
from xpress_hf.evaluation.records import PromptRecord, read_records
from xpress_hf.evaluation.time_split import DecodeClock
from xpress_hf.modeling import drafter as drafter_module

EVERYTHING = ("prompt-lookup", "assistant", "dflash", "bare", "refined", "loops", "control", "draft-lengths")


class WordIds:
    """Texts of numbers: what a number says is its id. No template."""

    chat_template = None

    def __call__(self, text, return_tensors=None):
        return {"input_ids": torch.tensor([[int(one) for one in text.split()]])}

    def decode(self, ids, skip_special_tokens=True):
        return " ".join(str(int(one)) for one in ids)


def words(seed: int, length: int = 9) -> str:
    return WordIds().decode(prompt(length, seed)[0])


def prompt_set(*turns: list[str]) -> list[PromptSet]:
    items = [BenchmarkPrompt(f"p/{number}", "p", list(texts)) for number, texts in enumerate(turns)]
    return [PromptSet("p.jsonl", "00", items)]


def benchmark(arm_words, target=None, drafter=None, new=20, **settings) -> Benchmark:
    drafter = drafter or build_drafter()
    arms = parse_arms(arm_words, drafter, build_target("llama", seed=7), build_drafter(seed=3))
    return Benchmark(target or build_target(), WordIds(), arms, EvaluationSettings(new, **settings))


def run(bench: Benchmark, sets: list[PromptSet], path=None, **options) -> list[PromptRecord]:
    names = {"target": "t", "drafter": "d", "assistant": "a", "control": "c"}
    return bench.run(sets, bench.header(sets, names), path, **options)


@pytest.fixture(scope="module")
def rows() -> dict[str, list[PromptRecord]]:
    """Rows by arm of a run of everything on one prompt and a chat of two turns."""
    bench = benchmark(EVERYTHING)
    bench.warm_up()
    found: dict[str, list[PromptRecord]] = {}
    for row in run(bench, prompt_set([words(1)], [words(2), words(3)])):
        found.setdefault(row.arm, []).append(row)
    return found


def test_every_arm_answers_every_turn_with_the_text_of_plain_generate(rows):
    lengths = ["draft_length=1", "draft_length=2", "draft_length=4"]
    assert sorted(rows) == sorted(["plain", *EVERYTHING[:5], "control", "loop=stock", *lengths])
    for name, own in rows.items():
        assert [(row.id, row.turn) for row in own] == [("p/0", 0), ("p/1", 0), ("p/1", 1)], name
        assert all(row.new_tokens == 20 for row in own)
        if name == "plain":
            assert all(row.agreement is None for row in own)
        else:
            assert all(row.agreement.equal for row in own), name
    # The second turn holds the first one and its answer.
    assert rows["plain"][2].prompt_tokens == 9 + 20 + 9


def test_parts_add_up_to_the_decode_time(rows):
    for name, own in rows.items():
        for row in own:
            assert set(row.split_s) == {"draft", "refine", "verify", "rest"}
            assert sum(row.split_s.values()) == pytest.approx(row.decode_s)
            assert row.split_s["verify"] > 0
            assert row.split_s["rest"] > 0
            assert (row.split_s["draft"] > 0) == (name not in ("plain", "prompt-lookup")), name
            sweeps = name in ("refined", "control", "loop=stock") or name.startswith("draft_length=")
            assert (row.split_s["refine"] > 0) == sweeps, name
            assert 0 < row.hooks_s < row.decode_s


def test_cycles_of_loops_that_keep_no_record(rows):
    for row, bare in zip(rows["dflash"], rows["bare"], strict=True):
        assert row.accepted == bare.accepted
        # The stock path never shortens its last blocks.
        assert set(row.verified) == {7}
        assert row.num_draft_tokens == bare.num_draft_tokens == 7
    for name in ("dflash", "assistant", "prompt-lookup"):
        for row in rows[name]:
            assert len(row.verified) == len(row.accepted)
            assert all(kept <= asked for kept, asked in zip(row.accepted, row.verified, strict=True))
            # What is no kept draft is the target's own, one per forward.
            assert row.new_tokens - sum(row.accepted) >= len(row.accepted)
    assert all(row.accepted == [] and row.num_draft_tokens == 0 for row in rows["plain"])
    assert all(max(row.verified) == 2 for row in rows["draft_length=2"])
    assert [row.accepted for row in rows["loop=stock"]] == [row.accepted for row in rows["refined"]]


def test_a_draft_that_is_verified_with_the_prompt_belongs_to_the_prefill():
    """0 1 2 3 0 1 2 3: lookup drafts from the prompt before the first forward, and all of it is right."""
    bench = benchmark(["prompt-lookup"], build_cycle_target(period=4), build_drafter(vocab_size=16, mask_token_id=15))
    plain, lookup = run(bench, prompt_set(["0 1 2 3 0 1 2 3 0 1 2 3"]))
    assert plain.prefill_tokens == 1
    assert lookup.verified[0] == lookup.accepted[0] == lookup.prefill_tokens - 1 > 0
    assert sum(lookup.accepted) + len(lookup.accepted) == lookup.new_tokens == 20


def test_hooks_leave_no_trace():
    target, drafter = build_target(), build_drafter()
    before = drafter_module.refine_block

    def stop_inside() -> None:
        with DecodeClock(target, drafter).running() as clock:
            assert "draft_block" in vars(drafter)
            target.generate(prompt(), assistant_model=drafter, max_new_tokens=8, do_sample=False)
            assert clock.seconds["refine"] > 0
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        stop_inside()
    assert "draft_block" not in vars(drafter)
    assert drafter_module.refine_block is before
    for module in (target, target.get_output_embeddings(), drafter):
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def test_the_drafter_keeps_its_settings():
    drafter = build_drafter()
    drafter.speculation.sweeps = 3
    mine = drafter.speculation
    bench = benchmark(["refined", "sweeps"], drafter=drafter)
    assert [arm.name for arm in bench.arms] == ["plain", "refined", *(f"sweeps={k}" for k in (0, 1, 2, 4, 5, 6, 7))]
    run(bench, prompt_set([words(1)]))
    assert drafter.speculation is mine
    assert mine.to_dict() == {"sweeps": 3}


def test_the_order_rotates_from_prompt_to_prompt(monkeypatch):
    bench = benchmark(["bare", "refined"])
    order = []
    timed = bench._timed
    monkeypatch.setattr(bench, "_timed", lambda arm, *args: order.append(arm.name) or timed(arm, *args))
    run(bench, prompt_set([words(1)], [words(2)], [words(3)]))
    assert order == ["plain", "bare", "refined", "bare", "refined", "plain", "refined", "plain", "bare"]


def untimed(rows: list[PromptRecord]) -> set[str]:
    """Everything but times."""
    timed = ("prefill_s", "decode_s", "split_s", "hooks_s")
    return {str({key: value for key, value in row.to_dict().items() if key not in timed}) for row in rows}


def test_an_interrupted_run_goes_on(tmp_path):
    sets = prompt_set([words(1)], [words(2), words(3)])
    whole = run(benchmark(["refined", "prompt-lookup"]), sets, tmp_path / "whole.jsonl")
    path = tmp_path / "rows.jsonl"

    def stop(count: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(benchmark(["refined", "prompt-lookup"]), sets, path, on_answer=stop)
    header, rows = read_records(path)
    assert {row.id for row in rows} == {"p/0"}
    assert list(header["arms"]) == ["plain", "refined", "prompt-lookup"]
    assert header["arms"]["refined"] == {"sweeps": 2, "draft_length": 7, "loop": "own"}
    counts = []
    assert untimed(run(benchmark(["refined", "prompt-lookup"]), sets, path, on_answer=counts.append)) == untimed(whole)
    assert counts == [3, 6]
    # A row lost, its prompt is answered again and the other rows stay.
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    assert untimed(run(benchmark(["refined", "prompt-lookup"]), sets, path)) == untimed(whole)
    assert len(read_records(path)[1]) == 9
    with pytest.raises(ValueError, match="`arms`"):
        run(benchmark(["refined"]), sets, path)


def test_sampled_answers_have_times_and_no_agreement():
    rows = run(benchmark(["refined"], temperatures=(0.0, 0.9), seeds=(0, 1)), prompt_set([words(1)]))
    assert [(row.arm, row.temperature, row.seed) for row in rows] == [
        (arm, *draw) for draw in ((0.0, 0), (0.9, 0), (0.9, 1)) for arm in ("plain", "refined")
    ]
    assert [row.agreement is None for row in rows if row.arm == "refined"] == [False, True, True]


def test_a_later_turn_without_room_is_left_out_and_a_first_one_refused():
    bench = benchmark(["bare"], build_target(max_position_embeddings=50))
    rows = run(bench, prompt_set([words(1), words(2)]))
    assert [row.turn for row in rows] == [0, 0]
    assert bench.skipped == ["p/0, turn 1: 38 tokens of conversation"]
    with pytest.raises(ValueError, match=r"p/0: 40 tokens.*50 places"):
        run(bench, prompt_set([words(1, length=40)]))


@pytest.mark.parametrize(
    ("arm_words", "options", "error"),
    [
        (["fast"], {}, "unknown arm 'fast'; known arms are plain"),
        (["plain+sweeps=2"], {}, "'plain' takes no settings"),
        (["refined+speed=2"], {}, "'speed=2'.*field=value"),
        (["refined+compile=yes"], {}, "`compile` must be True, False or None, got 'yes'"),
        (["refined+sweeps=-1"], {}, "`sweeps` must be"),
        (["assistant"], {}, "--assistant"),
        (["control"], {}, "--control"),
        (["refined"], {"refiner": None}, "needs a refiner"),
        (["sweeps"], {"refiner": None}, "needs a refiner"),
        (["dflash"], {"slot_layout": "shift"}, "'dflash' cannot be run.*'fill'"),
    ],
)
def test_arms_that_cannot_be(arm_words, options, error):
    with pytest.raises(ValueError, match=error):
        parse_arms(arm_words, build_drafter(**options))


def test_arms_and_what_they_mean():
    drafter, other = build_drafter(), build_drafter(seed=3)
    arms = parse_arms(["loops", "refined", "refined+sweeps=3+loop=stock", "control+sweeps=0"], drafter, None, other)
    # Our own loop is the default: the same arm.
    assert [arm.name for arm in arms] == [
        "plain",
        "loop=stock",
        "loop=own",
        "refined+sweeps=3+loop=stock",
        arms[-1].name,
    ]
    assert arms[-1].drafter is other
    assert arms[-1].kind == "control"
    assert arms[3].settings() == {"sweeps": 3, "draft_length": 7, "loop": "stock"}
    assert parse_arms(["refined+compile=true"], drafter)[1].speculation.compile is True
    lengths = parse_arms(["draft-lengths"], build_drafter(block_size=6))
    assert [arm.name for arm in lengths[1:]] == [f"draft_length={length}" for length in (1, 2, 4, 5)]
    assert default_arms(drafter, True, False) == ["plain", "prompt-lookup", "assistant", "dflash", "bare", "refined"]
    assert default_arms(build_drafter(refiner=None, slot_layout="shift"), False, True) == [
        "plain",
        "prompt-lookup",
        "bare",
        "control",
    ]
    assert set(EVERYTHING) < set(MEANINGS)


def test_a_twin_in_float32_where_it_fits(monkeypatch):
    target = build_target().to(torch.bfloat16)
    twin = float32_twin(target)
    assert twin.dtype == torch.float32
    assert target.dtype == torch.bfloat16
    assert torch.equal(twin.lm_head.weight, target.lm_head.weight.float())
    assert float32_twin(twin) is twin
    memory = types.SimpleNamespace(available=1000)
    monkeypatch.setattr("xpress_hf.evaluation.benchmark.psutil.virtual_memory", lambda: memory)
    assert float32_twin(target) is target


def test_a_warm_up_of_a_target_with_few_tokens():
    bench = Benchmark(build_cycle_target(), WordIds(), [Arm("plain")], EvaluationSettings(4))
    bench.warm_up()
    assert bench.span_cost_s > 0
