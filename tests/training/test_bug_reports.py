"""Rows of groups H and F of the bug reports that concern the trainer, by number, with the values given there.

Elsewhere:
    H1 test_trainer (overfit on a greedy text, every cycle full); with H5 also test_overfit (fixture T2)
    H3 test_blocks (slots, labels), test_data (batches)             H4 test_blocks (the mask is the one of decoding)
    H11 test_trainer (1x4, 2x2, 4x1)                                H13 test_resume
    H17 test_launch                                                 H23 test_losses, test_memory, test_trainer
    H24 test_chat, test_regeneration                                H26 tests/modeling/test_refiner.py, (d) test_resume
    H27 (config keys) tests/checkpoints/test_export.py              H28 tests/evaluation/test_evaluator.py
    F1-F8 tests/decoding/test_devices_and_dtypes.py, F7 also test_lora
Does not apply: H25, because drafters with a reduced vocabulary are refused (tests/checkpoints/test_layouts.py). There
are no rows H2, H12 and H18.
"""

import copy

import pytest
import torch
from transformers import OPTConfig, OPTForCausalLM

from tests.conftest import HIDDEN, VOCAB, build_config, build_drafter, build_target, plain, prompt
from tests.training.test_trainer import arguments, text_of
from xpress_hf import XPressDrafter
from xpress_hf.training.data import TextCollator
from xpress_hf.training.features import target_states
from xpress_hf.training.initialization import config_for_target
from xpress_hf.training.losses import BlockTargets, accepted, block_loss, slot_loss
from xpress_hf.training.recipes import Recipe
from xpress_hf.training.trainer import DrafterTrainer


def texts(count: int, length: int = 20, prompt_length: int = 6) -> list[dict[str, torch.Tensor]]:
    return [text_of(prompt(length, seed)[0], prompt_length) for seed in range(count)]


def loss_and_gradients(trainer: DrafterTrainer, batch: dict[str, torch.Tensor]):
    drafter = trainer.drafter
    drafter.zero_grad()
    loss = trainer.compute_loss(trainer.model, batch)
    if loss.requires_grad:
        loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in drafter.named_parameters() if p.grad is not None}


def test_h6_a_step_with_values_that_are_not_finite_changes_nothing(tmp_path):
    drafter = build_drafter(factor=2.0)
    target = build_target()
    layers = drafter.config.target_layer_ids
    rows = []
    for number, text in enumerate(texts(4)):
        taps, last = target_states(target, text["input_ids"][None], torch.ones(1, 20), layers)
        if number == 2:
            taps[0, 3] = torch.inf
        rows.append({**text, "context_hidden_states": taps[0], "teacher_hidden_states": last[0]})
    args = arguments(tmp_path, max_steps=4, train_sampling_strategy="sequential", max_grad_norm=0.0)
    trainer = DrafterTrainer(drafter, args, target, train_dataset=rows)
    seen = []

    def remember(optimizer, *rest):
        seen.append(copy.deepcopy(drafter.state_dict()))

    trainer.create_optimizer().register_step_post_hook(remember)
    with pytest.raises(FloatingPointError, match="Step 2"):
        trainer.train()
    assert len(seen) == 2
    for name, parameter in drafter.named_parameters():
        assert torch.isfinite(parameter).all()
        assert torch.equal(parameter, seen[-1][name])


def test_h6_a_gradient_that_is_not_finite_stops_the_run(tmp_path):
    drafter = build_drafter(factor=2.0)
    before = copy.deepcopy(drafter.state_dict())
    drafter.fusion.norm.weight.register_hook(lambda grad: grad * torch.nan)
    trainer = DrafterTrainer(drafter, arguments(tmp_path, max_steps=2), build_target(), train_dataset=texts(2))
    with pytest.raises(FloatingPointError, match="Step 0: a gradient"):
        trainer.train()
    for name, parameter in drafter.named_parameters():
        assert torch.equal(parameter, before[name])


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("recipe", [Recipe(l1=1.0, ce=0.0), Recipe(kl=1.0, ce=0.0), Recipe(chain=1.0, ce=0.0)])
def test_h7_losses_of_bf16_logits_are_computed_in_float32(recipe, autocast):
    generator = torch.Generator().manual_seed(0)
    teacher_logits = torch.randn(3, 4, 1000, generator=generator, dtype=torch.float64) * 3
    logits = (teacher_logits + 0.1 * torch.randn(3, 4, 1000, generator=generator)).to(torch.bfloat16)
    labels = torch.randint(0, 1000, (3, 4), generator=generator)
    weights = torch.ones(3, 4)
    teacher = teacher_logits.softmax(-1)
    rows = logits.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = slot_loss(rows, labels, weights, teacher.float(), recipe)
    loss.backward()
    exact = logits.double().requires_grad_()
    law = exact.softmax(-1)
    distance = (law - teacher).abs().sum(-1)
    assert (1 - distance / 2).mean() > 0.9
    kept = (1 - distance / 2).cumprod(-1)
    value = recipe.l1 * distance.sum() + recipe.chain * (1 - kept).sum()
    value = value + recipe.kl * (teacher * (teacher.log() - law.log())).sum()
    value.backward()
    assert loss.item() == pytest.approx(value.item(), rel=1e-4)
    error = (rows.grad.double() - exact.grad).norm() / exact.grad.norm()
    assert error < 0.01


