"""The trainer: what it teaches is what generate() runs, and the split into batches does not matter."""

import copy

import pytest
import torch

from tests.conftest import build_config, build_drafter, build_target, plain, prompt
from xpress_hf import XPressDrafter
from xpress_hf.training.data import TextCollator
from xpress_hf.training.features import FeatureDataset, FeatureMeta, FeatureWriter, target_states, write_features
from xpress_hf.training.initialization import initialize_from_target
from xpress_hf.training.optimizer import MuonWithAdamW
from xpress_hf.training.trainer import DrafterTrainer, DrafterTrainingArguments


def text_of(ids: torch.Tensor, prompt_length: int) -> dict[str, torch.Tensor]:
    loss_mask = torch.zeros_like(ids)
    loss_mask[prompt_length:] = 1
    return {"input_ids": ids, "loss_mask": loss_mask}


def arguments(tmp_path, **overrides) -> DrafterTrainingArguments:
    values = {
        "output_dir": str(tmp_path),
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "num_anchors": 16,
        "per_device_train_batch_size": 1,
        "logging_steps": 1,
        "learning_rate": 3e-3,
    }
    return DrafterTrainingArguments(**{**values, **overrides})


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("layout", ["fill", "shift"])
@pytest.mark.parametrize("recipe", ["dflash", "xpress"])
def test_conventions_of_training_are_those_of_generate(tmp_path, tied, layout, recipe):
    """Overfit one greedy text: generate() then commits a whole block in every cycle, as the trainer's figure says."""
    target = build_target("llama-tied", seed=2, factor=10.0) if tied else build_target("llama")
    places, start = 36, prompt(3)
    ids = plain(target, start, max_new_tokens=places)[0]
    assert len(set(ids.tolist())) > 10, "a text that repeats itself tests nothing"
    text = text_of(ids, 3)
    torch.manual_seed(0)
    refiner = {"rank": 8, "mlp_width": 16, "sweeps": 2} if recipe == "xpress" else None
    drafter = XPressDrafter(build_config(block_size=4, refiner=refiner, slot_layout=layout))
    # The distribution loss learns next to nothing from a random start, so plain cross entropy goes first.
    for name, steps in (("dflash", 250), *([("xpress", 400)] if refiner else [])):
        args = arguments(tmp_path, max_steps=steps, recipe=name, num_anchors=64, logging_steps=50)
        trainer = DrafterTrainer(drafter, args, target, train_dataset=[text] * 8)
        trainer.train()
    trainer.evaluate([text])
    whole = drafter.config.num_draft_tokens
    # Anchors near the end have fewer slots to accept.
    possible = 1 + sum(min(whole, places - start) for start in range(places)) / places
    # The bare block is only an anchor of the refined one in the `xpress` recipe, with a falling weight.
    figure = trainer.state.log_history[-1][f"eval_{'refined' if refiner else 'bare'}_block_acceptance_length"]
    assert figure == pytest.approx(possible, abs=0.05)
    drafter.eval()
    cycles = (places - 1) // (whole + 1)
    new = 1 + cycles * (whole + 1)
    target.generate(start, assistant_model=drafter, max_new_tokens=new, do_sample=False)
    assert drafter.last_acceptance.accepted == [whole] * cycles


def run_split(tmp_path, batch: int, accumulation: int, recipe: str):
    target = build_target()
    drafter = build_drafter(factor=2.0)
    texts = []
    for seed, places in enumerate((3, 5, 11, 2)):
        ids = prompt(6 + places, seed)[0]
        texts.append(text_of(ids, 6))
    args = arguments(
        tmp_path,
        max_steps=1,
        recipe=recipe,
        optim="sgd",
        learning_rate=0.1,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        train_sampling_strategy="sequential",
    )
    # More anchors than places: every place is an anchor, whatever the random state.
    trainer = DrafterTrainer(drafter, args, target, train_dataset=texts)
    trainer.train()
    loss = next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
    return loss, {name: parameter.detach().clone() for name, parameter in drafter.named_parameters()}


@pytest.mark.parametrize("recipe", ["dflash", "xpress"])
def test_same_update_for_every_split_into_batches(tmp_path, recipe):
    expected_loss, expected = run_split(tmp_path, 4, 1, recipe)
    for batch, accumulation in ((2, 2), (1, 4)):
        loss, parameters = run_split(tmp_path, batch, accumulation, recipe)
        assert float(loss) == pytest.approx(float(expected_loss), abs=1e-4)
        for name, right in expected.items():
            torch.testing.assert_close(parameters[name], right, atol=1e-6, rtol=1e-5, msg=name)


