"""Files exchanged with the package `speculators`, both ways: same files, same hidden states, same logits.

The package pins other versions of transformers, so it runs in an interpreter of its own, named by the environment
variable XPRESS_HF_SPECULATORS_PYTHON (`python -m venv DIR && DIR/bin/pip install speculators==0.9.0`).
"""

import json
import os
import subprocess

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.conftest import build_drafter, build_target, prompt
from xpress_hf import XPressDrafter
from xpress_hf.checkpoints.export import export
from xpress_hf.decoding.target import Target, taps

pytestmark = pytest.mark.peer

INTERPRETER = os.environ.get("XPRESS_HF_SPECULATORS_PYTHON")
ANCHOR, LENGTH, BLOCK = 11, 28, 8
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64}
CASES = {
    "dflash": {"refiner": None},
    "xpress": {},
    "xpress-shift": {"slot_layout": "shift"},
    "xpress-causal-window": {**SLIDING, "block_attention": ["causal", "bidirectional"]},
    "dflash-free-window": {**SLIDING, "refiner": None},
}

# Runs there: loads each folder of ours, then saves a model of its own with the same config; writes what both compute.
THEIRS = """
import json, sys
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from speculators import SpeculatorModelConfig
from speculators.model import SpeculatorModel
import speculators.models.dflash.core, speculators.models.xpress.core

work, target_folder, anchor = sys.argv[1], sys.argv[2], int(sys.argv[3])
inputs = load_file(work + "/inputs.safetensors")
target = AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32).eval()

@torch.no_grad()
def compute(model, path):
    ids = inputs["input_ids"]
    states = target(ids, output_hidden_states=True).hidden_states
    loss_mask = torch.zeros_like(ids)
    loss_mask[:, anchor] = 1  # the only place where a block may start
    hidden, logits, _, _, _ = model._backbone_forward(
        torch.cat([states[index] for index in model.config.aux_hidden_state_layer_ids], dim=-1),
        ids, loss_mask, states[-1], torch.zeros_like(ids), max_anchors=1,
    )
    found = {"hidden": hidden, "base_logits": logits}
    if hasattr(model, "refiner_head"):
        head = model.refiner_head
        found["logits"] = logits + head.block_bias(inputs["previous_ids"], hcache=head.hidden_cache(hidden))
    save_file({key: value.contiguous() for key, value in found.items()}, path)

def load(folder):
    config = SpeculatorModelConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    model = SpeculatorModel.from_pretrained(folder, config=config).float().eval()
    if hasattr(model, "refiner_head"):
        # 0.9.0 does not save this constant and leaves memory as it was in its place after loading (facts/xpress 7.8).
        model.refiner_head.causal_tril.copy_(torch.ones_like(model.refiner_head.causal_tril).tril())
    return model

for name in json.loads(sys.argv[4]):
    model = load(f"{work}/ours/{name}")
    compute(model, f"{work}/{name}-read.safetensors")
    torch.manual_seed(7)
    owned = ("embed_tokens", "lm_head", "verifier")
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if not key.startswith(owned):
                noise = torch.randn_like(parameter)
                parameter.copy_(1 + 0.1 * noise if "norm" in key else 0.2 * noise)
    model.save_pretrained(f"{work}/theirs/{name}")
    compute(model, f"{work}/{name}-written.safetensors")
"""


@pytest.fixture(scope="module")
def exchange(tmp_path_factory):
    """Folder of the exchange and the target, after their side has run."""
    if not INTERPRETER:
        pytest.skip("XPRESS_HF_SPECULATORS_PYTHON names no interpreter that has speculators")
    work = tmp_path_factory.mktemp("exchange")
    target = build_target()
    target.save_pretrained(work / "target")
    ids = prompt(LENGTH)
    previous = {"input_ids": ids, "previous_ids": ids[:, ANCHOR - 1 : ANCHOR - 1 + BLOCK].clone()}
    save_file(previous, work / "inputs.safetensors")
    for name, overrides in CASES.items():
        drafter = build_drafter(target={"name": str(work / "target")}, **overrides)
        export(drafter, work / "ours" / name, "speculators")
    command = [INTERPRETER, "-c", THEIRS, str(work), str(work / "target"), str(ANCHOR), json.dumps(list(CASES))]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    outcome = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert outcome.returncode == 0, outcome.stderr[-4000:]
    return work, target


@torch.no_grad()
def computed(drafter: XPressDrafter, target, work) -> dict[str, torch.Tensor]:
    """Hidden states, base logits and refined logits of the block at the anchor, by our code."""
    inputs = load_file(work / "inputs.safetensors")
    ids, config = inputs["input_ids"], drafter.config
    states = target(ids, output_hidden_states=True).hidden_states
    context = taps(states, config.target_layer_ids, target.config.num_hidden_layers)[:, :ANCHOR]
    block = torch.full((1, BLOCK), config.mask_token_id)
    block[:, 0] = ids[:, ANCHOR]
    borrowed = Target(target)
    hidden = drafter(
        noise_embeds=borrowed.embed(block),
        context_hidden_states=context,
        position_ids=torch.arange(ANCHOR + BLOCK)[None],
    ).last_hidden_state
    found = {"hidden": hidden, "base_logits": borrowed.logits(hidden)}
    if drafter.refiner is not None:
        bias = drafter.refiner.bias(drafter.refiner.begin(hidden), inputs["previous_ids"])
        found["logits"] = found["base_logits"] + bias
    return found


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, value in found.items():
        torch.testing.assert_close(
            value, expected[key], atol=2e-4, rtol=1e-4, msg=lambda text, key=key: f"{key}: {text}"
        )
        assert value.abs().max() > 0.1


@pytest.mark.parametrize("name", CASES)
def test_they_read_what_we_write(exchange, name):
    """I6."""
    work, target = exchange
    drafter = build_drafter(**CASES[name])
    same(computed(drafter, target, work), load_file(work / f"{name}-read.safetensors"))


@pytest.mark.parametrize("name", CASES)
def test_we_read_what_they_write(exchange, name):
    work, target = exchange
    drafter = XPressDrafter.from_pretrained(work / "theirs" / name)
    ours = build_drafter(**CASES[name])
    for field in (
        "target_layer_ids",
        "slot_layout",
        "refiner",
        "block_size",
        "mask_token_id",
        "block_attention_per_layer",
    ):
        assert getattr(drafter.config, field) == getattr(ours.config, field), field
    same(computed(drafter, target, work), load_file(work / f"{name}-written.safetensors"))


@pytest.mark.parametrize("name", CASES)
def test_names_on_disk_are_theirs(exchange, name):
    """The files that they write and those that we write hold the same names and shapes."""
    work, _ = exchange
    ours, theirs = (load_file(work / side / name / "model.safetensors") for side in ("ours", "theirs"))
    assert {key: value.shape for key, value in ours.items()} == {key: value.shape for key, value in theirs.items()}