def test_h8_h9_an_empty_sample_contributes_nothing(tmp_path):
    trainer = DrafterTrainer(build_drafter(factor=2.0).to(torch.bfloat16), arguments(tmp_path), build_target())
    normal = texts(1)[0]
    empty = {key: value[:0] for key, value in normal.items()}
    collate = TextCollator()
    with torch.autocast("cpu", torch.bfloat16):
        alone, gradients = loss_and_gradients(trainer, collate([normal]))
        both, together = loss_and_gradients(trainer, collate([empty, normal]))
        nothing, zeros = loss_and_gradients(trainer, collate([empty]))
    assert both == pytest.approx(alone, abs=1e-3)
    for name, right in gradients.items():
        torch.testing.assert_close(together[name], right, atol=1e-2, rtol=5e-2)
    assert nothing == 0.0
    assert not any(grad.any() for grad in zeros.values())


def test_h9_short_answers_are_used_as_far_as_they_go(tmp_path):
    replies = (0, 1, 7, 8, 40)
    rows = [text_of(prompt(6 + reply, reply)[0], 6) for reply in replies]
    drafter = build_drafter(factor=2.0, block_size=8)
    trainer = DrafterTrainer(
        drafter, arguments(tmp_path, max_steps=5, num_anchors=9), build_target(), train_dataset=rows
    )
    trainer.train()
    assert trainer.state.global_step == 5
    for reply, row in zip(replies, rows, strict=True):
        anchors = trainer._with_anchors(TextCollator()([row]), 0)["anchors"][0]
        anchors = anchors[anchors >= 0]
        assert len(anchors) == min(reply, 9)
        assert all(5 <= anchor < 5 + reply for anchor in anchors)