def test_features_on_disk_give_the_loss_of_online_states(tmp_path):
    target = build_target()
    drafter = build_drafter()
    layers = drafter.config.target_layer_ids
    texts = [prompt(14, seed)[0] for seed in range(3)]
    writer = FeatureWriter(tmp_path / "features", FeatureMeta(layers, 32, "tiny"))
    for ids in texts:
        taps, last = target_states(target, ids[None], torch.ones_like(ids[None]), layers)
        writer.add(ids.tolist(), text_of(ids, 5)["loss_mask"], torch.cat([taps, last], dim=-1)[0, :-1])
    writer.close()
    stored = FeatureDataset(tmp_path / "features")
    assert len(stored) == 3
    assert torch.equal(stored[1]["input_ids"], texts[1])
    args = arguments(tmp_path, recipe="xpress", num_anchors=100)
    trainer = DrafterTrainer(drafter, args, target)
    collate = TextCollator()
    online = trainer.compute_loss(drafter, collate([text_of(ids, 5) for ids in texts])).item()
    disk = trainer.compute_loss(drafter, collate([stored[index] for index in range(3)])).item()
    # The stored states are bfloat16.
    assert disk == pytest.approx(online, rel=2e-2)


def test_an_interrupted_reading_goes_on_where_it_stopped(tmp_path):
    target = build_target()
    texts = [text_of(prompt(8 + seed, seed)[0], 5) for seed in range(5)]
    assert write_features(target, texts, tmp_path / "whole", [0, 1], batch_size=2) == 5
    write_features(target, texts[:2], tmp_path / "cut", [0, 1], batch_size=2)
    with open(tmp_path / "cut" / "features.bin", "ab") as rows, open(tmp_path / "cut" / "index.jsonl", "a") as index:
        rows.write(b"\1" * (7 * 3 * 2 * 32 + 100))
        index.write('{"input_ids": [1, 2')
    assert write_features(target, texts, tmp_path / "cut", [0, 1], batch_size=2) == 5
    whole, cut = FeatureDataset(tmp_path / "whole"), FeatureDataset(tmp_path / "cut")
    for index in range(5):
        assert torch.equal(whole[index]["input_ids"], texts[index]["input_ids"])
        assert torch.equal(whole[index]["loss_mask"], texts[index]["loss_mask"])
        for key, value in whole[index].items():
            # Batches are padded to other lengths, which changes sums in the last bits.
            torch.testing.assert_close(value.float(), cut[index][key].float(), atol=2e-2, rtol=2e-2)


def test_a_feature_folder_is_continued_and_never_mixed(tmp_path):
    meta = FeatureMeta([0, 1], 4, "tiny")
    for first in (0, 3):
        writer = FeatureWriter(tmp_path, meta)
        writer.add([1, 2, 3, 4], torch.tensor([0, 1, 1, 1]), torch.full((3, 12), float(first)))
        writer.close()
    dataset = FeatureDataset(tmp_path)
    assert dataset[1]["context_hidden_states"][:, 0].tolist() == [3, 3, 3, 0]
    assert dataset[0]["teacher_hidden_states"].shape == (4, 4)
    with pytest.raises(ValueError, match=r"\[0, 1\].*\[0, 2\]"):
        FeatureWriter(tmp_path, FeatureMeta([0, 2], 4, "tiny"))


def test_the_target_is_neither_trained_nor_wrapped(tmp_path):
    target = build_target()
    before = {name: parameter.clone() for name, parameter in target.named_parameters()}
    drafter = build_drafter(factor=2.0)
    trainer = DrafterTrainer(
        drafter, arguments(tmp_path, max_steps=2), target, train_dataset=[text_of(prompt(20)[0], 4)]
    )
    trainer.train()
    trainer.save_model()
    for name, parameter in target.named_parameters():
        assert torch.equal(parameter, before[name])
        assert parameter.grad is None
    loaded = XPressDrafter.from_pretrained(tmp_path)
    assert not [name for name, _ in loaded.named_parameters() if "embed_tokens" in name or "lm_head" in name]
    assert torch.equal(loaded.fusion.fc.weight, drafter.fusion.fc.weight)


