"""The command line on a tiny target with a tiny tokenizer."""

import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, pipeline
from typer.testing import CliRunner

from tests.conftest import VOCAB, build_drafter, build_target
from xpress_hf import XPressDrafter, cli
from xpress_hf.evaluation.agreement import Difference
from xpress_hf.training.initialization import config_for_target


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


def generate(folders: tuple[str, str], *arguments: str) -> tuple[int, str]:
    """`xpress-hf generate` on the saved pair."""
    target, drafter = folders
    return invoke("generate", "--target", target, "--drafter", drafter, *arguments)


def test_generate_shows_both_texts_and_what_they_cost(folders):
    code, output = generate(folders, "--prompt", "w3 w4 w5", "--prompt", "w7", "--max-new-tokens", "20")
    assert code == 0, output
    assert output.count("ids equal: yes") == 2
    assert "acceptance length" in output
    assert "ratio" in output
    assert "2 sweeps" in output


def test_sweeps_and_temperature_reach_the_drafter(folders):
    code, output = generate(folders, "--prompt", "w3 w4", "--sweeps", "0", "--temperature", "0.8")
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
    code, output = generate(folders, *arguments)
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


def test_a_text_generation_pipeline(folders):
    """The drafter's config carries the vocabulary and special ids that pipelines compare."""
    target = AutoModelForCausalLM.from_pretrained(folders[0])
    tokenizer = AutoTokenizer.from_pretrained(folders[0])
    drafter = XPressDrafter(config_for_target(target, [0, 1], 63, num_hidden_layers=1, block_size=4)).eval()
    run = pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=drafter)
    plain = pipeline("text-generation", model=target, tokenizer=tokenizer)
    options = {"max_new_tokens": 12, "do_sample": False}
    assert run("w3 w4 w5", **options) == plain("w3 w4 w5", **options)
    assert drafter.last_acceptance.num_cycles > 0


def test_a_pipeline_with_a_drafter_that_lacks_special_ids(folders):
    """Configs of foreign layouts do not know the target's special ids, which pipelines compare."""
    target = AutoModelForCausalLM.from_pretrained(folders[0])
    target.config.eos_token_id = 2
    tokenizer = AutoTokenizer.from_pretrained(folders[0])
    drafter = build_drafter(vocab_size=None, refiner=None)
    assert drafter.config.eos_token_id is None
    run = pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=drafter)
    plain = pipeline("text-generation", model=target, tokenizer=tokenizer)
    options = {"max_new_tokens": 12, "do_sample": False}
    assert run("w3 w4 w5", **options) == plain("w3 w4 w5", **options)
    assert drafter.last_acceptance.num_cycles > 0
    with pytest.raises(ValueError, match="tokenizer"):
        pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=build_target(vocab_size=32))


def test_figures_as_json(folders):
    target, drafter = folders
    arguments = ["generate", "--target", target, "--drafter", drafter, "--prompt", "w3 w4", "--max-new-tokens", "20"]
    outcome = CliRunner().invoke(cli.app, [*arguments, "--json"])
    assert outcome.exit_code == 0
    figures = json.loads(outcome.stdout)
    assert figures["prompts"][0]["ids_equal"] is True
    assert figures["prompts"][0]["new_tokens"] == 20
    assert figures["medians"]["ratio"] > 0
    assert sum(figures["acceptance"]["histogram"]) == figures["acceptance"]["num_cycles"] > 0


def test_a_broken_promise_gives_exit_code_one(folders, monkeypatch):
    """A text that leaves plain generate where no tie explains it must not pass for a success."""
    monkeypatch.setattr("xpress_hf.evaluation.side_by_side.first_difference", lambda *args: Difference(5, 0.5))
    code, output = generate(folders, "--prompt", "w3", "--max-new-tokens", "8")
    assert code == 1
    assert "NOT a near tie" in output


def test_an_unknown_dtype(folders):
    target, drafter = folders
    outcome = CliRunner().invoke(cli.app, ["generate", "--target", target, "--drafter", drafter, "--dtype", "int3"])
    assert "int3" in str(outcome.exception)
