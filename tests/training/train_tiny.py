"""A tiny training run as a program, for tests that kill it or run it in several processes.

python -m tests.training.train_tiny OUTPUT [--batch 2] [--steps 20] [--kill-at N] [--resume] [--shard]
"""

import argparse
import json
import os
import signal

import torch
import torch.distributed as dist
from transformers import TrainerCallback

from tests.conftest import build_drafter, build_target, prompt
from xpress_hf.training.data import TextCollator
from xpress_hf.training.trainer import DrafterTrainer, DrafterTrainingArguments


class Kill(TrainerCallback):
    """Ends the process as a power cut would, after a given step."""

    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def texts() -> list[dict[str, torch.Tensor]]:
    """Eight texts of different length."""
    rows = []
    for seed in range(8):
        ids = prompt(16 + 3 * seed, seed)[0]
        loss_mask = torch.zeros_like(ids)
        loss_mask[5:] = 1
        rows.append({"input_ids": ids, "loss_mask": loss_mask})
    return rows


def build(options: argparse.Namespace) -> DrafterTrainer:
    args = DrafterTrainingArguments(
        output_dir=options.output,
        use_cpu=True,
        ddp_backend="gloo" if "RANK" in os.environ else None,
        report_to="none",
        disable_tqdm=True,
        recipe="xpress",
        num_anchors=6,
        max_steps=options.steps,
        per_device_train_batch_size=options.batch,
        learning_rate=1e-2,
        lr_scheduler_type="cosine",
        warmup_steps=3,
        bf16=options.bf16,
        logging_steps=1,
        save_strategy="steps",
        save_steps=options.save_steps,
        eval_strategy="steps" if options.save_steps < options.steps else "no",
        eval_steps=options.save_steps,
        metric_for_best_model="bare_block_acceptance_length",
        loss_vocab_size=options.loss_vocab_size,
        replay_texts=1,
        seed=3,
    )
    rows = texts()
    callbacks = [Kill(options.kill_at)] if options.kill_at else []
    return DrafterTrainer(
        build_drafter(factor=2.0), args, build_target(), train_dataset=rows, eval_dataset=rows[:2], callbacks=callbacks
    )


def train_sharded(trainer: DrafterTrainer, options: argparse.Namespace) -> list[float]:
    """The same steps with torch's `fully_shard` (accelerate would fall back to DDP on a CPU); saves what it learned
    from whole weights."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    drafter, rank = trainer.model, dist.get_rank()
    for layer in drafter.backbone.layers:
        fully_shard(layer)
    fully_shard(drafter)
    for name, parameter in drafter.named_parameters():
        assert isinstance(parameter, DTensor), name
        assert parameter.to_local().shape[0] in (parameter.shape[0] // 2, (parameter.shape[0] + 1) // 2), name
    optimizer = torch.optim.SGD(drafter.parameters(), lr=0.05)
    drafter.train()
    losses, rows = [], texts()
    for step in range(options.steps):
        trainer.state.global_step = step
        row = rows[(2 * step + rank) % len(rows)]
        batches, count = trainer.get_batch_samples(iter([TextCollator()([row])]), 1, torch.device("cpu"))
        loss = trainer.compute_loss(drafter, batches[0], num_items_in_batch=count)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(trainer.accelerator.gather(loss.detach()).mean().item())
    state = get_model_state_dict(drafter, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        build_drafter(factor=2.0).save_pretrained(options.output, state_dict=state)
    return losses


def train_plainly(trainer: DrafterTrainer, options: argparse.Namespace) -> list[float]:
    """The twin of `train_sharded` in one process: both texts in one batch."""
    drafter = trainer.model.train()
    optimizer = torch.optim.SGD(drafter.parameters(), lr=0.05)
    losses, rows = [], texts()
    for step in range(options.steps):
        trainer.state.global_step = step
        pair = [rows[(2 * step + rank) % len(rows)] for rank in range(2)]
        batches, count = trainer.get_batch_samples(iter([TextCollator()(pair)]), 1, torch.device("cpu"))
        loss = trainer.compute_loss(drafter, batches[0], num_items_in_batch=count)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    drafter.save_pretrained(options.output)
    return losses


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("output")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save-steps", type=int, default=1000)
    parser.add_argument("--kill-at", type=int)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--loss-vocab-size", type=int)
    parser.add_argument("--manual", choices=["sharded", "plain"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    trainer = build(options)
    if options.manual:
        losses = {"sharded": train_sharded, "plain": train_plainly}[options.manual](trainer, options)
    else:
        trainer.train(resume_from_checkpoint=options.resume or None)
        trainer.save_model()
        losses = [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
    if int(os.environ.get("RANK", 0)) == 0:
        figures = {"losses": losses, "best_metric": trainer.state.best_metric, "steps": trainer.state.global_step}
        with open(os.path.join(options.output, "figures.json"), "w") as file:
            json.dump(figures, file)
    if dist.is_initialized():
        # Tearing gloo down can wait for ever on a rank that has left already.
        dist.barrier()
        os._exit(0)


if __name__ == "__main__":
    main()
