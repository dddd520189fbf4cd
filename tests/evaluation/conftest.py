"""A saved tiny pair with a tokenizer and prompts."""

import json

import pytest

from tests.conftest import build_drafter, build_target
from tests.training.chat_fixtures import build_tokenizer


@pytest.fixture
def folders(tmp_path):
    tokenizer = build_tokenizer()
    build_target(vocab_size=len(tokenizer)).save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    build_drafter(vocab_size=len(tokenizer), mask_token_id=3, block_size=4).save_pretrained(tmp_path / "drafter")
    rows = [
        {"id": f"mt_bench/{number}", "benchmark": "mt_bench", "turns": ["one two", "three"]} for number in range(3)
    ]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path
