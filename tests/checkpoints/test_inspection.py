"""`xpress-hf inspect`: the facts of a checkpoint, without its weights."""

import json

import pytest
from typer.testing import CliRunner

from tests.checkpoints.foreign import DEEPSPEC, DFLASH, TARGETS_OWN, ZLAB, values, write
from tests.conftest import build_drafter, build_target, prompt
from xpress_hf import cli


def inspect(*arguments: str) -> tuple[int, str]:
    outcome = CliRunner().invoke(cli.app, ["inspect", *arguments])
    if outcome.exception is not None and not isinstance(outcome.exception, SystemExit):
        raise outcome.exception
    return outcome.exit_code, outcome.stdout


@pytest.fixture
def folder(tmp_path):
    return str(write(tmp_path / "drafter", DEEPSPEC, values({**DFLASH, **TARGETS_OWN})))


def test_json(folder):
    code, output = inspect(folder, "--json")
    facts = json.loads(output)
    assert code == 0
    assert facts["layout"] == "DeepSpec DFlash"
    assert "Qwen3DSparkModel" in facts["reason"]
    assert (facts["block_size"], facts["num_draft_tokens"], facts["slot_layout"]) == (8, 8, "shift")
    assert (facts["target_layer_ids"], facts["mask_token_id"]) == ([0, 1], 63)
    assert facts["sizes"]["intermediate_size"] == 64
    # 64 x 32 and a norm; two layers of 2 x 32 + 2 x 32 x 32 + 2 x 16 x 32 + 2 x 8 + 3 x 64 x 32, and a norm.
    assert facts["parameters"] == {"fusion": 2080, "backbone": 18624, "all": 20704}
    assert facts["num_bytes"] == 4 * 20704
    assert set(facts["ignored"]) == set(TARGETS_OWN)
    assert facts["target"]["hidden_size"] == 32
    assert facts["target"]["fewest_layers"] == 3
    assert facts["has_hashes"] is False


def test_table(folder):
    code, output = inspect(folder)
    text = " ".join(output.split())
    assert code == 0
    for words in (
        "DeepSpec DFlash",
        "8 slots, 8 drafts",
        "[0, 1] (zero-based",
        "20,704",
        "3 layers or more",
        "head is used",
    ):
        assert words in text, text


def test_which_targets_fit(folder, tmp_path):
    build_target().save_pretrained(tmp_path / "fits")
    build_target(hidden_size=48, num_hidden_layers=2, vocab_size=60).save_pretrained(tmp_path / "other")
    assert inspect(folder, "--target", str(tmp_path / "fits"))[0] == 0
    code, output = inspect(folder, "--target", str(tmp_path / "other"), "--json")
    assert code == 1
    found = " ".join(json.loads(output)["misfits"])
    for words in ("hidden_size` is 48", "needs 32", "num_hidden_layers` is 2", "vocab_size` is 60", "63"):
        assert words in found


def test_a_drafter_that_is_narrower_than_the_target(tmp_path):
    """Its projection fits the taps, but the borrowed embedding does not fit the drafter: generate() refuses, too."""
    drafter, target = build_drafter(target_hidden_size=48, refiner=None), build_target(hidden_size=48)
    drafter.save_pretrained(tmp_path / "drafter")
    target.save_pretrained(tmp_path / "target")
    code, output = inspect(str(tmp_path / "drafter"), "--target", str(tmp_path / "target"), "--json")
    assert code == 1
    assert json.loads(output)["misfits"] == ["its embedding is 48 wide, the drafter needs 32"]
    with pytest.raises(ValueError, match=r"`hidden_size`.*32.*48"):
        target.generate(prompt(), assistant_model=drafter, max_new_tokens=4)


def test_our_own_layout(tmp_path):
    build_drafter().save_pretrained(tmp_path)
    facts = json.loads(inspect(str(tmp_path), "--json")[1])
    assert facts["layout"] == "own"
    assert facts["has_hashes"] is True
    assert facts["refiner"] == {"rank": 8, "mlp_width": 16, "sweeps": 2}
    assert facts["parameters"]["refiner"] == 2 * 64 * 8 + 2 * 8 * 32 + 8 * 24 + 8 * 8 * 8 + 3 * 16 * 8


def test_the_shipped_drafter():
    facts = json.loads(inspect("demo", "--json")[1])
    assert facts["target_layer_ids"] == [1, 7, 14, 20, 27]
    assert facts["parameters"]["all"] == 18_685_056
    assert facts["has_hashes"] is True


def test_a_refused_checkpoint(tmp_path):
    write(tmp_path, ZLAB, values({**DFLASH, "markov_head.markov_w1.weight": (64, 8)}))
    with pytest.raises(ValueError, match="DSpark"):
        inspect(str(tmp_path))
