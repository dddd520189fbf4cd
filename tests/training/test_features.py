"""Features on disk: which target they belong to, exact masks, and writes that fail."""

import json
import warnings
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tests.conftest import build_drafter, build_target, prompt
from tests.training.chat_fixtures import MARKED, build_tokenizer
from xpress_hf import cli
from xpress_hf.fingerprint import weights_hash
from xpress_hf.training.data import TextCollator
from xpress_hf.training.features import FeatureDataset, FeatureMeta, FeatureWriter, target_states, write_features

TAPS = [0, 1]


def text_of(length: int, *runs: tuple[int, int], seed: int = 0) -> dict[str, torch.Tensor]:
    ids = prompt(length, seed)[0]
    loss_mask = torch.zeros_like(ids)
    for start, stop in runs:
        loss_mask[start:stop] = 1
    return {"input_ids": ids, "loss_mask": loss_mask}


TEXTS = [text_of(12, (3, 5), (8, 12)), text_of(7, (2, 7), seed=1), text_of(9, (4, 6), seed=2)]


@pytest.fixture(scope="module")
def target():
    return build_target()


def same(left: FeatureDataset, right: FeatureDataset) -> bool:
    keys = left[0].keys()
    return len(left) == len(right) and all(
        torch.equal(left[index][key], right[index][key]) for index in range(len(left)) for key in keys
    )


def test_masks_of_several_turns_and_states_are_exact(target, tmp_path):
    assert write_features(target, TEXTS, tmp_path, TAPS, batch_size=1) == 3
    dataset = FeatureDataset(tmp_path)
    for text, stored in zip(TEXTS, (dataset[index] for index in range(3)), strict=True):
        assert torch.equal(stored["input_ids"], text["input_ids"])
        assert torch.equal(stored["loss_mask"], text["loss_mask"])
        ids = text["input_ids"][None]
        taps, last = target_states(target, ids, torch.ones_like(ids), TAPS)
        assert torch.equal(stored["context_hidden_states"][:-1], taps[0, :-1].bfloat16())
        assert torch.equal(stored["teacher_hidden_states"][:-1], last[0, :-1].bfloat16())
    assert json.loads((tmp_path / "index.jsonl").read_text().splitlines()[0])["supervised"] == [[3, 5], [8, 12]]


def test_texts_that_train_nothing_keep_their_places(target, tmp_path):
    """H9: answers cut away by a length limit, and texts of no token at all, stop neither reading nor training."""
    empty = {"input_ids": torch.tensor([], dtype=torch.long), "loss_mask": torch.tensor([], dtype=torch.long)}
    texts = [text_of(6), TEXTS[0], empty, TEXTS[1]]
    # The third text starts a batch of its own on the second call.
    write_features(target, texts[:2], tmp_path, TAPS, batch_size=2)
    assert write_features(target, texts, tmp_path, TAPS, batch_size=1) == 4
    dataset = FeatureDataset(tmp_path)
    assert [len(dataset[index]["input_ids"]) for index in range(4)] == [6, 12, 0, 7]
    assert [int(dataset[index]["loss_mask"].sum()) for index in range(4)] == [0, 6, 0, 5]
    batch = TextCollator()([dataset[index] for index in range(4)])
    assert batch["context_hidden_states"].shape == (4, 12, 64)
    assert write_features(target, [text_of(6)], tmp_path / "nothing", TAPS) == 1
    assert FeatureDataset(tmp_path / "nothing")[0]["teacher_hidden_states"].abs().sum() == 0


def test_the_same_target_passes_in_any_dtype(target, tmp_path):
    write_features(target, TEXTS, tmp_path, TAPS)
    dataset = FeatureDataset(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dataset.check(target, target_layer_ids=TAPS)
        dataset.check(build_target().bfloat16())
    assert dataset.meta.dtype == "float32"


def tuned(target):
    """One matrix of one layer differs, as after fine-tuning; embedding, head and norms are the same."""
    with torch.no_grad():
        target.model.layers[1].self_attn.q_proj.weight.mul_(1.1)
    return target


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: build_target(seed=3), r"\(other weights\)"),
        (lambda: tuned(build_target()), r"\(other weights\)"),
        (lambda: build_target(vocab_size=70), "`vocab_size` 64 != 70; other weights"),
        (lambda: build_target("llama"), "`model_type` qwen3 != llama; other weights"),
        (lambda: build_target(hidden_size=16), "`hidden_size` 32 != 16"),
    ],
)
def test_another_target_is_refused_by_name(target, tmp_path, build, words):
    write_features(target, TEXTS, tmp_path, TAPS)
    other = build()
    with pytest.raises(ValueError, match=f"`target`: the features in .*{words}"):
        FeatureDataset(tmp_path).check(other)
    with pytest.raises(ValueError, match=f"features of another kind .*{words}"):
        write_features(other, TEXTS, tmp_path, TAPS)
    assert len(FeatureDataset(tmp_path)) == 3


