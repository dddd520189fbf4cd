"""Figures, pages and comparisons from rows whose figures are known in closed form."""

import base64
import re
import sys
from dataclasses import replace

import pytest

from xpress_hf.evaluation.comparison import BEYOND, NOISE, TOO_FEW, compare
from xpress_hf.evaluation.figures import figures
from xpress_hf.evaluation.records import Agreement, PromptRecord
from xpress_hf.evaluation.report import comparison_report, run_report
from xpress_hf.evaluation.tables import run_tables

HEADER = {
    "kind": "run",
    "command": "xpress-hf benchmark",
    "dtype": "bfloat16",
    "target": {"name": "the <target>"},
    "drafter": {"name": "the drafter"},
    "arms": {
        "plain": {},
        "prompt-lookup": {"prompt_lookup_num_tokens": 10},
        "bare": {"sweeps": 0, "draft_length": 3, "loop": "stock"},
        "sweeps=1": {"sweeps": 1, "draft_length": 3, "loop": "stock"},
        "refined": {"sweeps": 2, "draft_length": 3, "loop": "stock"},
    },
}


def row(arm: str, number: int, accepted: list[int], speed: float, **values) -> PromptRecord:
    """An answer of 1 + sum(accepted + 1) tokens, decoded at `speed` tokens/s."""
    new = 1 + sum(accepted) + len(accepted) if arm != "plain" else 11
    decode_s = (new - 1) / speed
    shares = {"draft": 0.2, "refine": 0.1, "verify": 0.5, "rest": 0.2}
    if arm == "plain":
        shares = {"draft": 0.0, "refine": 0.0, "verify": 0.9, "rest": 0.1}
    fields = {
        "benchmark": "gsm8k" if number % 2 else "humaneval",
        "id": f"p/{number}",
        "turn": 0,
        "seed": 0,
        "temperature": 0.0,
        "prompt_tokens": 7,
        "num_draft_tokens": 0 if arm == "plain" else 3,
        "agreement": None if arm == "plain" else Agreement(True),
        "prefill_s": 0.125,
        "split_s": {part: share * decode_s for part, share in shares.items()},
        "hooks_s": 0.004 * decode_s,
    }
    cycles = (
        {"accepted": [], "verified": []} if arm == "plain" else {"accepted": accepted, "verified": [3] * len(accepted)}
    )
    return PromptRecord(**{"arm": arm, **fields, **cycles, "new_tokens": new, "decode_s": decode_s, **values})


def example(prompts: int = 8, faster: float = 1.0) -> list[PromptRecord]:
    """Refined is 1.5 to 2.2 times as fast as plain."""
    rows = []
    for number in range(prompts):
        rows += [
            row("plain", number, [], 10.0),
            row("prompt-lookup", number, [0, 0, 3], 9.0),
            row("bare", number, [1, 1, number % 3], 14.0),
            row("sweeps=1", number, [1, 2, number % 3], 15.0),
            row("refined", number, [2, 3, number % 4], faster * (15.0 + number)),
        ]
    return rows


def of(rows: list[PromptRecord], arm: str, group: str = "all"):
    return next(one for one in figures(HEADER, rows)[0.0][group] if one.arm == arm)


def test_closed_form_figures():
    refined = of(example(), "refined")
    assert refined.prompts == 8
    assert refined.record.num_cycles == 24
    assert refined.acceptance_length.value == pytest.approx(1 + (8 * 5 + 2 * (0 + 1 + 2 + 3)) / 24)
    assert refined.tokens_per_s.median == pytest.approx(18.5)
    assert (refined.tokens_per_s.low, refined.tokens_per_s.high) == pytest.approx((16.75, 20.25))
    assert refined.speedup.median == pytest.approx(1.85)
    assert 1.5 <= refined.speedup_interval.low < 1.85 < refined.speedup_interval.high <= 2.2
    assert refined.prefill_s.median == 0.125
    assert refined.hooks_share == pytest.approx(0.004)
    total = sum(one.decode_s for one in example() if one.arm == "refined")
    assert sum(refined.cycle_s.values()) == pytest.approx(total / 24)
    assert refined.cycle_s["refine"] == pytest.approx(0.1 * total / 24)
    # A cycle spends a fifth of its time on neither drafting nor verifying, and half of it in the target.
    assert refined.bounds.share == pytest.approx(0.8)
    assert refined.bounds.forwards == pytest.approx(refined.bounds.measured / 0.8)
    assert refined.bounds.free_drafts == pytest.approx(refined.bounds.measured / 0.5)
    tokens = sum(one.new_tokens - 1 for one in example() if one.arm == "refined")
    assert refined.bounds.measured == pytest.approx(tokens / total / 10.0)
    assert of(example(), "refined", "gsm8k").tokens_per_s.median == pytest.approx(19.0)


