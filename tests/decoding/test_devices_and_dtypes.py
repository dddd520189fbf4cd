"""Group F of the bug reports: targets and drafters of other devices, dtypes, quantisation, embeddings and names.

F1 and F2 need a GPU; without one targets whose layers wait elsewhere (test_offloaded_targets) and a look at the source
stand in for F1. F3 and F7 (adapters) are in test_lossless and,
for training, in tests/training/test_bug_reports.py and test_lora.py; F4 (modules without a dense weight) is in
test_lossless, and drafters with quantised weights are refused (tests/checkpoints). For F5, bitsandbytes comes with the
`test` extra; torchao and optimum-quanto are used where they are installed.
"""

import logging
import re
import warnings
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, QuantoConfig, TorchAoConfig

import xpress_hf
from tests.conftest import HIDDEN, build_drafter, build_target, plain, prompt
from tests.training.test_trainer import arguments, text_of
from xpress_hf.training.data import TextCollator
from xpress_hf.training.trainer import DrafterTrainer

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
NEW = 24
# bitsandbytes packs blocks of 64 weights.
WIDE = 64


def drafted(target, drafter, ids, **options):
    return target.generate(ids, assistant_model=drafter, max_new_tokens=NEW, do_sample=False, **options)


@needs_gpu
def test_f1_a_target_whose_layers_lie_on_two_devices(tmp_path):
    build_target().save_pretrained(tmp_path)
    places = {"model.embed_tokens": 0, "model.layers.0": 0, "model.layers.1": "cpu", "model.layers.2": 0}
    places |= {"model.norm": 0, "model.rotary_emb": 0, "lm_head": 0}
    target = type(build_target()).from_pretrained(tmp_path, device_map=places).eval()
    ids = prompt().to("cuda")
    assert torch.equal(drafted(target, build_drafter().to("cuda"), ids), plain(target, ids, max_new_tokens=NEW))


def test_f1_no_tensor_is_moved_to_a_device_named_in_the_source():
    """The one exception reads weights for writing them to disk."""
    literal = re.compile(r"""\.cuda\(|(?:\.to\(|device\s*=\s*)["'](?:cpu|cuda|mps)""")
    found = set()
    for package in ("modeling", "decoding", "training", "checkpoints", "evaluation"):
        for path in (Path(xpress_hf.__file__).parent / package).rglob("*.py"):
            found |= {(path.name, line.strip()) for line in path.read_text().splitlines() if literal.search(line)}
    assert {name for name, _ in found} <= {"export.py"}, found


@needs_gpu
@pytest.mark.parametrize("devices", [("cuda", "cpu"), ("cpu", "cuda"), ("cuda", "cuda")])
@pytest.mark.parametrize("sweeps", [0, 2])
def test_f2_target_and_drafter_on_different_devices(devices, sweeps):
    target, drafter = build_target().to(devices[0]), build_drafter().to(devices[1])
    drafter.speculation.sweeps = sweeps
    ids = prompt().to(devices[0])
    out = drafted(target, drafter, ids)
    assert out.device == ids.device
    assert torch.equal(out, plain(target, ids, max_new_tokens=NEW))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_f5_a_target_with_packed_weights(family):
    """Quantised layers hold their weight behind a method. With float16 weights rows do not mix: ids are equal."""
    target = quantised(family, torch.float16)
    for seed in range(4):
        ids = prompt(8, seed)
        assert torch.equal(drafted(target, build_drafter(), ids), plain(target, ids, max_new_tokens=NEW))


def test_f5_activations_with_one_scale_for_all_rows():
    """Dynamic int8 scales all rows of a call by the largest of them, so that the target's own logits of a token depend
    on the tokens beside it. Ids cannot be those of plain decoding then; the call works and every id has a cause."""
    target, ids = quantised("llama", torch.qint8), prompt(8, 1)
    with torch.no_grad():
        together, alone = target(ids).logits[0, 0], target(ids[:, :1]).logits[0, 0]
    assert (together - alone).abs().max() > 1e-3
    out = drafted(target, build_drafter(), ids)
    assert out.shape == (1, 8 + NEW)
    expected = plain(target, ids, max_new_tokens=NEW)
    for place in (out != expected)[0].nonzero().flatten()[:1].tolist():
        with torch.no_grad():
            logits = target(expected[:, :place]).logits[0, -1]
        noise = (together - alone).abs().max()
        assert (logits[expected[0, place]] - logits[out[0, place]]).abs() <= 2 * noise


