"""Training steps of the package `speculators` 0.9 on the files that `training_step.py` lays out; run by an
interpreter that has this package, without anything of ours.

    python benchmarks/peer_step.py WORK xpress|dflash cpu|cuda STEPS

A step is that of `speculators.train.trainer.Trainer.train_epoch`: forward with the loss inside under autocast,
zero_grad, backward, clipping at 1, optimizer from its `build_optimizers` (AdamW), metrics read as numbers. That class
itself moves models to a CUDA device, so its loop is spelled out here. Its settings are its defaults where they run. On
a CPU two do not (speculators 0.9.0, torch 2.13.0), and its own switches replace them:

    draft_attn_impl simple_flex_attention -> sdpa: "NotImplementedError: FlexAttention does not support backward on
        CPU" (in eager mode and compiled)
    loss_implementation fused -> eager: "RuntimeError: Fused losses require Triton; use --loss-implementation eager"

Its `forward` is compiled on CUDA only. Two things are set from outside: the anchors, so that both sides train the same
blocks, and the constant `causal_tril` of the refiner, which loading leaves uninitialised in 0.9.0.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import speculators.models.dflash.core as dflash
import speculators.models.xpress.core as xpress
import torch
from safetensors.torch import load_file
from speculators import SpeculatorModelConfig
from speculators.model import SpeculatorModel
from speculators.train.optimizers import build_optimizers
from step_meter import StepMeter

work, recipe, device, steps = Path(sys.argv[1]), sys.argv[2], torch.device(sys.argv[3]), int(sys.argv[4])
settings = json.loads((work / "settings.json").read_text(encoding="utf-8"))
data = load_file(work / "batch.safetensors")
on_cpu = device.type == "cpu"

config = SpeculatorModelConfig.from_pretrained(work / "speculators")
config.transformer_layer_config._attn_implementation = "sdpa" if on_cpu else "simple_flex_attention"
model = SpeculatorModel.from_pretrained(work / "speculators", config=config).float().to(device).train()
if recipe == "xpress":
    mask = model.refiner_head.causal_tril
    mask.copy_(torch.ones_like(mask).tril())

implementation = "eager" if on_cpu else "fused"
# tv is half of sum |p - q|, which our recipe weighs 0.9.
loss_fn = {"xpress": '{"ce": 0.1, "tv": 1.8}', "dflash": "ce"}[recipe]
options = {"loss_fn": loss_fn, "loss_implementation": implementation, "max_anchors": settings["anchors"]}
kind = {"xpress": xpress.XPressDraftModel, "dflash": dflash.DFlashDraftModel}[recipe]
call, _ = kind.get_trainer_kwargs(**options, **({"ce_from_data": True} if recipe == "xpress" else {}))
[optimizer] = build_optimizers(model, SimpleNamespace(optimizer="adamw", lr=settings["lr"], weight_decay=0.0))

batch = {
    "hidden_states": data["context_hidden_states"],
    "input_ids": data["input_ids"],
    "loss_mask": data["loss_mask"],
    "verifier_last_hidden_states": data["last_hidden_states"],
    "document_ids": torch.zeros_like(data["input_ids"]),
}
batch = {name: values[None].to(device) for name, values in batch.items()}
anchors = data["anchors"].to(device)
drawn = iter(anchors)
dflash.select_anchors = lambda *args: (one := next(drawn), torch.ones_like(one, dtype=torch.bool))

losses = []
meter = StepMeter(device)
meter.begin()
for _ in range(steps):
    with torch.autocast(device.type, dtype=torch.bfloat16):
        _, loss, metrics = model(**batch, **call)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    losses.append({name: value.item() for name, value in metrics.items()}["loss_sum"])
    meter.step_done()
# It divides by the number of trained slots, we divide by the sum of their weights.
meter.report(losses=[loss * scale for loss, scale in zip(losses, settings["slots_per_weight"], strict=False)])