def test_other_taps_and_templates_are_refused(target, tmp_path):
    tokenizer = build_tokenizer()
    write_features(target, TEXTS, tmp_path, TAPS, tokenizer=tokenizer)
    dataset = FeatureDataset(tmp_path)
    dataset.check(target, build_tokenizer())
    with pytest.raises(ValueError, match="another vocabulary or chat template"):
        dataset.check(target, build_tokenizer(MARKED))
    with pytest.raises(ValueError, match=r"`target_layer_ids` \[0, 1\] != \[1, 2\]"):
        dataset.check(target, target_layer_ids=[1, 2])
    with pytest.raises(ValueError, match=r"`target_layer_ids` \[0, 1\] != \[1, 2\]"):
        write_features(target, TEXTS, tmp_path, [1, 2])


def test_adapters_and_names(target, tmp_path):
    """An adapter makes another target; a folder of another name does not."""
    peft = pytest.importorskip("peft")
    write_features(target, TEXTS, tmp_path, TAPS)
    renamed = build_target()
    renamed.config._name_or_path = "elsewhere"
    FeatureDataset(tmp_path).check(renamed)
    assert write_features(renamed, TEXTS, tmp_path, TAPS) == 3
    adapted = peft.get_peft_model(build_target(), peft.LoraConfig(target_modules=["q_proj"], r=2))
    with pytest.raises(ValueError, match="other weights"):
        FeatureDataset(tmp_path).check(adapted)


def test_the_hash_reads_every_parameter(target):
    whole = weights_hash(target)
    assert weights_hash(build_target()) == whole
    for name, _ in target.named_parameters():
        other = build_target()
        with torch.no_grad():
            other.get_parameter(name).add_(0.5)
        assert weights_hash(other) != whole, name


def test_folders_of_earlier_versions(target, tmp_path):
    """No fingerprint and one prompt length for each text: read as before, with a warning from `check`."""
    write_features(target, TEXTS[1:2], tmp_path, TAPS)
    new = FeatureDataset(tmp_path)
    (line,) = new.lines
    del line["supervised"]
    (tmp_path / "index.jsonl").write_text(json.dumps({**line, "prompt_length": 2}) + "\n")
    old = {"target_layer_ids": TAPS, "hidden_size": 32, "target": target.name_or_path}
    (tmp_path / "features.json").write_text(json.dumps(old))
    dataset = FeatureDataset(tmp_path)
    assert dataset[0]["loss_mask"].tolist() == [0, 0, 1, 1, 1, 1, 1]
    with pytest.warns(UserWarning, match="does not say which target"):
        dataset.check(target)
    with pytest.raises(ValueError, match="hidden_size"):
        dataset.check(build_target(hidden_size=16))
    with pytest.warns(UserWarning, match="does not say which target"):
        assert write_features(target, TEXTS[1:], tmp_path, TAPS) == 2
    assert FeatureDataset(tmp_path)[1]["loss_mask"].sum() == 2


