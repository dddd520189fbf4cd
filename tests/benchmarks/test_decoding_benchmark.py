"""Every part of benchmarks/decoding.py at tiny size: rows, tables, and the arithmetic they are held against."""

import json
import re
import sys
from functools import partial

import decoding
import decoding_batch
import pytest
import torch
from decoding_memory import cache_bytes, measured
from decoding_verification import expected_by_block, expected_by_token
from random_pair import SIZES, random_pair
from transformers import CompileConfig

from tests.conftest import OLD
from xpress_hf import SpeculationConfig
from xpress_hf.decoding import static_shapes
from xpress_hf.decoding.verification import block_verification, token_rejection
from xpress_hf.evaluation.bootstrap import Interval

CHECKED_DRAWS = 20_000


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "words.jsonl"
    rows = [{"id": str(n), "benchmark": "words", "turns": ["word " * (n + 2) + chr(97 + n)]} for n in range(4)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def run(prompts, tmp_path, capsys, monkeypatch):
    def run(part: str, *options: str) -> str:
        common = ["--part", part, "--prompts", str(prompts), "--random-target", "tiny", "--dtype", "float32"]
        common += ["--max-new-tokens", "12", "--output", str(tmp_path)]
        monkeypatch.setattr(sys, "argv", ["decoding.py", *common, *options])
        decoding.main()
        return capsys.readouterr().out

    return run


def rows_of(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def tables(text: str) -> list[dict[str, dict[str, str]]]:
    """Markdown tables: row name -> column -> cell."""
    found = []
    for block in re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE):
        columns, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in block.splitlines())
        found.append({row[0]: dict(zip(columns, row, strict=True)) for row in rows})
    return found


@pytest.fixture(scope="module")
def pair():
    return random_pair("tiny", torch.float32, "cpu", 1.0)


@pytest.mark.parametrize(("acceptance", "length"), [(0.0, 1.0), (1.0, 6.0)])
def test_the_random_pair_is_exact_at_a_chosen_acceptance(acceptance, length):
    target, drafter, tokenizer = random_pair("tiny", torch.float32, "cpu", acceptance)
    ids = tokenizer("abc", return_tensors="pt").input_ids
    out = target.generate(ids, assistant_model=drafter, max_new_tokens=25, do_sample=False)
    assert out[0].tolist() == ids[0].tolist() + [ids[0, -1].item()] * 25
    assert drafter.last_acceptance.acceptance_length == length
    assert target.lm_head.weight is target.model.embed_tokens.weight
    assert SIZES["qwen3-0.6b"][0]["hidden_size"] == 1024


def test_overhead_has_all_four_ways_and_shares_that_add_up(run, tmp_path):
    text = run("overhead", "--limit", "2")
    assert "decoding.py --part overhead" in text
    assert re.search(rf"torch {re.escape(torch.__version__)}, transformers .*\n.*\d+ threads; float32\n", text)
    assert "target random tiny" in text
    assert "words.jsonl" in text
    speed, cycle, bounds = tables(text)
    arms = ["plain", "refined", "refined+loop=stock", "bare", "dflash"]
    assert list(speed) == list(cycle) == arms
    assert list(bounds) == arms[1:]
    for row in cycle.values():
        parts = [float(row[name]) for name in ("draft", "refine", "verify", "rest")]
        assert sum(parts) == pytest.approx(float(row["cycle"]), abs=0.03)
        assert float(row["rest share"].rstrip("%")) == pytest.approx(100 * parts[3] / sum(parts), abs=1.0)
    header, *rows = rows_of(tmp_path / "overhead.jsonl")
    assert header["arms"]["refined+loop=stock"]["loop"] == "stock"
    assert len(rows) == 2 * len(arms)


@pytest.mark.skipif(OLD, reason="static caches of this transformers cannot be cropped")
def test_overhead_of_compiled_forwards(run, tmp_path, monkeypatch):
    monkeypatch.setattr(static_shapes, "CompileConfig", partial(CompileConfig, backend="eager"))
    speed, cycle, _ = tables(run("overhead", "--limit", "1", "--compile"))
    assert float(cycle["refined+compile=true"]["verify"]) > 0
    assert speed["refined+compile=true"]["acceptance length"] == speed["refined"]["acceptance length"]
    assert rows_of(tmp_path / "overhead.jsonl")[0]["arms"]["refined+compile=true"]["compile"] is True


def test_memory_grows_by_the_caches_and_nothing_else(run, pair):
    target, drafter, _ = pair
    per_token = cache_bytes(target.config, target.dtype)
    assert per_token == 2 * 4 * 2 * 16 * 4
    grown = {}
    for arm, own in (("plain", None), ("ours", drafter)):
        few, many = (measured(target, own, torch.full((1, n), 7), on_device=False) for n in (100, 400))
        grown[arm] = {phase: many[phase] - few[phase] for phase in few}
    expected = {"plain": 300 * per_token, "ours": 300 * (per_token + cache_bytes(drafter.config, drafter.dtype))}
    for arm, growth in grown.items():
        # Ids and masks: at most four lists of 8-byte integers; plain generate of transformers 5.17 keeps six.
        lists = 6 if OLD and arm == "plain" else 4
        assert 0 <= growth["held"] - expected[arm] <= 300 * lists * 8
        # One layer of four is laid out anew while it runs, its keys and values repeated for both query heads of each.
        assert growth["decode"] - expected[arm] <= 300 * per_token / 4 * (1 + 2)
    (table,) = tables(run("memory", "--contexts", "100", "400", "--acceptance", "1"))
    assert list(table) == [f"{arm}, {phase}" for phase in ("prompt", "decode", "held") for arm in ("plain", "ours")]
    assert float(table["ours, held"]["growth of caches"]) == pytest.approx(expected["ours"] / 2**20, abs=0.01)
    assert float(table["ours, held"]["growth"]) == pytest.approx(grown["ours"]["held"] / 2**20, abs=0.01)


