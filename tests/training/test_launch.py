"""`xpress-hf train` and `expand`: flags and YAML, fresh and loaded drafters, what is refused."""

import json

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from tests.conftest import VOCAB, build_drafter, build_target
from xpress_hf import XPressDrafter, cli
from xpress_hf.cli.train import parse
from xpress_hf.training.launch import even_taps, find_mask_token

TEMPLATE = "{% for m in messages %}{{ m['content'] + ' ' }}{% endfor %}"
COMMON = ["--use_cpu", "--report_to", "none", "--disable_tqdm", "True", "--save_strategy", "no", "--num_anchors", "8"]


@pytest.fixture
def folder(tmp_path):
    """Saved target with tokenizer, saved drafter, conversations."""
    words = {f"w{index}": index for index in range(VOCAB - 1)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0", pad_token="w1", eos_token="w2")
    wrapped.chat_template = TEMPLATE
    build_target("llama").save_pretrained(tmp_path / "target")
    wrapped.save_pretrained(tmp_path / "target")
    build_drafter(factor=4.0, block_size=4, mask_token_id=VOCAB - 1).save_pretrained(tmp_path / "drafter")
    generator = torch.Generator().manual_seed(0)
    with open(tmp_path / "answers.jsonl", "w") as file:
        for _ in range(6):
            drawn = torch.randint(3, VOCAB - 1, (24,), generator=generator).tolist()
            question, answer = (" ".join(f"w{one}" for one in part) for part in (drawn[:6], drawn[6:]))
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": messages, "response_ids": drawn[6:]}) + "\n")
    return tmp_path


def invoke(*arguments: str) -> tuple[int, str]:
    outcome = CliRunner().invoke(cli.app, list(arguments))
    text = outcome.output + (str(outcome.exception) if outcome.exception else "")
    return outcome.exit_code, " ".join(text.split())


def data(folder) -> list[str]:
    return ["--target", str(folder / "target"), "--conversations", str(folder / "answers.jsonl")]


def test_a_fresh_drafter_is_trained_from_flags(folder):
    out = folder / "out"
    more = ["--recipe", "xpress", "--block_size", "4", "--num_layers", "2", "--refiner_rank", "4", "--taps", "1,0"]
    code, output = invoke("train", *data(folder), "--output_dir", str(out), "--max_steps", "2", *COMMON, *more)
    assert code == 0, output
    drafter = XPressDrafter.from_pretrained(out)
    config = drafter.config
    assert (config.block_size, config.num_hidden_layers, config.target_layer_ids) == (4, 2, [1, 0])
    assert config.refiner == {"rank": 4, "mlp_width": 8, "sweeps": 2}
    assert config.mask_token_id == VOCAB - 1
    assert json.loads((out / "trainer_state.json").read_text())["global_step"] == 2


def test_yaml_holds_the_same_fields_and_flags_count_more(folder):
    values = {
        "target": str(folder / "target"),
        "conversations": str(folder / "answers.jsonl"),
        "drafter": str(folder / "drafter"),
        "output_dir": str(folder / "out"),
        "max_steps": 9,
        "pack": True,
        "max_length": 64,
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "num_anchors": 8,
        "recipe": "xpress",
        "recipe_options": {"gamma": 7.0},
        "eval_conversations": str(folder / "answers.jsonl"),
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(values))
    options, args = parse([str(folder / "run.yaml"), "--max_steps", "1"])
    assert (args.max_steps, options.pack, args.build_recipe().gamma) == (1, True, 7.0)
    code, output = invoke(
        "train", str(folder / "run.yaml"), "--max_steps", "1", "--eval_conversations", values["conversations"]
    )
    assert code == 0, output
    assert "eval_bare_block_acceptance_length" in output
    assert XPressDrafter.from_pretrained(folder / "out").config.block_size == 4


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--conversation", "x.jsonl"], "conversation"),
        ([], "nothing to learn from"),
        (["--conversations", "x.jsonl", "--features", "y"], "not both"),
        (["--features", "y", "--recipe", "dflsh"], "dflsh"),
        (["--features", "y", "--recipe_options", '{"gama": 1}'], "gama"),
        (["--features", "y", "--recipe_options", "gamma=1"], "JSON"),
    ],
)
def test_wrong_fields_are_named(tmp_path, arguments, word):
    with pytest.raises(ValueError, match=word):
        parse(["--output_dir", str(tmp_path), *arguments])


def test_unknown_fields_of_a_file_are_named(tmp_path):
    (tmp_path / "run.yaml").write_text("recipee: xpress\n")
    with pytest.raises(ValueError, match="recipee"):
        parse([str(tmp_path / "run.yaml")])
    (tmp_path / "list.yaml").write_text("- 1\n")
    with pytest.raises(ValueError, match="mapping"):
        parse([str(tmp_path / "list.yaml")])


def test_help_lists_every_field():
    code, output = invoke("train", "--help")
    assert code == 0
    for name in (
        "--conversations",
        "--recipe_options",
        "--learning_rate",
        "--replay_texts",
        "--gradient_checkpointing",
    ):
        assert name in output


def test_expand_measures_first_and_stops_where_it_cannot_pay(folder):
    answers = ["--eval_conversations", str(folder / "answers.jsonl"), "--drafter", str(folder / "drafter")]
    out = ["--output_dir", str(folder / "out"), "--max_steps", "2", *COMMON]
    code, output = invoke("expand", *data(folder), *answers, *out, "--block_size", "6")
    # A random drafter never fills its block.
    assert code == 1, output
    assert "cannot pay" in output
    assert not (folder / "out" / "model.safetensors").exists()
    code, output = invoke("expand", *data(folder), *answers, *out, "--block_size", "6", "--force")
    assert code == 0, output
    assert "old slots keep" in output
    trained = XPressDrafter.from_pretrained(folder / "out")
    assert trained.config.block_size == 6
    code, output = invoke("expand", *data(folder), *out, "--block_size", "6")
    assert code != 0
    assert "drafter" in output


def test_h17_a_target_without_its_head_is_refused(folder):
    weights = load_file(folder / "target" / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, folder / "target" / "model.safetensors", metadata={"format": "pt"})
    code, output = invoke("train", *data(folder), "--output_dir", str(folder / "out"), *COMMON)
    assert code != 0
    assert "lm_head.weight" in output


def test_the_mask_id_of_a_fresh_drafter(folder):
    target = AutoModelForCausalLM.from_pretrained(folder / "target")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "target")
    assert find_mask_token(target, tokenizer) == VOCAB - 1
    tokenizer.add_special_tokens({"additional_special_tokens": ["<extra>"]})
    with pytest.raises(ValueError, match="mask_token_id"):
        find_mask_token(target, tokenizer)
    tokenizer.mask_token = "w9"
    assert find_mask_token(target, tokenizer) == 9


def test_even_taps():
    assert even_taps(36) == [1, 9, 17, 25, 33]
    assert even_taps(30) == [1, 8, 14, 20, 27]
    assert even_taps(3) == [1]