def packed(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    joined = {key: torch.cat([row[key] for row in rows]) for key in rows[0]}
    numbers = [torch.full((len(row["input_ids"]),), number) for number, row in enumerate(rows)]
    return {**joined, "document_ids": torch.cat(numbers)}


@pytest.mark.parametrize("layout", ["fill", "shift"])
def test_h10_a_packed_row_gives_the_loss_of_its_texts(tmp_path, layout):
    drafter = build_drafter(
        factor=2.0, slot_layout=layout, sliding_window=7, layer_types=["full_attention", "sliding_attention"]
    )
    target = build_target()
    one, two = text_of(prompt(20, 1)[0], 4), text_of(prompt(30, 2)[0], 5)
    # Supervised from its first token on: the last place of the first text must still be no anchor for it.
    two["loss_mask"][:] = 1
    trainer = DrafterTrainer(drafter, arguments(tmp_path, num_anchors=100, recipe="xpress"), target)
    collate = TextCollator()
    count = torch.tensor(1.0)
    parts = [trainer.compute_loss(drafter, collate([row]), num_items_in_batch=count).item() for row in (one, two)]
    whole = trainer.compute_loss(drafter, collate([packed([one, two])]), num_items_in_batch=count).item()
    assert whole == pytest.approx(sum(parts), rel=1e-5)
    other = text_of(prompt(20, 9)[0], 4)
    parts[0] = trainer.compute_loss(drafter, collate([other]), num_items_in_batch=count).item()
    changed = trainer.compute_loss(drafter, collate([packed([other, two])]), num_items_in_batch=count).item()
    assert changed == pytest.approx(sum(parts), rel=1e-5)


def test_h14_every_checkpoint_drafts_and_holds_no_target(tmp_path):
    target, drafter = build_target(), build_drafter(factor=2.0)
    args = arguments(tmp_path, max_steps=4, save_strategy="steps", save_steps=2)
    DrafterTrainer(drafter, args, target, train_dataset=texts(4)).train()
    own = sum(p.numel() * p.element_size() for p in drafter.parameters())
    for step in (2, 4):
        folder = tmp_path / f"checkpoint-{step}"
        assert (folder / "model.safetensors").stat().st_size < 2 * own
        loaded = XPressDrafter.from_pretrained(folder).eval()
        start = prompt(5)
        ids = target.generate(start, assistant_model=loaded, max_new_tokens=12, do_sample=False)
        assert torch.equal(ids, target.generate(start, max_new_tokens=12, do_sample=False))


@pytest.mark.parametrize("changed", [{"mask_token_id": 7}, {"target_layer_ids": [1, 0]}, {"block_size": 5}])
def test_e11_a_run_does_not_go_on_under_other_conventions(tmp_path, changed):
    target, name = build_target(), next(iter(changed))
    args = arguments(tmp_path, max_steps=1, save_strategy="steps", save_steps=1)
    drafter = build_drafter(refiner=None)
    DrafterTrainer(drafter, args, target, train_dataset=texts(1)).train()
    # (d): the saved config carries the id of the run.
    saved = XPressDrafter.from_pretrained(tmp_path / "checkpoint-1")
    assert saved.config.mask_token_id == drafter.config.mask_token_id
    other = DrafterTrainer(build_drafter(refiner=None, **changed), args, target, train_dataset=texts(1))
    for resume in (True, str(tmp_path / "checkpoint-1")):
        with pytest.raises(ValueError, match=name):
            other.train(resume_from_checkpoint=resume)


def test_h15_gradient_checkpointing_changes_nothing(tmp_path):
    results = []
    for checkpointing in (False, True):
        drafter = build_drafter(factor=2.0)
        args = arguments(tmp_path, max_steps=1, learning_rate=0.1, optim="sgd", gradient_checkpointing=checkpointing)
        trainer = DrafterTrainer(drafter, args, build_target(), train_dataset=texts(1))
        trainer.train()
        results.append((trainer.state.log_history[0]["loss"], dict(drafter.named_parameters())))
    assert float(results[0][0]) == pytest.approx(float(results[1][0]), abs=1e-6)
    for name, parameter in results[0][1].items():
        torch.testing.assert_close(parameter, results[1][1][name], atol=1e-6, rtol=1e-6)


def build_opt():
    config = OPTConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, word_embed_proj_dim=HIDDEN, ffn_dim=64, num_hidden_layers=3,
        num_attention_heads=4, max_position_embeddings=128,
    )  # fmt: skip
    return OPTForCausalLM(config).eval()


@pytest.mark.parametrize("family", ["gpt2", "gpt-neox", "llama", "gemma2", "phi3", "opt"])
def test_h16_drafters_for_targets_of_many_families(tmp_path, family):
    target = build_opt() if family == "opt" else build_target(family)
    sizes = {"num_hidden_layers": 1, "block_size": 4, "intermediate_size": 32, "num_attention_heads": 4}
    drafter = XPressDrafter(config_for_target(target, [0, 1], VOCAB - 1, **sizes))
    trainer = DrafterTrainer(drafter, arguments(tmp_path, max_steps=2), target, train_dataset=texts(2))
    trainer.train()
    assert trainer.state.global_step == 2


def test_h19_unscored_places_are_neither_hit_nor_miss():
    labels = torch.tensor([[1, 2, 3], [1, 2, 3]])
    drafts = torch.tensor([[1, 2, 9], [1, 2, 3]])
    hidden = torch.nn.functional.one_hot(torch.nn.functional.pad(drafts, (1, 0)), HIDDEN).float()
    weights = torch.ones(2, 3)
    for _ in range(2):
        targets = BlockTargets(labels, weights, torch.ones(2, 3), torch.zeros(2, 4, dtype=torch.long))
        _, figures = block_loss(hidden, targets, lambda rows: rows, None, Recipe())
        assert figures["bare_accepted"] == 5
        weights[:, 0] = 0
    # A block that the text's end cuts after one place counts as a run of 1.
    assert accepted(drafts, labels, torch.tensor([[1, 1, 1], [1, 0, 0]])) == 3