def test_batches_go_on_where_they_stood(run, tmp_path, monkeypatch):
    options = ("--batch-sizes", "1", "2", "--groups", "2")
    (first,) = tables(run("batch", *options))
    path = tmp_path / "batch.jsonl"
    rows = rows_of(path)[1:]
    assert {(row["batch"], row["group"], row["arm"]) for row in rows} == {
        (size, group, arm) for size in (1, 2) for group in (0, 1) for arm in ("plain", "auto", "full block")
    }
    assert all(row["tokens"] == 12 * row["batch"] for row in rows)
    for row in first.values():
        assert float(row["full block / plain [95 %]"].split()[0]) > 0
        assert re.search(r"auto (pays|does not pay|makes no difference).*(within|beyond) the allowed", row["in words"])

    path.write_text(path.read_text()[:-20])  # killed within the last line
    asked = []
    original = decoding_batch.timed
    monkeypatch.setattr(decoding_batch, "timed", lambda *args: asked.append(args[2]) or original(*args))
    run("batch", *options)
    assert len(asked) == 6, "the warm-up and one group"
    assert rows_of(path)[1:-1] == rows[:-1]
    assert {key: rows_of(path)[-1][key] for key in ("batch", "group", "arm")} == {
        key: rows[-1][key] for key in ("batch", "group", "arm")
    }
    with pytest.raises(ValueError, match="`groups` 2 there, 3 now"):
        run("batch", "--batch-sizes", "1", "2", "--groups", "3")


def test_batches_without_enough_prompts_are_refused(run):
    with pytest.raises(ValueError, match="`--batch-sizes` 8 needs as many prompts, got 4"):
        run("batch", "--batch-sizes", "8")


@pytest.mark.parametrize(
    ("interval", "words"),
    [((1.2, 1.1, 1.3), "pays"), ((0.8, 0.7, 0.9), "does not pay"), ((1.0, 0.9, 1.1), "makes no difference")],
)
def test_verdicts(interval, words):
    assert decoding_batch.verdict(Interval(*interval)).startswith(words)


def test_verification_compares_both_rules(run, tmp_path):
    (table,) = tables(run("verification", "--batch-sizes", "2", "--temperatures", "1"))
    row = table["T = 1"]
    rows = rows_of(tmp_path / "verification.jsonl")[1:]
    assert [(one["rule"], one["id"]) for one in rows] == [
        (rule, str(n)) for rule in ("token", "block") for n in range(4)
    ]
    kept = [one for one in rows if one["rule"] == "token"]
    length = 1 + sum(sum(one["kept"]) for one in kept) / sum(len(one["kept"]) for one in kept)
    assert float(row["token: acceptance length [95 %]"].split()[0]) == pytest.approx(length, abs=1e-3)
    blocks = sum(one["blocks"] for one in rows)
    gain = sum(one["expected_block"] - one["expected_token"] for one in rows) / blocks
    assert int(row["blocks"]) == blocks
    assert float(row["block - token, same drafts [95 %]"].split()[0]) == pytest.approx(gain, abs=1e-4)
    assert all(one["expected_block"] >= one["expected_token"] - 1e-6 for one in rows)


def test_expected_acceptance_is_the_mean_of_the_rules():
    generator = torch.Generator().manual_seed(0)
    draft_laws = torch.rand(1, 3, 5, generator=generator).softmax(dim=-1)
    target_laws = (3 * torch.rand(1, 4, 5, generator=generator)).softmax(dim=-1)
    ids, lengths = torch.tensor([[4, 1, 2]]), torch.tensor([2])
    rules = ((token_rejection, expected_by_token), (block_verification, expected_by_block))
    for rule, expected in rules:
        value = float(expected(ids, draft_laws, target_laws, lengths))
        many = [one.expand(CHECKED_DRAWS, *one.shape[1:]) for one in (ids, draft_laws, target_laws, lengths)]
        kept, _ = rule(*many, generator=generator)
        assert 0.1 < value < 2
        assert kept.float().mean().item() == pytest.approx(value, abs=5 / CHECKED_DRAWS**0.5)


def test_settings_of_the_drafter_are_left_as_they_were(pair):
    target, drafter, tokenizer = pair
    drafter.speculation = SpeculationConfig(sweeps=1)
    inputs = dict(tokenizer(["abc"], return_tensors="pt"))
    tokens, seconds = decoding_batch.timed(target, drafter, {"draft_length": "auto"}, inputs, 9)
    assert (tokens, drafter.speculation) == (9, SpeculationConfig(sweeps=1))
    assert seconds > 0