def quantised(family: str, dtype: torch.dtype):
    if not hasattr(torch.ao.quantization, "quantize_dynamic"):
        pytest.skip("this torch has no dynamic quantisation of its own")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(build_target(family), {torch.nn.Linear}, dtype=dtype)


def bitsandbytes(**bits):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    return BitsAndBytesConfig(**bits)


def torchao(**options):
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    return TorchAoConfig(quantization.Int8WeightOnlyConfig(), **options)


def quanto(weights: str):
    pytest.importorskip("optimum.quanto", reason="optimum-quanto is not installed")
    return QuantoConfig(weights=weights)


FOUR_BITS = {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.float32}
PACKED = {
    "bitsandbytes, 4 bits": lambda: bitsandbytes(**FOUR_BITS),
    "bitsandbytes, 4 bits, head too": lambda: bitsandbytes(**FOUR_BITS, llm_int8_skip_modules=[]),
    "torchao, int8": torchao,
    "torchao, int8, embeddings and head too": lambda: torchao(include_input_output_embeddings=True),
    "quanto, int8": lambda: quanto("int8"),
    "quanto, int4": lambda: quanto("int4"),
}


def packed(folder, config, device="cpu", **sizes):
    build_target("llama", **sizes).save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config, device_map=device, dtype=torch.float32
    ).eval()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
@pytest.mark.parametrize("config", PACKED.values(), ids=PACKED)
def test_f5_weights_packed_by_the_libraries_that_transformers_calls(config, device, tmp_path):
    """A weight has one value whatever stands beside a row: ids are equal, batches too."""
    target = packed(tmp_path, config(), device, hidden_size=WIDE)
    drafter = build_drafter(hidden_size=WIDE).to(device)
    for seed in range(3):
        ids = prompt(8, seed).to(device)
        assert torch.equal(drafted(target, drafter, ids), plain(target, ids, max_new_tokens=NEW))
    ids = torch.cat([prompt(8, seed) for seed in range(3)]).to(device)
    assert torch.equal(drafted(target, drafter, ids), plain(target, ids, max_new_tokens=NEW))


def test_f6_scaled_embeddings_are_the_same_in_training_and_in_generate(tmp_path):
    """Gemma multiplies rows of its table by sqrt(hidden size) = 5.657 inside the embedding module."""
    target, drafter = build_target("gemma2"), build_drafter()
    seen = []
    hook = drafter.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["noise_embeds"].detach()), with_kwargs=True
    )
    ids = prompt(20)
    drafted(target, drafter, ids)
    trainer = DrafterTrainer(drafter, arguments(tmp_path), target)
    batch = {**TextCollator()([text_of(ids[0], 4)]), "anchors": torch.tensor([[7]])}
    decoding = len(seen)
    trainer.compute_loss(drafter, batch)
    hook.remove()
    assert len(seen) == decoding + 1 > 1
    generated, trained = seen[0][0], seen[-1][0]
    # All slots but the anchor hold the mask token.
    torch.testing.assert_close(generated[1:], trained[1:])
    row = target.get_input_embeddings().weight[drafter.config.mask_token_id]
    assert (generated[1].norm() / row.norm()).item() == pytest.approx(HIDDEN**0.5, rel=1e-5)
    anchor = target.get_input_embeddings().weight[ids[0, 7]]
    assert (trained[0].norm() / anchor.norm()).item() == pytest.approx(5.657, abs=1e-3)


def test_f8_a_sibling_of_the_target_is_used_with_at_most_one_warning(caplog):
    target, ids = build_target(), prompt()
    target.config._name_or_path = "c/d"
    drafter = build_drafter(target={"name": "a/b"})
    with caplog.at_level(logging.WARNING), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out = drafted(target, drafter, ids)
    assert torch.equal(out, plain(target, ids, max_new_tokens=NEW))
    told = [str(one.message) for one in caught] + [record.getMessage() for record in caplog.records]
    assert len([text for text in told if "a/b" in text or "c/d" in text]) <= 1
