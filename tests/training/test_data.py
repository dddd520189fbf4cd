"""Rows -> conversations -> batches. Bug reports: H3 (no shift), H8 (empty samples), H9 (short answers)."""

import json

import pytest
import torch

from tests.conftest import build_drafter, build_target, prompt
from tests.training.chat_fixtures import build_tokenizer
from xpress_hf.training.blocks import draw_batch_anchors
from xpress_hf.training.data import (
    ConversationDataset,
    TextCollator,
    check_mask_token,
    encode_conversation,
    read_conversations,
)
from xpress_hf.training.trainer import DrafterTrainer, DrafterTrainingArguments

USER, ANSWER = {"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}
MESSAGES = [USER, ANSWER]


def write_lines(path, *rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def text_of(length: int, answer: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random ids, the last `answer` of them supervised."""
    ids = prompt(length, seed)[0]
    return {"input_ids": ids, "loss_mask": (torch.arange(length) >= length - answer).long()}


@pytest.mark.parametrize(
    "row",
    [
        {"messages": MESSAGES},
        {"messages": [*MESSAGES, USER]},
        {"conversations": [{"from": "human", "value": "one"}, {"from": "gpt", "value": "two"}]},
        {"conversations": MESSAGES, "messages": None},
        {"prompt": "one", "completion": "two"},
        {"prompt": [USER], "completion": [ANSWER]},
        {"messages": [{**USER, "tool_calls": None}, {**ANSWER, "name": None}]},
    ],
)
def test_columns_that_hold_a_conversation(tmp_path, row):
    path = write_lines(tmp_path / "rows.jsonl", row, "", {**row, "id": "b", "finished": False})
    expected = [{"messages": MESSAGES}, {"messages": MESSAGES, "id": "b", "finished": False}]
    assert read_conversations(path) == expected
    assert read_conversations([row], limit=1) == expected[:1]


def test_a_system_column_and_tools_as_json():
    rows = [{"prompt": "one", "completion": "two", "system": "think", "tools": '[{"name": "weather"}]'}]
    assert read_conversations(rows) == [
        {"messages": [{"role": "system", "content": "think"}, *MESSAGES], "tools": [{"name": "weather"}]}
    ]


def test_datasets_in_memory_streamed_saved_and_named(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows = [{"messages": MESSAGES}, {"messages": [USER, ANSWER, USER, {"role": "assistant", "content": "three"}]}]
    table = datasets.Dataset.from_list(rows)
    table.save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict({"train": table}).save_to_disk(str(tmp_path / "splits"))
    (tmp_path / "named").mkdir()
    write_lines(tmp_path / "named" / "train.jsonl", *rows)
    for source in (table, table.to_iterable_dataset(), *(tmp_path / name for name in ("saved", "splits", "named"))):
        assert read_conversations(source) == rows, source
    with pytest.raises(ValueError, match=r"splits'.*split 'test'"):
        read_conversations(tmp_path / "splits", split="test")
    with pytest.raises(ValueError, match="no file"):
        read_conversations(str(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"messages": [', "line 2: no valid JSON"),
        ("[1]", "line 2: expected an object"),
        ({"text": "one"}, r"line 2: expected one of the columns messages, .*'text'"),
        ({"messages": [USER]}, "line 2: no turn is the assistant's"),
        ({"turns": ["one"]}, "line 2: no turn is the assistant's"),
        ({"messages": "one"}, "line 2: `messages` must be a list"),
        ({"messages": ["one"]}, "line 2: a turn must be an object"),
        ({"messages": [{"role": "judge", "content": "one"}]}, "line 2: `role` .* 'judge'"),
        ({"messages": MESSAGES, "tools": "{"}, "line 2: `tools`.*no valid JSON"),
        ({"messages": [USER, {"role": "assistant"}]}, "line 2: .*neither `content` nor `tool_calls`"),
    ],
)
def test_bad_rows_are_named(tmp_path, line, words):
    path = write_lines(tmp_path / "rows.jsonl", {"messages": MESSAGES}, line)
    with pytest.raises(ValueError, match=words):
        ConversationDataset(path, build_tokenizer())


def test_an_empty_data_set(tmp_path):
    with pytest.raises(ValueError, match=r"rows\.jsonl' holds no conversation"):
        ConversationDataset(write_lines(tmp_path / "rows.jsonl"), build_tokenizer())
    with pytest.raises(ValueError, match="data set holds no conversation"):
        read_conversations([])


def test_rows_whose_template_fails_are_named():
    dataset = ConversationDataset([{"messages": MESSAGES}], build_tokenizer(template=None))
    with pytest.raises(ValueError, match="row 0: `tokenizer` has no chat template"):
        dataset[0]


def test_a_mask_id_that_occurs_in_a_text():
    tokenizer = build_tokenizer()
    mask_id = tokenizer.convert_tokens_to_ids("<|mask|>")
    rows = [{"messages": MESSAGES}, {"messages": [{"role": "user", "content": "a <|mask|> b"}, ANSWER]}]
    assert len(ConversationDataset(rows[:1], tokenizer, mask_token_id=mask_id)) == 1
    with pytest.raises(ValueError, match=rf"row 1: `mask_token_id`={mask_id} occurs .*1 times"):
        ConversationDataset(rows, tokenizer, mask_token_id=mask_id)
    check_mask_token(torch.tensor([1, 2]), 3, "here")


def test_switches_of_the_data_set_reach_the_template():
    tokenizer = build_tokenizer("{{ mood }}{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}")
    rows = [{"messages": MESSAGES}, {"messages": MESSAGES, "chat_template_kwargs": {"mood": "three"}}]
    dataset = ConversationDataset(rows, tokenizer, chat_template_kwargs={"mood": "one"})
    for index, mood in enumerate(("one", "three")):
        assert tokenizer.decode(dataset[index]["input_ids"]).startswith(mood)


def test_a_batch_keeps_ids_masks_and_features_in_their_places():
    """H3: nothing is shifted: mask and features stand at the places of their ids."""
    texts = [text_of(9, 4), text_of(6, 2, seed=1)]
    for text in texts:
        text["context_hidden_states"] = text["input_ids"][:, None].float().expand(-1, 3)
        text["document_ids"] = torch.zeros_like(text["input_ids"])
    batch = TextCollator()(texts)
    for row, text in enumerate(texts):
        length = len(text["input_ids"])
        assert torch.equal(batch["input_ids"][row, :length], text["input_ids"])
        assert torch.equal(batch["loss_mask"][row, :length], text["loss_mask"])
        assert torch.equal(batch["context_hidden_states"][row, :length, 2], text["input_ids"].float())
        assert batch["attention_mask"][row].sum() == length
    assert batch["document_ids"][1].tolist() == [0] * 6 + [-1] * 3
    assert draw_batch_anchors(batch, 100, (0,)).tolist() == [[4, 5, 6, 7], [3, 4, -1, -1]]


def build_trainer(tmp_path, drafter):
    args = DrafterTrainingArguments(str(tmp_path), use_cpu=True, report_to="none", num_anchors=100)
    return DrafterTrainer(drafter, args, build_target())


def loss_and_gradients(trainer, texts):
    drafter = trainer.model
    drafter.zero_grad()
    loss = trainer.compute_loss(drafter, TextCollator()(texts))
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in drafter.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_empty_sample_adds_nothing(tmp_path, dtype):
    """H8: beside a normal sample, one of length 0 (with the default float dtype of empty tensors) changes neither the
    loss nor a gradient."""
    trainer = build_trainer(tmp_path, build_drafter().to(dtype))
    normal, empty = text_of(20, 12), {"input_ids": torch.tensor([]), "loss_mask": torch.tensor([])}
    alone, expected = loss_and_gradients(trainer, [normal])
    assert alone > 0
    for texts in ([normal, empty], [empty, normal]):
        loss, gradients = loss_and_gradients(trainer, texts)
        assert loss == pytest.approx(float(alone), abs=1e-3)
        for name, right in expected.items():
            torch.testing.assert_close(gradients[name], right, atol=1e-3, rtol=1e-2, msg=name)


def test_a_batch_of_nothing_but_empty_samples(tmp_path):
    """H8, H9 (b): no answers at all give loss 0 with zero gradients, not NaN."""
    trainer = build_trainer(tmp_path, build_drafter())
    empty = {"input_ids": torch.tensor([]), "loss_mask": torch.tensor([])}
    for texts in ([empty], [empty, text_of(9, 0)]):
        loss, gradients = loss_and_gradients(trainer, texts)
        assert loss == 0
        assert all(bool((gradient == 0).all()) for gradient in gradients.values())


def test_features_of_an_empty_sample_take_the_width_of_the_others():
    full = {**text_of(5, 2), "context_hidden_states": torch.ones(5, 6, dtype=torch.bfloat16)}
    empty = {key: torch.tensor([]) for key in full}
    batch = TextCollator()([empty, full])
    assert batch["context_hidden_states"].shape == (2, 5, 6)
    assert batch["context_hidden_states"].dtype == torch.bfloat16
    assert batch["input_ids"].dtype == batch["loss_mask"].dtype == torch.long
    assert draw_batch_anchors(batch, 4, (0,)).tolist() == [[-1, -1], [2, 3]]


@pytest.mark.parametrize("answer", [0, 1, 7, 8, 40])
def test_answers_shorter_than_a_block_are_used(answer):
    """H9 (c): n anchors for an answer of n tokens behind a prompt of at least two, whatever the block size."""
    batch = TextCollator()([text_of(10 + answer, answer)])
    assert (draw_batch_anchors(batch, 100, (0,)) >= 0).sum() == answer


def test_answers_of_one_token_are_encoded():
    tokenizer = build_tokenizer()
    text = encode_conversation({"messages": [USER, {"role": "assistant", "content": ""}]}, tokenizer)
    assert text["loss_mask"].sum() == 1
    assert text["input_ids"][-1] == tokenizer.eos_token_id
