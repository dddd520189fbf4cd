"""Targets whose weights accelerate keeps elsewhere until a layer runs (`device_map` with "cpu" or "disk" in it)."""

import pytest
import torch
from accelerate import cpu_offload, dispatch_model

from tests.conftest import build_drafter, build_target, plain, prompt
from tests.decoding.test_batches import LENGTHS, ragged
from xpress_hf.decoding.target import Target, device_of

NEW = 24
PARTS = {
    "layers": {"model.embed_tokens": "cpu", "model.layers": "disk", "model.norm": "cpu", "lm_head": "cpu"},
    "embeddings": {"model.embed_tokens": "disk", "model.layers": "cpu", "model.norm": "cpu", "lm_head": "cpu"},
    "head": {"model.embed_tokens": "cpu", "model.layers": "cpu", "model.norm": "disk", "lm_head": "disk"},
    "everything": {"": "disk"},
}


def offloaded(parts: str, folder, family: str = "llama"):
    """The rest on the CPU, which here is the main device."""
    places = {"model.rotary_emb": "cpu", **PARTS[parts]} if parts != "everything" else PARTS[parts]
    target = build_target(family)
    if parts == "everything":
        return cpu_offload(target, execution_device="cpu")
    return dispatch_model(target, places, main_device="cpu", offload_dir=str(folder), force_hooks=True)


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("family", ["llama", "gemma3", "llama-tied"])
def test_texts_and_drafts_are_those_of_the_whole_target(parts, family, tmp_path):
    whole, target, ids = build_target(family), offloaded(parts, tmp_path, family), prompt()
    # Embeddings tied to a head that stays are no further weight.
    nothing = (family, parts) == ("llama-tied", "embeddings")
    assert any(parameter.is_meta for parameter in target.parameters()) != nothing
    records = []
    for one in (whole, target):
        drafter = build_drafter()
        out = one.generate(ids, assistant_model=drafter, max_new_tokens=NEW, do_sample=False)
        assert torch.equal(out, plain(whole, ids, max_new_tokens=NEW))
        records.append(drafter.last_acceptance)
    assert records[0] == records[1]


@pytest.mark.parametrize("parts", PARTS)
def test_batches(parts, tmp_path):
    ids, mask, _ = ragged(LENGTHS)
    options = {"attention_mask": mask, "max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    expected = build_target().generate(ids, **options)
    target = offloaded(parts, tmp_path, "qwen3")
    assert torch.equal(target.generate(ids, assistant_model=build_drafter(), **options), expected)


@pytest.mark.parametrize("parts", PARTS)
def test_borrowed_parts(parts, tmp_path):
    """Embeddings, logits and logits of some tokens, as training reads them."""
    whole, target = Target(build_target("llama")), Target(offloaded(parts, tmp_path))
    states, few = torch.randn(2, 3, whole.config.hidden_size), torch.tensor([5, 1, 40])
    assert torch.equal(target.embed(prompt()), whole.embed(prompt()))
    assert torch.equal(target.logits(states), whole.logits(states))
    assert torch.equal(target.logits(states, few), whole.logits(states, few))


def test_a_module_without_tensors_computes_where_it_is_told():
    assert device_of(torch.nn.Identity(), torch.device("meta")).type == "meta"
