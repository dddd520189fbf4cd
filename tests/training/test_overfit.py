"""H1 and H5 in closed form: on the target that counts (fixture T2) a trained drafter fills every block; trainer and
generate() say so with the same number."""

import pytest
import torch

from tests.conftest import build_config, build_cycle_target, plain, prompt
from tests.training.test_trainer import arguments, text_of
from xpress_hf import XPressDrafter
from xpress_hf.training.trainer import DrafterTrainer

BLOCK, CYCLES = 4, 8
PERIOD, VOCAB = 16, 17  # the id that does not occur is the mask


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["fill", "shift"])
@pytest.mark.parametrize("recipe", ["dflash", "xpress"])
def test_every_cycle_is_full_in_training_and_in_generate(tmp_path, layout, recipe):
    target = build_cycle_target(VOCAB, PERIOD)
    torch.manual_seed(0)
    refiner = {"rank": 8, "mlp_width": 16, "sweeps": 2} if recipe == "xpress" else None
    sizes = {"vocab_size": VOCAB, "mask_token_id": VOCAB - 1, "block_size": BLOCK, "slot_layout": layout}
    drafter = XPressDrafter(build_config(refiner=refiner, **sizes))
    whole = drafter.config.num_draft_tokens
    new = 1 + CYCLES * (whole + 1)
    start = prompt(2, vocab=PERIOD)
    ids = plain(target, start, max_new_tokens=new)[0]
    assert ids[2:].tolist() == [(int(start[0, -1]) + 1 + step) % PERIOD for step in range(new)]
    text = text_of(ids, 2)
    for name, steps in (("dflash", 150), *([("xpress", 150)] if refiner else [])):
        args = arguments(tmp_path, max_steps=steps, recipe=name, num_anchors=64, logging_steps=50)
        trainer = DrafterTrainer(drafter, args, target, train_dataset=[text] * 8)
        trainer.train()
    metrics = trainer.evaluate([text])
    drafter.eval()
    for arm, sweeps in (("bare", 0), *([("refined", None)] if refiner else [])):
        drafter.speculation.sweeps = sweeps
        out = target.generate(start, assistant_model=drafter, max_new_tokens=new, do_sample=False)
        assert torch.equal(out[0], ids)
        record = drafter.last_acceptance
        assert record.accepted == [whole] * CYCLES
        assert metrics[f"eval_{arm}_acceptance_length"] == record.acceptance_length == whole + 1
    if layout == "fill":
        assert record.acceptance_length == BLOCK