def test_muon_takes_matrices_and_adamw_the_rest(tmp_path):
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("torch.optim.Muon needs torch 2.9")
    drafter = build_drafter()
    named = list(drafter.named_parameters())
    optimizer = MuonWithAdamW(named, matrix_lr=1e-2, lr=1e-3)
    muon, adamw = (sum(len(group["params"]) for group in part.param_groups) for part in optimizer.parts)
    assert muon + adamw == len(named)
    names = {id(p): name for name, p in named}
    rest = {names[id(p)] for p in optimizer.parts[1].param_groups[0]["params"]}
    assert {"refiner.token_embed.weight", "refiner.readout.weight", "refiner.mixer", "backbone.norm.weight"} <= rest
    torch.manual_seed(0)
    for parameter in drafter.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    other = build_drafter()
    other.load_state_dict(drafter.state_dict())
    resumed = MuonWithAdamW(other.named_parameters(), matrix_lr=1e-2, lr=1e-3)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one in (drafter, other):
        torch.manual_seed(1)
        for parameter in one.parameters():
            parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    resumed.step()
    for (name, left), right in zip(drafter.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(left, right, msg=name)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_backbone_learns_at_its_share_of_the_rate(tmp_path, optimizer):
    if optimizer == "muon" and not hasattr(torch.optim, "Muon"):
        pytest.skip("torch.optim.Muon needs torch 2.9")
    drafter = build_drafter()
    options = {"learning_rate": 1e-2, "matrix_learning_rate": 4e-2, "matrix_optimizer": optimizer}
    args = arguments(tmp_path, backbone_lr_scale=0.25, lr_scheduler_type="linear", max_steps=4, **options)
    trainer = DrafterTrainer(drafter, args, build_target("llama"), train_dataset=[text_of(prompt(20)[0], 4)])
    trainer.create_optimizer_and_scheduler(num_training_steps=4)
    names = {id(parameter): name for name, parameter in drafter.named_parameters()}
    rates = {names[id(p)]: group["lr"] for group in trainer.optimizer.param_groups for p in group["params"]}
    assert rates.keys() == set(names.values())
    matrix_rate = 4e-2 if optimizer == "muon" else 1e-2
    assert rates["refiner.readout.weight"] == 1e-2
    assert rates["refiner.in_proj.weight"] == matrix_rate
    assert rates["fusion.fc.weight"] == matrix_rate / 4
    assert rates["backbone.norm.weight"] == 1e-2 / 4
    trainer.optimizer.step()
    trainer.lr_scheduler.step()
    scaled = {names[id(p)]: group["lr"] for group in trainer.optimizer.param_groups for p in group["params"]}
    assert scaled == pytest.approx({name: rate * 3 / 4 for name, rate in rates.items()})


def test_start_from_copies_of_target_layers():
    target = build_target("llama")
    drafter = XPressDrafter(build_config())
    initialize_from_target(drafter, target)
    assert torch.equal(
        drafter.backbone.layers[1].self_attn.q_proj.weight, target.model.layers[2].self_attn.q_proj.weight
    )
    assert torch.equal(drafter.backbone.norm.weight, target.model.norm.weight)
    with pytest.raises(ValueError, match="no q/k/v projections"):
        initialize_from_target(drafter, build_target("gpt-neox"))
    with pytest.raises(ValueError, match="2 target layers"):
        initialize_from_target(drafter, target, [1])


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"recipe": "dflsh"}, "dflsh"),
        ({"matrix_optimizer": "sgd"}, "matrix_optimizer"),
        ({"num_anchors": 0}, "num_anchors"),
        ({"loss_vocab_size": 0}, "loss_vocab_size"),
    ],
)
def test_arguments_are_checked(tmp_path, values, word):
    with pytest.raises(ValueError, match=word):
        arguments(tmp_path, **values)


def test_a_drafter_without_refiner_cannot_be_trained_as_xpress(tmp_path):
    with pytest.raises(ValueError, match="refiner"):
        DrafterTrainer(build_drafter(refiner=None), arguments(tmp_path, recipe="xpress"), build_target())


def test_texts_without_a_supervised_token(tmp_path):
    """They train nothing and stop nothing."""
    target, drafter = build_target(), build_drafter()
    text = {"input_ids": prompt(9)[0], "loss_mask": torch.zeros(9, dtype=torch.long)}
    trainer = DrafterTrainer(drafter, arguments(tmp_path), target)
    loss = trainer.compute_loss(drafter, TextCollator()([text]))
    assert loss.item() == 0


def test_features_of_other_taps_are_refused(tmp_path):
    target, drafter = build_target(), build_drafter()
    write_features(target, [text_of(prompt(9)[0], 3)], tmp_path / "features", [1, 0])
    with pytest.raises(ValueError, match="target_layer_ids"):
        DrafterTrainer(drafter, arguments(tmp_path), target, train_dataset=FeatureDataset(tmp_path / "features"))


def test_adapters_on_parts_of_the_refiner_that_would_have_no_effect(tmp_path):
    peft = pytest.importorskip("peft")
    drafter = peft.get_peft_model(build_drafter(), peft.LoraConfig(target_modules=["readout"], r=2))
    with pytest.raises(ValueError, match=r"refiner\.readout"):
        build_target().generate(prompt(), assistant_model=drafter, max_new_tokens=8, do_sample=False)
