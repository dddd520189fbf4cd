"""Prompts: the field's wording, the Hub by name, and what a file may not hold."""

import json

import datasets
import pytest
import torch

from tests.training.chat_fixtures import THINKING, build_tokenizer
from xpress_hf.evaluation.prompts import BOXED, HUB, PROGRAM, encode_prompt, load_prompts, read_prompts


def write(path, *rows) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def item(**values) -> dict:
    return {"id": "gsm8k/0", "benchmark": "gsm8k", "turns": ["How many?"], "answer": None, **values}


def test_only_the_first_turn_gets_the_wording(tmp_path):
    path = write(tmp_path / "p.jsonl", item(turns=["How many?", "Sure?"]), item(id="a", benchmark="mbpp"))
    first, second = load_prompts(path).prompts
    assert first.turns == ["How many?" + BOXED, "Sure?"]
    assert second.turns == ["How many?"]


def test_the_shipped_files_read_and_their_code_wording_is_the_fields(prompt_files):
    names = ("gsm8k", "math500", "aime25", "humaneval", "mbpp", "livecodebench", "mt_bench", "alpaca")
    sets = {name: load_prompts(prompt_files / f"{name}.jsonl", 20).prompts for name in names}
    assert {name: len(prompts) for name, prompts in sets.items()} == dict.fromkeys(names, 20)
    assert {len(prompt.turns) for prompt in sets["mt_bench"]} == {2}
    text = sets["livecodebench"][0].turns[0]
    question, rest = text.removeprefix(PROGRAM).rsplit("\n\n### Format: ", 1)
    assert "YOUR CODE HERE" in rest
    assert HUB["livecodebench"].turns({"question_content": question, "starter_code": ""}) == [text]
    code = next(prompt.turns[0] for prompt in sets["livecodebench"] if "class Solution" in prompt.turns[0])
    question, rest = code.removeprefix(PROGRAM).rsplit("\n\n### Format: ", 1)
    starter = rest.split("```python\n", 1)[1].rsplit("\n```", 1)[0]
    assert HUB["livecodebench"].turns({"question_content": question, "starter_code": starter}) == [code]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{broken", r"line 2: expected an object with `id`, `benchmark` and `turns`"),
        ("[1]", "line 2"),
        (item(id="a", turns="text"), "line 2.*a list of texts"),
        (item(id="a", turns=[]), "line 2"),
        ({"id": "a", "turns": ["x"]}, "line 2.*benchmark"),
        (item(), "line 2: `id` 'gsm8k/0'.*twice"),
    ],
)
def test_a_broken_line_is_named(tmp_path, line, reason):
    with pytest.raises(ValueError, match=reason):
        read_prompts(write(tmp_path / "p.jsonl", item(), line))


def test_a_file_without_prompts(tmp_path):
    with pytest.raises(ValueError, match="holds no prompt"):
        read_prompts(write(tmp_path / "p.jsonl", ""))


def test_an_unknown_benchmark_lists_the_known_ones():
    with pytest.raises(ValueError, match="neither a file nor a benchmark; known benchmarks: gsm8k, math500, aime25"):
        load_prompts("gsm9k")


def test_no_network_says_how_to_give_a_file(monkeypatch):
    def refuse(*args, **kwargs):
        raise ConnectionError("offline")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(ValueError, match=r"cannot be read from the Hub.*offline.*give a file instead.*`turns`"):
        load_prompts("math500")


@pytest.mark.parametrize(
    ("name", "row", "turns", "asked"),
    [
        ("gsm8k", {"question": "Q", "answer": "1"}, ["Q" + BOXED], ("openai/gsm8k", "test", {"name": "main"})),
        ("math500", {"problem": "Q"}, ["Q" + BOXED], ("HuggingFaceH4/MATH-500", "test", {})),
        ("mt-bench", {"prompt": ["Q", "R"]}, ["Q", "R"], ("HuggingFaceH4/mt_bench_prompts", "train", {})),
        ("alpaca", {"instruction": "Q", "input": "I"}, ["Q\n\nI"], ("tatsu-lab/alpaca", "train", {})),
        ("alpaca", {"instruction": "Q", "input": ""}, ["Q"], ("tatsu-lab/alpaca", "train", {})),
    ],
)
def test_benchmarks_by_name(monkeypatch, name, row, turns, asked):
    seen = []

    def load(path, split, **options):
        seen.append((path, split, options))
        return [row, row]

    monkeypatch.setattr(datasets, "load_dataset", load)
    found = load_prompts(name, limit=1)
    assert [prompt.turns for prompt in found.prompts] == [turns]
    assert found.prompts[0].id == f"{name.replace('-', '_')}/0000"
    assert (seen, found.name) == ([asked], asked[0])
    # What a longer run would read too decides the hash.
    assert load_prompts(name).sha256 == found.sha256


def test_switches_of_the_template_reach_the_ids():
    tokenizer = build_tokenizer(THINKING)
    cpu = torch.device("cpu")
    default = encode_prompt(tokenizer, "one two", cpu)
    off = encode_prompt(tokenizer, "one two", cpu, {"enable_thinking": False})
    assert tokenizer.decode(off[0]).endswith("<think>\n\n</think>\n")
    assert not tokenizer.decode(default[0]).endswith("</think>\n")
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    assert tokenizer.decode(encode_prompt(build_tokenizer(None), chat, cpu)[0]) == "a\n\nb\n\nc"
