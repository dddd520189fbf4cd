"""Answers of the target: what it says, and a run that can be killed at any point."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tests.conftest import build_target
from tests.training.chat_fixtures import THINKING, build_tokenizer
from xpress_hf import cli
from xpress_hf.training.chat import ChatTemplate
from xpress_hf.training.data import encode_conversation
from xpress_hf.training.regeneration import Sampling, TargetAnswerer, read_prompts, regenerate

WORDS = ["the", "weather", "in", "Oslo", "is", "rain", "and", "the", "answer", "one", "two", "three"]
GREEDY = Sampling(max_new_tokens=12)
# Many ids end an answer, so that a random target finishes some of its answers early.
ENDS = list(range(100, 130))


def build_pair(template: str | None = None):
    tokenizer = build_tokenizer(*([template] if template else []))
    target = build_target("llama", vocab_size=len(tokenizer))
    target.generation_config.eos_token_id = ENDS
    return target, tokenizer


def build_rows(count: int) -> list[dict]:
    """Prompts of different lengths; every third one has two turns."""
    texts = [" ".join(WORDS[: 1 + (5 * number) % 11]) + f" {number}" for number in range(count)]
    return [{"id": f"p{n}", "turns": [text, "and then ?"] if n % 3 == 2 else [text]} for n, text in enumerate(texts)]


def lines_of(path: Path) -> list[dict]:
    """Answers by row; no row twice."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({record["row"] for record in records}) == len(records)
    return sorted(records, key=lambda record: record["row"])


@pytest.fixture(scope="module")
def pair():
    return build_pair()


def run(pair, path: Path, rows: list[dict], sampling: Sampling = GREEDY, batch_size: int = 3):
    answerer = TargetAnswerer(*pair, name="tiny", batch_size=batch_size)
    return regenerate(read_prompts(rows), path, answerer, sampling)


def plain_response(target, tokenizer, ids: list[int]) -> list[int]:
    """Greedy answer to one prompt alone, by argmax, up to the first id that ends it."""
    response: list[int] = []
    while len(response) < GREEDY.max_new_tokens:
        with torch.no_grad():
            logits = target(torch.tensor([[*ids, *response]])).logits[0, -1]
        response.append(int(logits.argmax()))
        if response[-1] in (*ENDS, tokenizer.eos_token_id):
            break
    return response


def test_answers_are_those_of_the_target_alone(pair, tmp_path):
    """Left padding, sorting and batches change nothing; each answer of a conversation is fed back."""
    target, tokenizer = pair
    rows = build_rows(8)
    summary = run(pair, tmp_path / "out.jsonl", rows)
    records = lines_of(tmp_path / "out.jsonl")
    assert [record["id"] for record in records] == [row["id"] for row in rows]
    assert summary.num_rows == summary.num_written == 8
    assert {record["finished"] for record in records} == {True, False}, "both kinds of endings must occur"
    total = 0
    for record, row in zip(records, rows, strict=True):
        messages = []
        for turn in row["turns"]:
            messages.append({"role": "user", "content": turn})
            response = plain_response(target, tokenizer, ChatTemplate(tokenizer).prompt_ids(messages))
            finished = response[-1] in ENDS
            words = tokenizer.decode(response[:-1] if finished else response)
            messages.append({"role": "assistant", "content": words})
            total += len(response)
            if not finished:
                break
        assert record["messages"] == messages
        assert record["response_ids"] == response
        assert record["finished"] == finished
    assert summary.num_new_tokens == total
    assert any(len(record["messages"]) == 4 for record in records)