class FullDisk:
    """A file that takes some bytes of its last write and then fails, as on a full disk."""

    def __init__(self, file, writes: int):
        self.file, self.left = file, writes

    def write(self, data):
        self.left -= 1
        if self.left < 0:
            self.file.write(data[: len(data) // 2])
            self.file.flush()
            raise OSError(28, "No space left on device")
        return self.file.write(data)

    def __getattr__(self, name):
        return getattr(self.file, name)


@pytest.mark.parametrize("name", ["rows", "index"])
@pytest.mark.parametrize("writes", [0, 1, 2])
def test_a_full_disk_leaves_nothing_half_written(target, tmp_path, name, writes, monkeypatch):
    write_features(target, TEXTS, tmp_path / "whole", TAPS, batch_size=1)
    create = FeatureWriter.__init__

    def fill(self, *args):
        create(self, *args)
        setattr(self, name, FullDisk(getattr(self, name), writes))

    monkeypatch.setattr(FeatureWriter, "__init__", fill)
    with pytest.raises(OSError, match="No space left"):
        write_features(target, TEXTS, tmp_path / "cut", TAPS, batch_size=1)
    monkeypatch.undo()
    assert len((tmp_path / "cut" / "index.jsonl").read_text()) > 0 or name == "rows" or writes == 0
    if writes:
        dataset = FeatureDataset(tmp_path / "cut")
        assert len(dataset) == writes
        assert torch.equal(
            dataset[0]["context_hidden_states"], FeatureDataset(tmp_path / "whole")[0]["context_hidden_states"]
        )
    else:
        with pytest.raises(ValueError, match="holds no text"):
            FeatureDataset(tmp_path / "cut")
    write_features(target, TEXTS, tmp_path / "cut", TAPS, batch_size=1)
    assert same(FeatureDataset(tmp_path / "cut"), FeatureDataset(tmp_path / "whole"))


def test_damaged_folders_are_refused(target, tmp_path):
    with pytest.raises(ValueError, match=r"holds no features\.json"):
        FeatureDataset(tmp_path)
    write_features(target, TEXTS, tmp_path, TAPS)
    rows = (tmp_path / "features.bin").read_bytes()
    (tmp_path / "features.bin").write_bytes(rows[:-1])
    with pytest.raises(ValueError, match=r"holds 24 rows of states, the index names 25"):
        FeatureDataset(tmp_path)
    (tmp_path / "features.bin").write_bytes(rows)
    meta = json.loads((tmp_path / "features.json").read_text())
    (tmp_path / "features.json").write_text(json.dumps({**meta, "colour": 1}))
    with pytest.raises(ValueError, match=r"unknown fields .*colour"):
        FeatureDataset(tmp_path)


def test_a_reader_leaves_the_line_that_is_being_written(target, tmp_path):
    write_features(target, TEXTS, tmp_path, TAPS)
    with open(tmp_path / "index.jsonl", "a") as file:
        file.write('{"input_ids": [1')
    assert len(FeatureDataset(tmp_path)) == 3
    assert (tmp_path / "index.jsonl").read_text().endswith("[1")


def test_meta_is_read_back(target, tmp_path):
    meta = FeatureMeta.of(target, TAPS, build_tokenizer())
    meta.write(tmp_path)
    assert FeatureMeta.read(tmp_path) == meta
    assert not (tmp_path / "features.json.part").exists()


@pytest.fixture
def folder(tmp_path) -> Path:
    """Target with tokenizer, a drafter for it, and answers."""
    tokenizer = build_tokenizer()
    build_target("llama", vocab_size=len(tokenizer)).save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    mask_id = tokenizer.convert_tokens_to_ids("<|mask|>")
    build_drafter(vocab_size=len(tokenizer), mask_token_id=mask_id).save_pretrained(tmp_path / "drafter")
    rows = [{"prompt": "one", "completion": "two"}, {"prompt": "<|mask|>", "completion": "three"}]
    for name, count in (("good", 1), ("bad", 2)):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows[:count]))
    return tmp_path


def test_the_command(folder):
    words = ["features", "--target", str(folder / "target"), "--dtype", "float32", "--json"]
    words += ["--conversations", str(folder / "good"), "--conversations", str(folder / "good")]
    for name, taps in (("a", ["--target-layer-ids", "0,1"]), ("b", ["--drafter", str(folder / "drafter")])):
        outcome = CliRunner().invoke(cli.app, [*words, "--output", str(folder / name), *taps])
        assert outcome.exit_code == 0, outcome.output
        assert json.loads(outcome.stdout) == {"num_texts": 2, "target_layer_ids": [0, 1]}
    assert same(FeatureDataset(folder / "a"), FeatureDataset(folder / "b"))
    assert FeatureDataset(folder / "a").meta.tokenizer is not None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--target-layer-ids", "0,x"], "numbers with commas"),
        (["--target-layer-ids", "0,9"], r"0 \.\. 1"),
        ([], "either `--target-layer-ids` or `--drafter`"),
        (["--drafter", "drafter", "--conversations", "bad"], "line 2: `mask_token_id`=3 occurs"),
    ],
)
def test_bad_input_of_the_command(folder, monkeypatch, options, words):
    monkeypatch.chdir(folder)
    base = ["features", "--target", "target", "--dtype", "float32", "--output", "out", "--conversations", "good"]
    outcome = CliRunner().invoke(cli.app, [*base, *options])
    assert isinstance(outcome.exception, ValueError)
    with pytest.raises(ValueError, match=words):
        raise outcome.exception
    assert not (folder / "out").exists()
