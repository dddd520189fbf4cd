"""Laws of the causal refiner: causality, fixed point, and what zero weights and candidates change."""

import pytest
import torch

from tests.conftest import VOCAB, build_config, build_drafter
from xpress_hf.modeling.refiner import CausalRefiner, refine_block

BLOCK, HIDDEN = 8, 32


def inputs(seed: int, blocks: int = 3):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(blocks, BLOCK, HIDDEN, generator=generator)
    base = torch.randn(blocks, BLOCK - 1, VOCAB, generator=generator) * 2
    first = torch.randint(0, VOCAB, (blocks, 2), generator=generator)
    return hidden, base, first


@pytest.fixture
def refiner() -> CausalRefiner:
    return build_drafter(factor=12.0).refiner


@torch.no_grad()
def test_a_slot_reads_earlier_slots_only(refiner):
    hidden, _, _ = inputs(0)
    state = refiner.begin(hidden)
    previous = torch.randint(0, VOCAB, (3, BLOCK), generator=torch.Generator().manual_seed(1))
    before = refiner.bias(state, previous)
    for slot in range(BLOCK):
        changed = previous.clone()
        changed[:, slot] = (changed[:, slot] + 1) % VOCAB
        after = refiner.bias(state, changed)
        # `previous[slot]` is the token of slot - 1, so it reaches slots >= slot.
        assert torch.equal(after[:, :slot], before[:, :slot])
        assert not torch.equal(after[:, slot:], before[:, slot:])


@torch.no_grad()
@pytest.mark.parametrize("seed", range(20))
def test_enough_sweeps_equal_left_to_right_decoding(refiner, seed):
    hidden, base, first = inputs(seed)
    state = refiner.begin(hidden)
    sequential = torch.zeros(3, BLOCK - 1, dtype=torch.long)
    for slot in range(BLOCK - 1):
        previous = torch.cat([first, sequential[:, :-1]], dim=1)
        sequential[:, slot] = (base + refiner.bias(state, previous)[:, 1:])[:, slot].argmax(dim=-1)
    found, logits = refine_block(refiner, hidden, base, first, BLOCK - 1)
    assert torch.equal(found, sequential)
    assert not torch.equal(base.argmax(dim=-1), sequential), "the refiner changed nothing, so nothing was tested"
    again, more = refine_block(refiner, hidden, base, first, 3 * BLOCK)
    assert torch.equal(again, found)
    assert torch.equal(more, logits)


@torch.no_grad()
@pytest.mark.parametrize("sweeps", [0, 1, 3, 7])
def test_a_prefix_settles_with_every_sweep(refiner, sweeps):
    """After s sweeps the first s slots are those of left-to-right decoding."""
    hidden, base, first = inputs(4)
    final, _ = refine_block(refiner, hidden, base, first, BLOCK - 1)
    found, _ = refine_block(refiner, hidden, base, first, sweeps)
    assert torch.equal(found[:, :sweeps], final[:, :sweeps])


@torch.no_grad()
@pytest.mark.parametrize("part", ["readout", "all"])
def test_zero_weights_leave_the_bare_drafter(refiner, part):
    for name, parameter in refiner.named_parameters():
        if part == "all" or part in name:
            parameter.zero_()
    hidden, base, first = inputs(2)
    found, logits = refine_block(refiner, hidden, base, first, 3)
    assert torch.equal(found, base.argmax(dim=-1))
    assert torch.equal(logits, base)


@torch.no_grad()
def test_the_upper_triangle_of_the_raw_mixer_has_no_effect(refiner):
    hidden, base, first = inputs(3)
    before = refine_block(refiner, hidden, base, first, 2)[1]
    refiner.mixer.add_(torch.ones_like(refiner.mixer).triu(diagonal=1) * 5)
    assert torch.equal(refine_block(refiner, hidden, base, first, 2)[1], before)


@torch.no_grad()
def test_the_folded_mixer_equals_mixing_and_adding_the_input(refiner):
    hidden, _, _ = inputs(3)
    state = refiner.begin(hidden)
    raw = refiner.mixer.tril()
    fused = state.hidden_part
    mixed = fused + torch.stack([fused[:, :, c] @ raw[c].T for c in range(raw.shape[0])], dim=-1)
    torch.testing.assert_close(torch.einsum("ckj,njc->nkc", state.mixer, fused), mixed)


@torch.no_grad()
def test_candidates_of_the_whole_vocabulary_are_the_exact_readout(refiner):
    hidden, base, first = inputs(5)
    exact = refine_block(refiner, hidden, base, first, 4)
    for count in (VOCAB, VOCAB + 10):
        found = refine_block(refiner, hidden, base, first, 4, top_candidates=count)
        assert torch.equal(found[0], exact[0])


@torch.no_grad()
def test_few_candidates_are_the_exact_readout_masked_to_them(refiner):
    hidden, base, first = inputs(6)
    found, logits = refine_block(refiner, hidden, base, first, 1, top_candidates=5)
    seed = base.argmax(dim=-1)
    bias = refiner.bias(refiner.begin(hidden), torch.cat([first, seed[:, :-1]], dim=1))[:, 1:]
    best = base.topk(5, dim=-1).indices
    expected = torch.full_like(base, -torch.inf).scatter(-1, best, (base + bias).gather(-1, best))
    torch.testing.assert_close(logits, expected)
    assert torch.equal(found, expected.argmax(dim=-1))


def test_one_candidate_keeps_the_bare_drafter(refiner):
    hidden, base, first = inputs(7)
    assert torch.equal(refine_block(refiner, hidden, base, first, 4, top_candidates=1)[0], base.argmax(dim=-1))


def test_a_fresh_refiner_hardly_moves_the_logits():
    refiner = CausalRefiner(build_config())
    for parameter in refiner.parameters():
        assert torch.isfinite(parameter).all()
    drafter = build_drafter(factor=1.0)
    with torch.no_grad():
        drafter.refiner.mixer.zero_()
        hidden, base, first = inputs(8)
        logits = refine_block(drafter.refiner, hidden, base, first, 2)[1]
    assert (logits - base).abs().max() < 1e-2


def test_a_cut_block_is_refused(refiner):
    with pytest.raises(ValueError, match="8 slots, got 5"):
        refiner.begin(torch.zeros(1, 5, HIDDEN))
