"""Records on disk: what is written is read, interrupted runs go on, other runs are refused."""

import json

import numpy as np
import pytest

from tests.conftest import build_drafter, build_target
from xpress_hf.evaluation.bootstrap import bootstrap, pooled_ratio, pooled_ratio_difference
from xpress_hf.evaluation.records import Agreement, PromptRecord, RecordFile, pool, read_records, run_header


def record(name: str, accepted=(2, 0), verified=(3, 3), **values) -> PromptRecord:
    fields = {"benchmark": "gsm8k", "id": name, "turn": 0, "seed": 0, "temperature": 0.0}
    fields |= {"prompt_tokens": 5, "new_tokens": 4, "num_draft_tokens": 3}
    return PromptRecord(
        **{"arm": "refined", **fields, "accepted": list(accepted), "verified": list(verified), **values}
    )


HEADER = {"kind": "run", "command": "a", "date": "today", "seeds": [0], "temperature": 0.0}


def test_rows_come_back_as_they_were_written(tmp_path):
    rows = [
        record("a", agreement=Agreement(False, 3, 1e-5), bare_accepted=[1, 0], changed=[True, False]),
        record("b", split_s={"draft": 0.5}, prefill_s=0.1, agreement=Agreement(True)),
    ]
    with RecordFile(tmp_path / "new" / "rows.jsonl", HEADER) as file:
        for row in rows:
            file.append(row)
        # On disk before the file is closed.
        assert len((tmp_path / "new" / "rows.jsonl").read_text().splitlines()) == 3
    header, found = read_records(tmp_path / "new" / "rows.jsonl")
    assert header == HEADER
    assert found == rows
    line = json.loads((tmp_path / "new" / "rows.jsonl").read_text().splitlines()[2])
    assert line["kind"] == "prompt"
    assert line["agreement"]["equal"] is True
    assert "bare_accepted" not in line


def test_an_interrupted_run_goes_on_and_drops_the_torn_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    with RecordFile(path, HEADER) as file:
        file.append(record("a"))
        file.append(record("b"))
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    assert [row.id for row in read_records(path)[1]] == ["a"]
    with RecordFile(path, {**HEADER, "command": "again", "date": "tomorrow"}) as file:
        assert record("a").key in file
        assert record("b").key not in file
        file.append(record("b"))
    assert path.read_bytes() == whole


def test_a_torn_header_starts_anew(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"kind": "ru')
    with RecordFile(path, HEADER) as file:
        file.append(record("a"))
    assert read_records(path) == (HEADER, [record("a")])


def test_another_run_is_refused_by_the_names_that_differ(tmp_path):
    path = tmp_path / "rows.jsonl"
    with RecordFile(path, HEADER):
        pass
    with pytest.raises(ValueError, match=r"`seeds` \[0\] there, \[1\] now.*`temperature` 0.0 there, 1.0 now"):
        RecordFile(path, {**HEADER, "seeds": [1], "temperature": 1.0})
    with pytest.raises(ValueError, match="`extra` None there"):
        RecordFile(path, {**HEADER, "extra": 1})


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{broken}\n", "line 2.*'prompt'"),
        ('{"kind": "run"}\n', "line 2.*its `kind` is 'run'"),
        ('{"kind": "prompt", "arm": "a"}\n', "line 2.*missing"),
        (json.dumps(record("a").to_dict() | {"changed": [True]}) + "\n", "line 2.*differ in length"),
        (2 * (json.dumps(record("a").to_dict()) + "\n"), "line 3.*twice"),
    ],
)
def test_a_broken_line_is_named(tmp_path, line, reason):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(HEADER) + "\n" + line)
    with pytest.raises(ValueError, match=reason):
        read_records(path)


def test_no_row_is_written_twice(tmp_path):
    with RecordFile(None, HEADER) as file:
        file.append(record("a"))
        with pytest.raises(ValueError, match="already"):
            file.append(record("a"))


def test_pooling_leaves_plain_answers_out():
    pooled = pool([record("a"), record("b", [3], [3]), record("c", [], [], num_draft_tokens=0)])
    # 5 drafts kept in 3 cycles; the average of the two averages would be 3.0.
    assert pooled.acceptance_length == pytest.approx(1 + 5 / 3)
    assert pool([record("c", [], [], num_draft_tokens=0)]) is None


def test_the_header_tells_where_figures_come_from():
    target, drafter = build_target(), build_drafter()
    header = run_header(target, "demo", drafter, "own", [{"file": "p.jsonl", "sha256": "00"}], seeds=[0, 1])
    assert header["dtype"] == "float32"
    assert header["seeds"] == [0, 1]
    assert header["hardware"]["threads"] >= 1
    assert header["data"] == [{"file": "p.jsonl", "sha256": "00"}]
    assert header["target"]["name"] == "demo"
    assert header["versions"]["xpress_hf"]
    other = run_header(build_target(seed=3), "demo", drafter, "own")
    assert other["target"]["weights_hash"] != header["target"]["weights_hash"]
    assert other["drafter"] == header["drafter"]


def test_intervals_over_prompts():
    table = np.array([[3, 1]] * 50 + [[1, 1]] * 50)
    found = bootstrap(table, pooled_ratio)
    # A mean of 100 values 1 or 3: the standard error is 0.1.
    assert found.value == 2
    assert found.low == pytest.approx(1.8, abs=0.03)
    assert found.high == pytest.approx(2.2, abs=0.03)
    equal = bootstrap(np.hstack([table, table]), pooled_ratio_difference)
    assert (equal.value, equal.low, equal.high) == (0, 0, 0)
    # Ratio of sums, not mean of ratios.
    assert bootstrap(np.array([[10, 10], [0, 1]]), pooled_ratio).value == pytest.approx(10 / 11)
    with pytest.raises(ValueError, match="at least one prompt"):
        bootstrap(np.zeros((0, 2)), pooled_ratio)