def test_h20_attention_backends_agree(tmp_path):
    """Logits of a batch of texts of different lengths, where places without a block see themselves only."""
    target, found = build_target(), []
    for attention in ("eager", "sdpa"):
        drafter = build_drafter(factor=2.0, sliding_window=7, layer_types=["full_attention", "sliding_attention"])
        drafter.set_attn_implementation(attention)
        assert drafter.backbone.layers[0].self_attn.config._attn_implementation == attention
        trainer = DrafterTrainer(drafter, arguments(tmp_path, recipe="xpress"), target)
        hidden = []
        drafter.backbone.register_forward_hook(lambda module, args, output, kept=hidden: kept.append(output.detach()))
        batch = TextCollator()([text_of(prompt(30, 1)[0], 6), text_of(prompt(12, 2)[0], 6)])
        batch["anchors"] = torch.tensor([[6, 9, 20], [7, -1, -1]])
        loss, gradients = loss_and_gradients(trainer, batch)
        found.append((trainer.target.logits(hidden[0]), loss, gradients))
    (eager, one, left), (sdpa, two, right) = found
    assert torch.isfinite(eager).all()
    torch.testing.assert_close(eager, sdpa, atol=1e-5, rtol=1e-5)
    assert one == pytest.approx(two, abs=1e-5)
    for name, gradient in left.items():
        assert torch.isfinite(gradient).all(), name
        torch.testing.assert_close(gradient, right[name], atol=1e-5, rtol=1e-4)


def test_h21_the_target_stays_in_eval_mode(tmp_path):
    target = build_target("llama")
    target.config.attention_dropout = 0.5
    for layer in target.model.layers:
        layer.self_attn.attention_dropout = 0.5
    target.train()
    drafter = build_drafter(factor=2.0)
    trainer = DrafterTrainer(
        drafter, arguments(tmp_path, max_steps=2, num_train_epochs=2), target, train_dataset=texts(1)
    )
    seen = []
    states = trainer._states
    trainer._states = lambda inputs: seen.append(states(inputs)) or seen[-1]
    trainer.train()
    assert len(seen) == 2
    assert torch.equal(seen[0][0], seen[1][0])
    assert not target.training
    assert not seen[0][0].requires_grad
    assert all(p.grad is None and not p.requires_grad for p in target.parameters())


@pytest.mark.parametrize("fusion", ["concat", "layerwise"])
def test_h22_every_learned_tensor_is_trained(tmp_path, fusion):
    drafter = build_drafter(factor=2.0, fusion=fusion)
    before = copy.deepcopy(dict(drafter.named_parameters()))
    args = arguments(tmp_path, max_steps=1, learning_rate=0.1, optim="sgd", recipe="xpress", max_grad_norm=0.0)
    DrafterTrainer(drafter, args, build_target(), train_dataset=texts(1)).train()
    still = [name for name, p in drafter.named_parameters() if torch.equal(p, before[name])]
    assert still == []
    buffers = {name.split(".")[-1] for name, b in drafter.named_buffers() if b.is_floating_point()}
    assert buffers <= {"inv_freq", "original_inv_freq"}


def test_h27_published_weights_and_uniform_loss():
    recipe = Recipe(gamma=7.0)
    assert recipe.slot_weights(3).tolist() == pytest.approx([1, 0.8669, 0.7515], abs=1e-4)
    weights = recipe.slot_weights(3).expand(2, 3)
    loss = slot_loss(torch.zeros(2, 3, 64), torch.randint(0, 64, (2, 3)), weights, None, recipe) / weights.sum()
    assert loss.item() == pytest.approx(4.1589, abs=1e-4)


def test_f3_drafter_and_target_of_different_dtype_train(tmp_path):
    target = build_target().to(torch.bfloat16)
    trainer = DrafterTrainer(
        build_drafter(factor=2.0), arguments(tmp_path, max_steps=2), target, train_dataset=texts(2)
    )
    trainer.train()
    assert all(p.dtype == torch.float32 for p in trainer.drafter.parameters())


