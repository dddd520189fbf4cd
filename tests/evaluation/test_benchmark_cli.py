"""`xpress-hf benchmark` and `xpress-hf report` on a tiny pair: files, pages, exit codes, bad input."""

import json

import pytest
from typer.testing import CliRunner

from xpress_hf import cli
from xpress_hf.evaluation import answering
from xpress_hf.evaluation.agreement import Difference
from xpress_hf.evaluation.records import read_records


@pytest.fixture
def sources(folders):
    """The folder with two files of prompts more."""
    for name in ("one", "two"):
        rows = [
            {"id": f"{name}/{number}", "benchmark": name, "turns": [f"{name} weather {number}"]} for number in (1, 2)
        ]
        (folders / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folders


def invoke(*arguments):
    return CliRunner().invoke(cli.app, [str(one) for one in arguments])


def benchmark(folder, *arguments):
    pair = ("--target", folder / "target", "--drafter", folder / "drafter")
    sources = ("--prompts", folder / "one.jsonl", "--prompts", folder / "two.jsonl", "--max-new-tokens", 12)
    return invoke("benchmark", *pair, *sources, *arguments)


def test_a_run_and_its_page(sources):
    pytest.importorskip("matplotlib", reason="pictures need matplotlib, which the extra `eval` brings")
    path, page = sources / "rows.jsonl", sources / "pages" / "report.html"
    outcome = benchmark(sources, "--arms", "bare,refined,sweeps", "--output", path, "--json")
    assert outcome.exit_code == 0, outcome.output
    printed = json.loads(outcome.stdout)
    assert [one["benchmark"] for one in printed["figures"]][::5] == ["all", "one", "two"]
    refined = printed["figures"][2]
    assert (refined["arm"], refined["prompts"], refined["equal"], refined["refused"]) == ("refined", 4, 4, None)
    assert refined["speedup"]["median"] > 0
    assert refined["bounds"]["share"] > 0
    header, records = read_records(path)
    assert printed["run"] == header
    assert len(records) == 4 * 5
    assert header["drafter"]["name"] == str(sources / "drafter")
    assert header["judge_dtype"] == "float32"

    outcome = invoke("report", path, "--output", page, "--json")
    assert outcome.exit_code == 0, outcome.output
    # The rows alone give the same figures.
    assert json.loads(outcome.stdout)["figures"] == printed["figures"]
    text = page.read_text()
    assert f"{refined['tokens_per_s']['median']:.1f} (" in text
    assert "Sweeps of the refiner" in text

    outcome = invoke("report", "--compare", path, path, "--output", page, "--json")
    assert outcome.exit_code == 0, outcome.output
    differences = json.loads(outcome.stdout)["differences"]
    assert {one["difference"]["value"] for one in differences} == {0.0}
    # Four prompts prove nothing, not even that nothing differs.
    assert {one["verdict"] for one in differences} == {"too few prompts"}
    assert "Comparison" in page.read_text()


def test_people_read_tables(sources):
    outcome = benchmark(sources, "--limit", "1", "--assistant", sources / "target", "--control", sources / "drafter")
    assert outcome.exit_code == 0, outcome.output
    words = " ".join(outcome.output.split())
    for arm in ("plain", "prompt-lookup", "assistant", "dflash", "bare", "refined", "control"):
        assert arm in words
    for text in ("all: 2 prompts", "one: 1 prompts", "Time of a cycle", "Bounds", "bonus included"):
        assert text in words, text


def test_other_ids_are_refused_a_speed_figure(sources, monkeypatch):
    """The texts of one arm leave plain generate where no tie explains it."""
    real, seen = answering.first_difference, []

    def first_difference(*arguments):
        seen.append(arguments)
        return Difference(20, 0.5) if len(seen) % 2 else real(*arguments)

    monkeypatch.setattr(answering, "first_difference", first_difference)
    outcome = benchmark(sources, "--arms", "bare,refined", "--json")
    assert outcome.exit_code == 1
    bare, refined = json.loads(outcome.stdout)["figures"][1:3]
    assert bare["tokens_per_s"] is bare["speedup"] is bare["bounds"] is None
    assert bare["refused"].startswith("4 of 4 texts")
    assert refined["speedup"]["median"] > 0
    assert "No speed figure for bare: 4 of 4 texts" in " ".join(outcome.stderr.split())


def test_an_interruption_leaves_whole_prompts(sources, monkeypatch):
    path = sources / "rows.jsonl"
    real = cli.benchmark.__globals__["Benchmark"]._converse

    def converse(self, prompt, *arguments):
        if prompt.id == "two/1":
            raise KeyboardInterrupt
        return real(self, prompt, *arguments)

    monkeypatch.setattr("xpress_hf.evaluation.benchmark.Benchmark._converse", converse)
    outcome = benchmark(sources, "--arms", "bare", "--output", path)
    assert outcome.exit_code == 1
    assert "interrupted: answers are in" in " ".join(outcome.output.split())
    assert [(row.id, row.arm) for row in read_records(path)[1]] == [
        (name, arm) for name in ("one/1", "one/2") for arm in ("plain", "bare")
    ]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("report",), "Name one file"),
        (("report", "rows.jsonl", "--compare", "a", "b"), "Name one file"),
        (("report", "nowhere.jsonl"), "nowhere.jsonl"),
    ],
)
def test_bad_reports(arguments, error, tmp_path):
    outcome = invoke(*arguments, "--output", tmp_path / "r.html")
    assert outcome.exit_code == 1
    assert error in str(outcome.exception)
    assert not (tmp_path / "r.html").exists()


def test_an_unknown_arm(sources):
    outcome = benchmark(sources, "--arms", "bare,fastest")
    assert "unknown arm 'fastest'" in str(outcome.exception)