def test_a_line_says_how_it_was_made_and_trains_as_it_is(tmp_path):
    """H24: the template's switches are recorded, and the loss mask of the line uses them."""
    target, tokenizer = build_pair(THINKING)
    rows = [{"messages": [{"role": "system", "content": "think"}, {"role": "user", "content": "one ?"}], "id": "a"}]
    prompts = read_prompts(rows, chat_template_kwargs={"enable_thinking": False})
    sampling = Sampling(temperature=0.7, top_p=0.9, top_k=20, seed=3, max_new_tokens=4)
    regenerate(prompts, tmp_path / "out.jsonl", TargetAnswerer(target, tokenizer, "tiny"), sampling)
    (record,) = lines_of(tmp_path / "out.jsonl")
    assert record["generation"] == {
        "target": "tiny",
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 20,
        "seed": 3,
        "max_new_tokens": 4,
    }
    assert record["chat_template_kwargs"] == {"enable_thinking": False}
    assert record["messages"][:2] == rows[0]["messages"]
    text = encode_conversation(record, tokenizer)
    prompt = tokenizer.decode(text["input_ids"][text["loss_mask"] == 0])
    assert prompt.endswith("<|im_start|>assistant\n<think>\n\n</think>\n")
    assert text["input_ids"][text["loss_mask"] == 1].tolist()[: len(record["response_ids"])] == record["response_ids"]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_run_cut_at_any_byte_goes_on_to_the_same_answers(pair, tmp_path, temperature):
    """No duplicate, no loss, the same ids: also of sampled answers, since each batch has its own seed."""
    sampling = Sampling(temperature=temperature, seed=5, max_new_tokens=6)
    rows = build_rows(7)
    whole = tmp_path / "whole.jsonl"
    run(pair, whole, rows, sampling)
    content = whole.read_bytes()
    first = content.index(b"\n") + 1
    for size in (0, 10, first - 1, first, first + 5, len(content) // 2, len(content) - 1, len(content)):
        cut = tmp_path / f"cut{size}.jsonl"
        cut.write_bytes(content[:size])
        kept = content[:size].count(b"\n")
        summary = run(pair, cut, rows, sampling)
        assert summary.num_written == 7 - kept
        assert lines_of(cut) == lines_of(whole)


def test_sampling_depends_on_the_seed_and_leaves_the_global_state_alone(pair, tmp_path):
    rows = build_rows(3)
    state = torch.random.get_rng_state()
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        run(pair, tmp_path / name, rows, Sampling(temperature=1.0, seed=seed, max_new_tokens=6))
    assert torch.equal(torch.random.get_rng_state(), state)
    a, b, c = ([record["response_ids"] for record in lines_of(tmp_path / name)] for name in "abc")
    assert a == b != c


def test_defaults_of_the_target_do_not_change_greedy_answers(pair, tmp_path):
    """Published targets ask for sampling in their generation config."""
    target, _ = build_pair()
    target.generation_config.update(do_sample=True, temperature=0.6, top_p=0.5, top_k=3)
    run((target, pair[1]), tmp_path / "a", build_rows(3))
    run(pair, tmp_path / "b", build_rows(3))
    assert lines_of(tmp_path / "a") == lines_of(tmp_path / "b")


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
def test_kill_9_and_go_on(tmp_path):
    target, tokenizer = build_pair()
    target.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    rows = build_rows(40)
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    output = tmp_path / "out.jsonl"
    options = {"prompts": tmp_path / "prompts.jsonl", "output": output, "target": tmp_path / "target"}
    options |= {"max-new-tokens": 24, "batch-size": 2, "dtype": "float32"}
    words = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "xpress_hf.cli", "regenerate", *words]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 100
    while not output.exists() or output.read_bytes().count(b"\n") < 5:
        assert process.poll() is None, "ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert 5 <= output.read_bytes().count(b"\n") < 40
    summary = run_cli(*words)
    assert summary["num_rows"] == 40
    assert 0 < summary["num_written"] <= 40 - 5
    options["output"] = tmp_path / "whole.jsonl"
    assert run_cli(*[part for name, value in options.items() for part in (f"--{name}", str(value))])["num_rows"] == 40
    assert lines_of(output) == lines_of(tmp_path / "whole.jsonl")


def run_cli(*words: str) -> dict:
    outcome = CliRunner().invoke(cli.app, ["regenerate", *words, "--json"])
    assert outcome.exit_code == 0, outcome.output
    return json.loads(outcome.stdout)