def test_h5_evaluation_during_training_gives_the_acceptance_of_generate(tmp_path):
    """The replayed record of a text that the target wrote is that of generate(), bare and refined, exactly."""
    target = build_target("llama")
    drafter = build_drafter(factor=6.0, block_size=4)
    answers = [plain(target, prompt(5, seed), max_new_tokens=30)[0] for seed in range(3)]
    # So that something is accepted, the drafter learns these answers a little.
    args = arguments(tmp_path, max_steps=60, num_anchors=32, recipe="xpress", per_device_train_batch_size=3)
    trainer = DrafterTrainer(drafter, args, target, train_dataset=[text_of(ids, 5) for ids in answers])
    trainer.train()
    metrics = trainer.evaluate([text_of(ids, 5) for ids in answers])
    drafter.eval()
    for name, sweeps in (("bare", 0), ("refined", None)):
        drafter.speculation.sweeps = sweeps
        records = []
        for seed in range(3):
            target.generate(prompt(5, seed), assistant_model=drafter, max_new_tokens=30, do_sample=False)
            records.append(drafter.last_acceptance)
        pooled = sum(records[1:], start=records[0])
        assert metrics[f"eval_{name}_acceptance_length"] == pooled.acceptance_length
        assert sum(pooled.accepted) > 0


def test_dict_of_eval_sets_and_predict_keep_their_figures_apart(tmp_path):
    drafter = build_drafter(factor=2.0)
    first, second = texts(1, 20), texts(2, 30)
    args = arguments(tmp_path, max_steps=1, eval_strategy="steps", eval_steps=1)
    trainer = DrafterTrainer(
        drafter, args, build_target(), train_dataset=first, eval_dataset={"one": first, "two": second}
    )
    trainer.train()
    merged = {key: value for entry in trainer.state.log_history for key, value in entry.items()}
    for name, rows in (("one", first), ("two", second)):
        alone = trainer.predict(rows).metrics
        for figure in ("bare_block_acceptance_length", "bare_acceptance_length", "loss"):
            assert merged[f"eval_{name}_{figure}"] == pytest.approx(alone[f"test_{figure}"], abs=1e-6)


def test_warnings_of_erosion_and_of_a_refiner_that_does_not_pay(tmp_path, caplog):
    trainer = DrafterTrainer(build_drafter(), arguments(tmp_path), build_target())
    trainer.state.max_steps = trainer.state.global_step = 3
    with caplog.at_level("WARNING"):
        from xpress_hf.training import trainer as module

        module.logger.propagate = True
        trainer._warn({"bare_block_acceptance_length": 2.0, "refined_block_acceptance_length": 2.1})
        assert not caplog.records
        trainer._warn({"bare_block_acceptance_length": 1.9, "refined_block_acceptance_length": 1.9})
    assert "erodes" in caplog.text
    assert "does not pay" in caplog.text


def test_a_frozen_backbone_stays_as_it_was(tmp_path):
    drafter = build_drafter(factor=2.0)
    before = copy.deepcopy(drafter.state_dict())
    args = arguments(tmp_path, max_steps=2, recipe="xpress", freeze_backbone=True, learning_rate=0.1)
    DrafterTrainer(drafter, args, build_target(), train_dataset=texts(1)).train()
    moved = {name for name, p in drafter.state_dict().items() if not torch.equal(p, before[name])}
    assert moved
    assert all(name.startswith("refiner.") for name in moved)


@pytest.mark.parametrize(
    ("recipe", "config", "more", "word"),
    [
        ("dflare", {}, {}, "fusion"),
        ("jetspec", {}, {}, "block_attention"),
        ("dbloom", {}, {"loss_vocab_size": 8}, "loss_vocab_size"),
        ("dflash", {}, {"freeze_backbone": True}, "freeze_backbone"),
        ("dbloom", {}, {"recipe_options": {"old_drafts": 40}}, "old_drafts"),
    ],
)
def test_recipes_that_do_not_fit_the_drafter_are_refused(tmp_path, recipe, config, more, word):
    with pytest.raises(ValueError, match=word):
        DrafterTrainer(build_drafter(**config), arguments(tmp_path, recipe=recipe, **more), build_target())


def test_an_empty_data_set_is_refused(tmp_path):
    with pytest.raises(ValueError, match="empty"):
        DrafterTrainer(build_drafter(), arguments(tmp_path), build_target(), train_dataset=[])


def test_the_loss_memory_sets_the_chunk():
    from xpress_hf.training.losses import bytes_per_logit, chunk_for_memory

    recipe = Recipe()
    assert chunk_for_memory(10 * 15 * 1000 * bytes_per_logit(recipe), 15, 1000, recipe) == 10
    assert chunk_for_memory(1, 15, 1000, recipe) == 1
    assert build_config().hidden_size == HIDDEN
