"""A drafter of ours, run by the block drafting of transformers itself, gives the same drafts as with zero sweeps."""

import pytest
import torch
from transformers.generation import candidate_generator

from tests.conftest import build_drafter, build_target, plain, prompt
from xpress_hf import XPressDrafter
from xpress_hf.decoding.candidates import XPressCandidateGenerator

stock = getattr(candidate_generator, "DFlashTokenCandidateGenerator", None)
pytestmark = pytest.mark.skipif(stock is None, reason="this version of transformers has no block drafting of its own")


def spy(monkeypatch, kind) -> list[list[int]]:
    """Collects the drafts that a candidate generator hands out."""
    drafts = []
    original = kind.get_candidates

    def get_candidates(self, input_ids, *args, **kwargs):
        candidates, logits = original(self, input_ids, *args, **kwargs)
        if candidates.shape[1] > input_ids.shape[1]:
            drafts.append(candidates[0, input_ids.shape[1] :].tolist())
        return candidates, logits

    monkeypatch.setattr(kind, "get_candidates", get_candidates)
    return drafts


@pytest.mark.parametrize("refiner", [None, {"rank": 8, "mlp_width": 16, "sweeps": 2}], ids=["bare", "refiner idle"])
@pytest.mark.parametrize("layer_types", [["full_attention"] * 2, ["sliding_attention", "full_attention"]])
def test_same_drafts_as_the_stock_path(monkeypatch, tmp_path, refiner, layer_types):
    target, ids = build_target(), prompt()
    window = 64 if "sliding_attention" in layer_types else None
    build_drafter(refiner=refiner, layer_types=layer_types, sliding_window=window).save_pretrained(tmp_path)
    drafter = XPressDrafter.from_pretrained(tmp_path)
    drafter.speculation.sweeps, drafter.speculation.loop = 0, "stock"
    theirs, ours = spy(monkeypatch, stock), spy(monkeypatch, XPressCandidateGenerator)
    options = {"max_new_tokens": 40, "do_sample": False}
    expected = plain(target, ids, max_new_tokens=40)
    assert torch.equal(target.generate(ids, assistant_model=drafter, speculation_type="dflash", **options), expected)
    assert torch.equal(target.generate(ids, assistant_model=drafter, **options), expected)
    assert len(ours) == len(theirs) > 5
    for mine, other in zip(ours, theirs, strict=True):
        # The stock path never shortens its last blocks.
        assert mine == other[: len(mine)]
    assert len({tuple(draft) for draft in ours}) > 5, "constant drafts would agree by accident"
