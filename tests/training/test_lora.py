"""Adapters: a drafter trained through LoRA, and a drafter for a target that carries one (F7)."""

import copy

import peft
import pytest
import torch

from tests.conftest import build_drafter, build_target, prompt
from tests.training.test_trainer import arguments, text_of
from xpress_hf import XPressDrafter
from xpress_hf.training.features import target_states
from xpress_hf.training.trainer import DrafterTrainer


def lora(model, **options):
    """`model` with an adapter that changes what it computes."""
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, **options)
    return peft.get_peft_model(model, config)


def texts() -> list[dict[str, torch.Tensor]]:
    return [text_of(prompt(20, seed)[0], 6) for seed in range(4)]


def assert_lossless(target, drafter) -> list[int]:
    """Ids are those of plain generate; returns the accepted drafts."""
    start = prompt(5)
    ids = target.generate(start, assistant_model=drafter, max_new_tokens=24, do_sample=False)
    assert torch.equal(ids, target.generate(start, max_new_tokens=24, do_sample=False))
    inner = drafter if isinstance(drafter, XPressDrafter) else drafter.get_base_model()
    return inner.last_acceptance.accepted


@pytest.mark.parametrize("recipe", ["dflash", "xpress"])
def test_train_save_load_and_merge_an_adapter(tmp_path, recipe):
    base, target = build_drafter(factor=4.0), build_target()
    before = copy.deepcopy(base.state_dict())
    adapted = lora(base)
    first = {name: p.clone() for name, p in adapted.named_parameters() if p.requires_grad}
    assert first
    assert all("lora_" in name for name in first)
    args = arguments(tmp_path, max_steps=3, learning_rate=0.05, recipe=recipe)
    trainer = DrafterTrainer(adapted, args, target, train_dataset=texts(), eval_dataset=texts()[:1])
    trainer.train()
    assert "eval_bare_acceptance_length" in trainer.evaluate()
    trained = dict(adapted.named_parameters())
    assert all(not torch.equal(trained[name], start) for name, start in first.items())
    for name, value in before.items():
        renamed = name.replace("q_proj.", "q_proj.base_layer.").replace("v_proj.", "v_proj.base_layer.")
        assert torch.equal(adapted.get_base_model().state_dict()[renamed], value)
    trainer.save_model()
    assert (tmp_path / "adapter_model.safetensors").exists()
    assert not (tmp_path / "model.safetensors").exists()

    fresh = build_drafter(factor=4.0)
    loaded = peft.PeftModel.from_pretrained(fresh, tmp_path).eval()
    kept = assert_lossless(target, loaded)
    merged = loaded.merge_and_unload()
    assert isinstance(merged, XPressDrafter)
    assert assert_lossless(target, merged) == kept
    merged.save_pretrained(tmp_path / "merged")
    assert assert_lossless(target, XPressDrafter.from_pretrained(tmp_path / "merged").eval()) == kept


def test_a_drafter_is_trained_on_the_adapted_target(tmp_path):
    adapted, bare = lora(build_target(), task_type="CAUSAL_LM"), build_target()
    drafter = build_drafter(factor=4.0)
    layers = drafter.config.target_layer_ids
    ids = prompt(12)
    seen = [target_states(one, ids, torch.ones_like(ids), layers)[0] for one in (adapted, bare)]
    assert not torch.allclose(*seen)
    trainer = DrafterTrainer(drafter, arguments(tmp_path, max_steps=2), adapted, train_dataset=texts())
    trainer.train()
    assert not any("lora" in name for name, _ in drafter.named_parameters())
    assert all(p.grad is None for p in adapted.parameters())
    drafter.eval()
    assert_lossless(adapted, drafter)
    with adapted.disable_adapter():
        assert_lossless(adapted, drafter)
