"""Losses, term by term, against slow twins that keep whole logits."""

import math

import pytest
import torch

from tests.conftest import HIDDEN, VOCAB, build_drafter
from xpress_hf.training import losses
from xpress_hf.training.losses import BlockTargets, LossVocabulary, block_loss
from xpress_hf.training.recipes import RECIPES, Recipe, build_recipe

BLOCKS, SIZE = 8, 5
DRAFTS = SIZE - 1


@pytest.fixture
def case():
    generator = torch.Generator().manual_seed(0)
    refiner = build_drafter(factor=8.0, block_size=SIZE).refiner
    hidden = torch.randn(BLOCKS, SIZE, HIDDEN, generator=generator)
    head = torch.randn(VOCAB, HIDDEN, generator=generator) * 0.3
    teacher = torch.randn(BLOCKS, DRAFTS, VOCAB, generator=generator) * 2
    previous = torch.randint(0, VOCAB, (BLOCKS, SIZE), generator=generator)
    labels = torch.cat([previous[:, 2:], torch.randint(0, VOCAB, (BLOCKS, 1), generator=generator)], dim=1)
    valid = (torch.arange(DRAFTS) < torch.randint(0, SIZE, (BLOCKS, 1), generator=generator)).float()
    return refiner, hidden, head, teacher, previous, labels, valid


def targets_of(case, recipe: Recipe, vocabulary=None) -> BlockTargets:
    _, _, _, teacher, previous, labels, valid = case
    return BlockTargets(
        labels=labels,
        weights=valid * recipe.slot_weights(DRAFTS),
        valid=valid,
        previous_ids=previous,
        teacher_logits=lambda chunk: teacher[chunk] if vocabulary is None else teacher[chunk][..., vocabulary.ids],
        vocabulary=vocabulary,
    )


def style(logits, teacher, labels, weights, recipe):
    """S of one set of logits, slot by slot, from its definition."""
    total = 0.0
    for block in range(BLOCKS):
        laws = [(logits[block, k].softmax(-1), teacher[block, k].softmax(-1)) for k in range(DRAFTS)]
        right = [teacher[block, k].argmax() if recipe.labels == "teacher" else labels[block, k] for k in range(DRAFTS)]
        ce = [-torch.log(law[label]) for (law, _), label in zip(laws, right, strict=True)]
        valid = [bool(weights[block, k] > 0) for k in range(DRAFTS)]
        kept = 1.0
        for slot, (law, target) in enumerate(laws):
            distance = sum((law[v] - target[v]).abs() for v in range(VOCAB))
            weight = weights[block, slot]
            if recipe.position_weights == "dpace":
                weight = weight * dpace_weight(ce, valid, slot, recipe.dpace_alpha)
            divergence = sum(target[v] * (target[v].log() - law[v].log()) for v in range(VOCAB))
            total = total + weight * (recipe.ce * ce[slot] + recipe.l1 * distance + recipe.kl * divergence)
            if valid[slot]:
                kept = kept * (1 - distance / 2)
                total = total + recipe.chain * (1 - kept)
    return total


def dpace_weight(ce, valid, slot, alpha):
    """Sum over valid k >= slot of the product of smoothed probabilities of labels up to k."""
    weight = 0.0
    for last in range(slot, DRAFTS):
        if valid[last]:
            product = 1.0
            for one in range(last + 1):
                product *= (1 - alpha) * math.exp(-ce[one].item()) + alpha
            weight += product
    return weight


def slow_loss(case, recipe: Recipe, progress: float):
    refiner, hidden, head, teacher, previous, labels, valid = case
    weights = torch.stack(
        [valid[:, k] * (math.exp(-k / recipe.gamma) if recipe.gamma else 1.0) for k in range(DRAFTS)], dim=1
    )
    if recipe.old_drafts is not None:
        weights = torch.cat([weights[:, : recipe.old_drafts], 3 * weights[:, recipe.old_drafts :]], dim=1)
    base = hidden[:, 1:] @ head.T
    start, end = recipe.base
    loss = (start + (end - start) * progress) * style(base, teacher, labels, weights, recipe)
    if not recipe.uses_refiner:
        return loss
    state = refiner.begin(hidden)
    loss = loss + style(base + refiner.bias(state, previous)[:, 1:], teacher, labels, weights, recipe)
    ids = base.argmax(-1)
    for _ in range(3):
        logits = base + refiner.bias(state, torch.cat([previous[:, :2], ids[:, :-1]], dim=1))[:, 1:]
        loss = loss + 0.3 / 3 * style(logits, teacher, labels, weights, recipe)
        ids = logits.argmax(-1)
    return loss