def test_a_failed_write_is_dropped_by_the_next_run(pair, tmp_path, monkeypatch):
    """A full disk leaves half a line at most."""
    rows, output = build_rows(6), tmp_path / "out.jsonl"
    dumps = json.dumps
    calls = []

    def full(record, **kwargs):
        if isinstance(record, dict) and "row" in record:
            calls.append(record["row"])
            if len(calls) == 4:
                with open(output, "a") as file:
                    file.write(dumps(record)[:40])
                raise OSError(28, "No space left on device")
        return dumps(record, **kwargs)

    monkeypatch.setattr("xpress_hf.training.regeneration.job.json.dumps", full)
    with pytest.raises(OSError, match="No space"):
        run(pair, output, rows)
    monkeypatch.undo()
    assert output.read_text().count("\n") == 3
    assert not output.read_text().endswith("\n")
    assert run(pair, output, rows).num_written == 3
    run(pair, tmp_path / "whole.jsonl", rows)
    assert lines_of(output) == lines_of(tmp_path / "whole.jsonl")


def test_files_of_other_runs_are_refused(pair, tmp_path):
    rows, output = build_rows(3), tmp_path / "out.jsonl"
    run(pair, output, rows)
    before = output.read_bytes()
    with pytest.raises(ValueError, match=r"line 1: made with `max_new_tokens`=12, this run has 5"):
        run(pair, output, rows, Sampling(max_new_tokens=5))
    with pytest.raises(ValueError, match=r"row 1: .*another prompt .* as row 1"):
        run(pair, output, [rows[0], rows[2], rows[1]])
    prompts = read_prompts(rows, chat_template_kwargs={"enable_thinking": False})
    with pytest.raises(ValueError, match="switches of the template as row 0"):
        regenerate(prompts, output, TargetAnswerer(*pair, name="tiny"), GREEDY)
    assert output.read_bytes() == before
    output.write_text("{}\n")
    with pytest.raises(ValueError, match="line 1: no answer of an earlier run"):
        run(pair, output, rows)


def test_prompts_of_a_conversation():
    """Answers are dropped, and so is everything from the first result of a tool on."""
    user, answer = {"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}
    system = {"role": "system", "content": "think"}
    (prompt,) = read_prompts(
        [{"messages": [system, user, answer, user, answer, {"role": "tool", "content": "3"}, user]}]
    )
    assert prompt.turns == [[system, user], [user]]
    (prompt,) = read_prompts([{"prompt": "one", "benchmark": "b", "response_ids": [1], "finished": True}])
    assert (prompt.turns, prompt.columns) == ([[user]], {"benchmark": "b"})
    with pytest.raises(ValueError, match="row 1: no turn is the user's"):
        read_prompts([{"messages": [user]}, {"messages": [system]}])
    with pytest.raises(ValueError, match="holds no row"):
        read_prompts([])


def test_prompts_too_long_for_the_target_are_named(pair, tmp_path):
    rows = [{"prompt": "one"}, {"prompt": "two " * 600}]
    with pytest.raises(ValueError, match=r"row 1: .*`max_new_tokens`=12 are more than the 512 places"):
        run(pair, tmp_path / "out.jsonl", rows, batch_size=1)
    assert len(lines_of(tmp_path / "out.jsonl")) == 1


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"max_new_tokens": 0}, "max_new"),
    ],
)
def test_settings_are_checked(values, word):
    with pytest.raises(ValueError, match=word):
        Sampling(**values)


def test_bad_switches_on_the_command_line(tmp_path, monkeypatch, capsys):
    words = ["regenerate", "--prompts", "x", "--output", str(tmp_path / "o"), "--chat-template-kwargs", "[1]"]
    monkeypatch.setattr("sys.argv", ["xpress-hf", *words])
    with pytest.raises(SystemExit) as stop:
        cli.run()
    assert stop.value.code == 2
    assert "`--chat-template-kwargs` must be a JSON object" in " ".join(capsys.readouterr().err.split())
