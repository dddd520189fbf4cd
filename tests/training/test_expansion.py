"""Block expansion: weights kept, mixer grown, bound from the ceiling bin."""

import pytest
import torch

from tests.conftest import HIDDEN, VOCAB, build_drafter, build_target, prompt
from xpress_hf import AcceptanceRecord, XPressDrafter
from xpress_hf.evaluation.expansion_bound import ExpansionBound
from xpress_hf.modeling.rebuilding import rebuild
from xpress_hf.training.expansion import expand_block


def test_the_mixer_grows_and_old_slots_refine_as_before():
    drafter = build_drafter(factor=4.0, block_size=4)
    with torch.no_grad():
        drafter.refiner.mixer.normal_()
    larger = expand_block(drafter, 7)
    assert larger.config.block_size == 7
    mixer = larger.refiner.mixer
    assert torch.equal(mixer[:, :4, :4], drafter.refiner.mixer)
    assert mixer[:, 4:].abs().sum() == mixer[:, :, 4:].abs().sum() == 0
    # With the block mean held fixed (g(h) = 0) the bias of the old slots is bit for bit the old one.
    for one in (drafter, larger):
        torch.nn.init.zeros_(one.refiner.down_g.weight)
    hidden = torch.randn(2, 7, HIDDEN, generator=torch.Generator().manual_seed(0))
    previous = torch.randint(0, VOCAB, (2, 7), generator=torch.Generator().manual_seed(1))
    small = drafter.refiner.bias(drafter.refiner.begin(hidden[:, :4]), previous[:, :4])
    large = larger.refiner.bias(larger.refiner.begin(hidden), previous)
    torch.testing.assert_close(large[:, :4], small)
    for name, parameter in drafter.named_parameters():
        if name != "refiner.mixer":
            assert torch.equal(parameter, dict(larger.named_parameters())[name])


def test_an_expanded_drafter_drafts_and_saves(tmp_path):
    target, start = build_target(), prompt(5)
    larger = expand_block(build_drafter(factor=4.0, block_size=4), 6)
    larger.save_pretrained(tmp_path)
    loaded = XPressDrafter.from_pretrained(tmp_path).eval()
    assert loaded.config.block_size == 6
    ids = target.generate(start, assistant_model=loaded, max_new_tokens=14, do_sample=False)
    assert torch.equal(ids, target.generate(start, max_new_tokens=14, do_sample=False))


def test_a_refiner_can_be_added_and_nothing_can_be_lost():
    bare = build_drafter(refiner=None)
    refined = rebuild(bare, refiner={"rank": 4, "mlp_width": 8, "sweeps": 2})
    assert refined.refiner is not None
    assert torch.equal(refined.fusion.fc.weight, bare.fusion.fc.weight)
    assert not refined.refiner.mixer.any()
    with pytest.raises(ValueError, match="refiner"):
        rebuild(refined, refiner=None)
    with pytest.raises(ValueError, match="block_size"):
        rebuild(refined, block_size=3)
    with pytest.raises(ValueError, match="block_size"):
        expand_block(refined, refined.config.block_size)
    with pytest.raises(ValueError, match="no field"):
        rebuild(refined, blocksize=3)


def test_the_bound_is_the_ceiling_share_times_the_new_slots():
    # Ten full-length cycles, four at the ceiling of 3 drafts, and a cut one that does not count.
    record = AcceptanceRecord(3, [3, 3, 3, 3, 0, 1, 2, 0, 1, 2, 1], [3] * 10 + [1])
    bound = ExpansionBound.of(record, 6)
    assert (bound.block_size, bound.ceiling_share) == (4, 0.4)
    assert bound.bound == pytest.approx(0.8)
    assert bound.pays()
    assert "may pay" in str(bound)
    assert not ExpansionBound.of(AcceptanceRecord(3, [0] * 200 + [3], [3] * 201), 4).pays()
    with pytest.raises(ValueError, match="ceiling"):
        ExpansionBound.of(AcceptanceRecord(3, [1], [1]), 6)