CASES = {
    "dflash": {},
    "xpress": {},
    "dflare": {},
    "jetspec": {},
    "dbloom": {"old_drafts": 2},
    "dflash+dpace": {"position_weights": "dpace", "gamma": None},
    "dflash+chain": {"chain": 0.7},
    "xpress+chain+dpace": {"chain": 0.5, "position_weights": "dpace", "kl": 0.2},
}


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_equal_the_slow_twin(case, name, monkeypatch):
    """For every size of chunk, and of the slices of a chunk: all of it, three blocks, one."""
    recipe = build_recipe(name.split("+")[0], CASES[name])
    refiner, hidden, head = case[:3]
    parameters = list(refiner.parameters()) if recipe.uses_refiner else []
    for progress in (0.0, 0.5, 1.0) if recipe.base[0] != recipe.base[1] else (0.5,):
        slow_rows = hidden.clone().requires_grad_()
        expected = slow_loss((refiner, slow_rows, *case[2:]), recipe, progress)
        slow_grads = torch.autograd.grad(2 * expected, [slow_rows, *parameters])
        three = 3 * DRAFTS * head.shape[0] * 4
        for chunk, buffer in ((1, 2**24), (7, 2**24), (BLOCKS, 2**24), (7, three), (BLOCKS, three), (BLOCKS, 1)):
            monkeypatch.setattr(losses, "BUFFER_BYTES", buffer)
            rows = hidden.clone().requires_grad_()
            loss, _ = block_loss(
                rows, targets_of(case, recipe), lambda h: h @ head.T, refiner, recipe, progress, chunk
            )
            torch.testing.assert_close(loss, expected, atol=1e-6, rtol=1e-6)
            grads = torch.autograd.grad(2 * loss, [rows, *parameters])
            for found, right in zip(grads, slow_grads, strict=True):
                torch.testing.assert_close(found, right, atol=1e-5, rtol=1e-4)


def test_released_settings_of_the_xpress_recipe():
    recipe = RECIPES["xpress"]
    assert (recipe.ce, recipe.l1, recipe.gamma, recipe.free_running, recipe.sweeps) == (0.1, 0.9, 4.0, 0.3, 3)
    assert [recipe.base_weight(progress) for progress in (0, 0.5, 1)] == pytest.approx([0.6, 0.4, 0.2])
    # A full block of 16 sums to 4.41 and its last slot weighs 0.030.
    assert recipe.slot_weights(15).sum() == pytest.approx(4.41, abs=0.01)
    assert recipe.slot_weights(15)[-1] == pytest.approx(0.030, abs=0.001)


def test_figures_count_leading_matches_of_valid_slots(case):
    refiner, hidden, head, _, _, labels, valid = case
    base = (hidden[:, 1:] @ head.T).argmax(-1)
    labels = torch.where(torch.rand(BLOCKS, DRAFTS, generator=torch.Generator().manual_seed(2)) < 0.8, base, labels)
    case = (*case[:5], labels, valid)
    expected = 0
    for block in range(BLOCKS):
        for slot in range(DRAFTS):
            if not valid[block, slot] or base[block, slot] != labels[block, slot]:
                break
            expected += 1
    _, figures = block_loss(
        hidden, targets_of(case, RECIPES["xpress"]), lambda h: h @ head.T, refiner, RECIPES["xpress"]
    )
    assert figures["bare_accepted"] == expected > 3


def test_a_vocabulary_of_everything_changes_nothing(case):
    refiner, hidden, head = case[:3]
    vocabulary = LossVocabulary.draw(case[5], VOCAB, VOCAB)
    assert torch.equal(vocabulary.ids, torch.arange(VOCAB))
    assert not vocabulary.correction.any()
    for recipe in RECIPES.values():
        whole, _ = block_loss(hidden, targets_of(case, recipe), lambda h: h @ head.T, refiner, recipe)
        some, _ = block_loss(
            hidden, targets_of(case, recipe, vocabulary), lambda h: h @ head[vocabulary.ids].T, refiner, recipe
        )
        torch.testing.assert_close(some, whole)


def test_sampled_partition_function_is_unbiased(case):
    """The mean over draws of sum exp(logit + correction) is the sum over the whole vocabulary."""
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(2)
    sums = []
    for _ in range(4000):
        vocabulary = LossVocabulary.draw(torch.tensor([60, 61]), VOCAB, 30, generator)
        assert len(vocabulary.ids) == 30
        assert {60, 61, *range(20)} <= set(vocabulary.ids.tolist())
        sums.append((logits[vocabulary.ids] + vocabulary.correction).exp().sum())
    sums = torch.stack(sums)
    assert (sums.mean() - logits.exp().sum()).abs() <= 4 * sums.std() / len(sums) ** 0.5


def test_labels_are_in_the_vocabulary_even_when_it_is_too_small():
    labels = torch.arange(40)[None]
    vocabulary = LossVocabulary.draw(labels, VOCAB, 6)
    assert torch.equal(vocabulary.ids, torch.arange(40))
    assert torch.equal(vocabulary.ids[vocabulary.columns(labels)], labels)


def test_a_recipe_with_a_refiner_needs_one(case):
    with pytest.raises(ValueError, match="refiner"):
        block_loss(case[1], targets_of(case, RECIPES["xpress"]), lambda h: h @ case[2].T, None, RECIPES["xpress"])


def test_peak_of_logits_does_not_grow_with_the_number_of_blocks(case):
    _, hidden, head = case[:3]
    rows = []

    def spying_head(states):
        rows.append(states.shape[0])
        return states @ head.T

    block_loss(hidden, targets_of(case, RECIPES["dflash"]), spying_head, None, RECIPES["dflash"], chunk_blocks=2)
    assert max(rows) == 2
    assert sum(rows) == BLOCKS