def test_plain_generate_is_the_measure():
    plain = of(example(), "plain")
    assert plain.speedup.median == 1
    assert plain.bounds is None
    assert plain.acceptance_length is None
    # Ten tokens behind the prefill, one forward each.
    assert plain.cycle_s["verify"] == pytest.approx(0.09)


def test_tokens_of_the_prefill_do_not_count_as_decoded():
    slow = [replace(one, prefill_tokens=4) if one.arm == "prompt-lookup" else one for one in example()]
    # Six tokens in the time, three of them from the prefill.
    assert of(slow, "prompt-lookup").tokens_per_s.median == pytest.approx(9.0 * 3 / 6)
    assert of(slow, "prompt-lookup").cycle_s == of(example(), "prompt-lookup").cycle_s


def test_an_arm_with_other_ids_has_no_speed_figure():
    """One text of eight differs at a gap of 0.1, far from a tie."""
    rows = example()
    wrong = next(index for index, one in enumerate(rows) if one.arm == "refined")
    rows[wrong] = replace(rows[wrong], agreement=Agreement(False, 3, 0.1))
    refined = of(rows, "refined")
    assert (refined.equal, refined.ties, refined.faults) == (7, 0, 1)
    assert "1 of 8 texts" in refined.refused
    assert refined.tokens_per_s is refined.speedup is refined.speedup_interval is refined.bounds is None
    assert refined.acceptance_length is not None
    page = run_report(HEADER, rows)
    assert "No speed figure for refined: 1 of 8 texts" in page
    cells = re.search(r"<td>refined</td>(.*?)</tr>", page).group(1)
    assert cells.count("<td>-</td>") == 4
    assert of(rows, "bare").speedup is not None


@pytest.mark.parametrize("gap", [0.01, 1e-5])
def test_near_ties_are_counted_and_forgiven_by_the_dtype(gap):
    rows = [replace(one, agreement=Agreement(False, 3, gap)) if one.arm == "bare" else one for one in example()]
    bare = of(rows, "bare")
    assert (bare.equal, bare.ties, bare.faults) == (0, 8, 0)
    assert bare.speedup is not None
    exact = figures({**HEADER, "dtype": "float32"}, rows)[0.0]["all"]
    assert bool(next(one for one in exact if one.arm == "bare").refused) == (gap > 1e-4)


def test_a_text_that_only_ends_earlier_is_a_fault():
    rows = [replace(one, agreement=Agreement(False, 3, None)) if one.arm == "bare" else one for one in example()]
    assert of(rows, "bare").faults == 8


def images(page: str) -> list[bytes]:
    return [base64.b64decode(one) for one in re.findall(r'src="data:image/png;base64,([^"]+)"', page)]


def test_the_page_holds_the_numbers_of_the_rows():
    pytest.importorskip("matplotlib", reason="pictures need matplotlib, which the extra `eval` brings")
    page = run_report(HEADER, example())
    for number in ("2.583", "18.5 (16.8 to 20.2)", "1.85 (1.68 to 2.02)", "125.0", "0.40%", "80%"):
        assert number in page, number
    for word in ("gsm8k: 4 prompts", "humaneval: 4 prompts", "xpress-hf benchmark", "the &lt;target&gt;"):
        assert word in page, word
    # Histogram, slots, sweeps, cycle, speed-up; no curve of draft lengths.
    assert len(images(page)) == 5
    assert all(image.startswith(b"\x89PNG") for image in images(page))
    # Nothing outside the file is needed.
    assert not re.search(r"https?://|<script|<link", page)


