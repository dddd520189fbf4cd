"""`xpress-hf evaluate` on a tiny pair: output, exit codes, bad input."""

import json

import pytest
from typer.testing import CliRunner

from xpress_hf import cli
from xpress_hf.evaluation.agreement import Difference
from xpress_hf.evaluation.records import read_records

GOOD = json.dumps({"id": "a", "benchmark": "b", "turns": ["one"]}) + "\n"


def command(folder, prompts: str) -> list[str]:
    pair = ["--target", str(folder / "target"), "--drafter", str(folder / "drafter")]
    return ["evaluate", *pair, "--prompts", str(folder / prompts)]


def evaluate(folder, *arguments: str, prompts: str = "p.jsonl"):
    return CliRunner().invoke(cli.app, [*command(folder, prompts), "--max-new-tokens", "10", *arguments])


def test_figures_as_json_and_a_file_that_goes_on(folders):
    path = folders / "rows.jsonl"
    outcome = evaluate(folders, "--limit", "2", "--output", str(path), "--json")
    assert outcome.exit_code == 0, outcome.output
    figures = json.loads(outcome.stdout)
    (group,) = figures["groups"]
    assert (group["num_prompts"], group["num_answers"], group["temperature"]) == (2, 4, 0.0)
    assert group["agreement"] == {"equal": 4, "near_tie": 0, "other": 0}
    assert figures["run"]["data"][0]["file"] == "p.jsonl"
    assert figures["run"]["chat_template_kwargs"] == {}
    assert "bonus token counts" in figures["definitions"]["acceptance_length"]
    outcome = evaluate(folders, "--output", str(path), "--json")
    assert json.loads(outcome.stdout)["groups"][0]["num_prompts"] == 3
    assert len(read_records(path)[1]) == 6


def test_people_read_a_table_and_the_definitions(folders):
    outcome = evaluate(
        folders, "--limit", "1", "--temperature", "0", "--temperature", "1", "--seed", "1", "--seed", "2"
    )
    assert outcome.exit_code == 0, outcome.output
    for words in ("temperature 0", "temperature 1", "refiner changed the block", "acceptance_length_prompt_mean:"):
        assert words in outcome.output


def test_causes_are_looked_for_on_demand(folders):
    outcome = evaluate(folders, "--limit", "1", "--no-agreement", "--explain", "--json")
    assert outcome.exit_code == 0, outcome.output
    figures = json.loads(outcome.stdout)
    assert {"mask id", "embedding scale", "template"} <= {finding["check"] for finding in figures["findings"]}
    assert figures["groups"][0]["agreement"] is None
    assert "findings" not in json.loads(evaluate(folders, "--limit", "1", "--no-agreement", "--json").stdout)


def test_another_text_than_plain_is_exit_code_1(folders, monkeypatch):
    monkeypatch.setattr("xpress_hf.evaluation.answering.first_difference", lambda *args: Difference(12, 0.5))
    outcome = evaluate(folders, "--limit", "1")
    assert outcome.exit_code == 1
    assert "0 parted at a near tie, 2 elsewhere" in outcome.output


def test_an_interrupted_run_says_where_its_answers_are(folders, monkeypatch):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("xpress_hf.evaluation.evaluator.Evaluator.agreement", interrupt)
    outcome = evaluate(folders, "--output", str(folders / "rows.jsonl"))
    assert outcome.exit_code == 1
    assert "interrupted: answers are in" in outcome.output
    assert read_records(folders / "rows.jsonl")[1] == []


@pytest.mark.parametrize(
    ("text", "arguments", "reason"),
    [
        ("{broken\n", [], "line 1"),
        ("", [], "holds no prompt"),
        (json.dumps({"id": "a", "benchmark": "b", "turns": ["one " * 400]}) + "\n", [], "places of the target"),
        (
            GOOD,
            ["--chat-template-kwargs", "[1]"],
            "JSON",
        ),
        (GOOD, ["--max-new-tokens", "0"], "greater than or equal"),
        (GOOD, ["--prompts", "gsm9k"], "math500"),
    ],
)
def test_bad_input_is_exit_code_2(folders, capsys, monkeypatch, text, arguments, reason):
    (folders / "bad.jsonl").write_text(text)
    monkeypatch.setattr("sys.argv", ["xpress-hf", *command(folders, "bad.jsonl"), *arguments])
    with pytest.raises(SystemExit) as stop:
        cli.run()
    assert stop.value.code == 2
    assert reason in " ".join(capsys.readouterr().err.split())
