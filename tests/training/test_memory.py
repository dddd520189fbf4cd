"""Memory of the loss: what lives at its peak, counted tensor by tensor, against the arithmetic of docs/training.md."""

import pytest
import torch
from step_meter import LiveBytes
from torch.nn import functional as F

from tests.conftest import build_config
from xpress_hf.modeling.refiner import CausalRefiner
from xpress_hf.training import losses
from xpress_hf.training.losses import BlockTargets, block_loss, bytes_per_logit
from xpress_hf.training.recipes import RECIPES, Recipe

VOCAB, HIDDEN, SIZE = 20000, 64, 8
DRAFTS = SIZE - 1
CASES = {**RECIPES, "xpress, chain and KL": Recipe(l1=0.5, kl=0.2, chain=0.3, teacher_forced=1.0, free_running=0.3)}


@pytest.fixture(autouse=True)
def one_block_at_a_time(monkeypatch):
    """Chunks of few blocks must not fit into one float32 buffer, as those of real sizes do not."""
    monkeypatch.setattr(losses, "BUFFER_BYTES", DRAFTS * VOCAB * 4)


def peak(recipe: Recipe, num_blocks: int, chunk: int, dtype: torch.dtype) -> int:
    generator = torch.Generator().manual_seed(0)
    config = build_config(vocab_size=VOCAB, hidden_size=HIDDEN, block_size=SIZE, mask_token_id=VOCAB - 1)
    refiner = CausalRefiner(config)
    weight = torch.randn(VOCAB, HIDDEN, generator=generator).to(dtype)
    hidden = torch.randn(num_blocks, SIZE, HIDDEN, generator=generator).requires_grad_()
    states = torch.randn(num_blocks, DRAFTS, HIDDEN, generator=generator)
    ids = torch.randint(0, VOCAB, (num_blocks, SIZE), generator=generator)
    ones = torch.ones(num_blocks, DRAFTS)

    def head(rows: torch.Tensor) -> torch.Tensor:
        return F.linear(rows.flatten(0, 1).to(dtype), weight).unflatten(0, rows.shape[:2])

    targets = BlockTargets(ids[:, 1:], ones, ones, ids, lambda blocks: head(states[blocks]))
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16), LiveBytes() as live:
        block_loss(hidden, targets, head, refiner, recipe, chunk_blocks=chunk)
    return live.peak()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_a_block_of_a_chunk_costs_what_the_arithmetic_says(name, dtype):
    recipe = CASES[name]
    four, eight = (peak(recipe, 16, chunk, dtype) for chunk in (4, 8))
    per_logit = (eight - four) / (4 * DRAFTS * VOCAB)
    assert per_logit == pytest.approx(bytes_per_logit(recipe, dtype.itemsize), rel=0.02)


@pytest.mark.parametrize("name", CASES)
def test_the_peak_does_not_grow_with_the_number_of_blocks(name):
    few, many = (peak(CASES[name], count, 4, torch.float32) for count in (8, 64))
    rows = 64 * SIZE * HIDDEN * 4
    # What grows are the gradients of the hidden states alone, never anything as wide as the vocabulary.
    assert many - few < 2 * rows < DRAFTS * VOCAB * 4
