"""The command line on a tiny target with a tiny tokenizer."""

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from tests.conftest import VOCAB, build_drafter, build_target
from xpress_hf import cli


@pytest.fixture
def folders(tmp_path):
    """Saved target with tokenizer, saved drafter."""
    words = {f"w{index}": index for index in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    build_target().save_pretrained(tmp_path / "target")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0", pad_token="w1").save_pretrained(
        tmp_path / "target"
    )
    build_drafter().save_pretrained(tmp_path / "drafter")
    return str(tmp_path / "target"), str(tmp_path / "drafter")


def invoke(*arguments: str) -> tuple[int, str]:
    """Exit code and output; line breaks depend on the width of the terminal."""
    outcome = CliRunner().invoke(cli.app, list(arguments))
    return outcome.exit_code, " ".join(outcome.output.split())


def test_generate_shows_both_texts_and_what_they_cost(folders):
    target, drafter = folders
    code, output = invoke(
        "generate",
        "--target",
        target,
        "--drafter",
        drafter,
        "--prompt",
        "w3 w4 w5",
        "--prompt",
        "w7",
        "--max-new-tokens",
        "20",
    )
    assert code == 0, output
    assert output.count("ids equal: yes") == 2
    assert "acceptance length" in output
    assert "ratio" in output
    assert "2 sweeps" in output


def test_sweeps_and_temperature_reach_the_drafter(folders):
    target, drafter = folders
    code, output = invoke(
        "generate",
        "--target",
        target,
        "--drafter",
        drafter,
        "--prompt",
        "w3 w4",
        "--sweeps",
        "0",
        "--temperature",
        "0.8",
    )
    assert code == 0, output
    assert "0 sweeps" in output
    assert "two draws from the same law" in output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--sweeps", "-1"], "sweeps"),
        (["--temperature", "-0.5"], "temperature"),
        (["--max-new-tokens", "1"], "max-new-tokens"),
    ],
)
def test_bad_numbers_are_refused(folders, arguments, words):
    target, drafter = folders
    code, output = invoke("generate", "--target", target, "--drafter", drafter, *arguments)
    assert code == 2
    assert words in output


def test_errors_are_printed_without_a_traceback(folders, capsys, monkeypatch):
    target, _ = folders
    monkeypatch.setattr(
        "sys.argv", ["xpress-hf", "generate", "--target", target, "--drafter", target, "--prompt", "w1"]
    )
    with pytest.raises(SystemExit) as stop:
        cli.run()
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert "error:" in error
    assert "Traceback" not in error


def test_help_names_the_commands():
    _, output = invoke("--help")
    assert "demo" in output
    assert "generate" in output