def test_rows_without_times():
    """What `evaluate` writes has acceptance and the bare drafts of the same cycles, but no plain arm and no times."""
    pytest.importorskip("matplotlib", reason="pictures need matplotlib, which the extra `eval` brings")
    nothing = {"prefill_s": None, "decode_s": None, "split_s": None, "hooks_s": None}
    rows = [replace(one, bare_accepted=[0, 1, 2], **nothing) for one in example() if one.arm == "refined"]
    header = {key: value for key, value in HEADER.items() if key != "arms"}
    refined = figures(header, rows)[0.0]["all"][0]
    assert refined.bare_record.acceptance_length == 2
    assert refined.speedup is refined.tokens_per_s is refined.cycle_s is None
    assert len(images(run_report(header, rows))) == 2
    assert [table.title for table in run_tables(figures(header, rows)[0.0], "bfloat16")] == [
        "all: 8 prompts",
        "humaneval: 4 prompts",
        "gsm8k: 4 prompts",
    ]
    with pytest.raises(ValueError, match="no answer yet"):
        run_report(header, [])


def test_temperatures_have_their_own_sections():
    pytest.importorskip("matplotlib", reason="pictures need matplotlib, which the extra `eval` brings")
    rows = example() + [replace(one, temperature=0.8, agreement=None) for one in example()]
    assert list(figures(HEADER, rows)) == [0.0, 0.8]
    page = run_report(HEADER, rows)
    assert "Greedy" in page
    assert "Sampled, temperature 0.8" in page


def test_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.delitem(sys.modules, "xpress_hf.evaluation.plots", raising=False)
    monkeypatch.delattr("xpress_hf.evaluation.plots", raising=False)
    with pytest.raises(RuntimeError, match=r"xpress-hf\[eval\]"):
        run_report(HEADER, example())


def verdicts(first, second) -> dict[tuple[str, str], str]:
    return {(one.arm, one.figure): one.verdict for one in compare((HEADER, first), (HEADER, second))}


def test_the_same_run_twice_differs_by_noise():
    found = verdicts(example(), example())
    assert set(found.values()) == {NOISE}
    assert ("refined", "speed-up") in found
    assert ("plain", "speed-up") not in found
    assert ("plain", "acceptance length") not in found


def test_a_real_difference_is_beyond_noise_and_a_slow_machine_is_none():
    found = verdicts(example(), example(faster=1.5))
    assert found["refined", "speed-up"] == found["refined", "decode tokens/s"] == BEYOND
    assert found["refined", "acceptance length"] == found["bare", "speed-up"] == NOISE
    # Half the speed of everything: speed-ups stay.
    slow = [replace(one, decode_s=2 * one.decode_s) for one in example()]
    found = verdicts(example(), slow)
    assert found["refined", "decode tokens/s"] == BEYOND
    assert found["refined", "speed-up"] == NOISE


def test_differences_in_pairs():
    second = [replace(one, accepted=[3, 3, one.accepted[2]]) if one.arm == "refined" else one for one in example()]
    found = {(one.arm, one.figure): one for one in compare((HEADER, example()), (HEADER, second))}
    longer = found["refined", "acceptance length"]
    # One more draft in each three cycles on every prompt: prompts differ, the difference does not.
    assert longer.second - longer.first == pytest.approx(1 / 3)
    assert (longer.interval.low, longer.interval.high) == pytest.approx((1 / 3, 1 / 3))
    assert longer.verdict == BEYOND
    few = verdicts(example(5), second)
    assert few["refined", "acceptance length"] == TOO_FEW


def test_refused_arms_are_compared_by_acceptance_alone():
    wrong = [replace(one, agreement=Agreement(False, 0, 0.5)) if one.arm == "refined" else one for one in example()]
    assert [name for arm, name in verdicts(example(), wrong) if arm == "refined"] == ["acceptance length"]


def test_runs_without_common_answers():
    other = [replace(one, id="q" + one.id) for one in example()]
    with pytest.raises(ValueError, match="nothing can be compared"):
        compare((HEADER, example()), (HEADER, other))


def test_the_page_of_two_runs():
    pytest.importorskip("matplotlib", reason="pictures need matplotlib, which the extra `eval` brings")
    page = comparison_report((HEADER, example()), ({**HEADER, "command": "another"}, example(faster=1.5)))
    assert "beyond noise" in page
    assert "another" in page
    assert "+0.925" in page
    assert len(images(page)) == 1
