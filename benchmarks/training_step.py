"""Training steps side by side: ours, the same with the loss in one piece, and those of the package `speculators`.

    python benchmarks/training_step.py [--recipe dflash] [--peer-python PATH] [--output rows.jsonl]
    python benchmarks/training_step.py --memory

PATH is the interpreter of an environment of its own (python -m venv DIR && DIR/bin/pip install speculators==0.9.0);
`peer_step.py` says what it runs there and what of it a CPU cannot run. Without it that arm is left out.

All arms train the same drafter (copies of the target's last layers, written in both layouts) for the embedded target
on the same text, the same blocks, with the same loss, AdamW, float32 weights under bfloat16 autocast. Both sides read
the target's hidden states from the batch, so its own forward is in no figure; the head is applied to them in the step.
Every arm has its own process; rounds are interleaved, the first step of a process is not timed, figures are medians.
The losses of the first step, printed last, show that both sides compute the same thing.

    block rows/s   predicted slots (blocks x drafted slots) that went through forward and backward per second
    text tokens/s  tokens of the text, prompt and padding free, per second
    step memory    peak during the steps minus what the process held before the first: activations, losses, gradients
                   and optimizer state
    peak           the same with weights, libraries and batch

`--memory` holds the peak of the loss against the arithmetic of docs/training.md instead.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file
from step_meter import Memory, StepMeter
from transformers import AutoModelForCausalLM, TrainerCallback

from xpress_hf import XPressDrafter
from xpress_hf.checkpoints.export import export
from xpress_hf.demo import load_demo_target
from xpress_hf.training import losses
from xpress_hf.training.blocks import cut_blocks, draw_batch_anchors
from xpress_hf.training.features import target_states
from xpress_hf.training.initialization import config_for_target, initialize_from_target
from xpress_hf.training.trainer import DrafterTrainer, DrafterTrainingArguments

TAPS, LAYERS, BLOCK, MASK_TOKEN = [1, 7, 14, 20, 27], 3, 8, 16
REFINER = {"rank": 64, "mlp_width": 128, "sweeps": 2}
LEARNING_RATE, SEED = 1e-4, 7
UNCHUNKED = "ours, loss unchunked"
# Name -> further training arguments; `None` is the peer.
ARMS: dict[str, dict | None] = {
    "ours": {},
    UNCHUNKED: {"chunk_blocks": 10**6},
    "speculators": None,
    "ours, sampled vocabulary": {"loss_vocab_size": 12288},
}
# Float32 buffers of a slice of the loss that live at its peak.
BUFFERS = 2
# Chunk and anchors of `--memory`.
MEMORY_CASES = [(16, 32), (32, 32), (32, 64), (32, 128)]


def prepare(work: Path, args: argparse.Namespace) -> None:
    """Writes target, drafter in both layouts, one text with its hidden states and anchors of every step."""
    target, tokenizer = load_demo_target(dtype=torch.bfloat16)
    target.save_pretrained(work / "target")
    refiner = REFINER if args.recipe == "xpress" else None
    config = config_for_target(
        target,
        TAPS,
        MASK_TOKEN,
        num_hidden_layers=LAYERS,
        block_size=BLOCK,
        refiner=refiner,
        target={"name": str(work / "target")},
    )
    torch.manual_seed(SEED)
    drafter = XPressDrafter(config)
    initialize_from_target(drafter, target)
    drafter.save_pretrained(work / "drafter")
    export(drafter, work / "speculators", "speculators")

    words = (Path(__file__).parents[1] / "docs" / "training.md").read_text(encoding="utf-8")
    ids = tokenizer(words, return_tensors="pt").input_ids[:, : args.length]
    if ids.shape[1] < args.length:
        raise SystemExit(f"--length {args.length} is more than the {ids.shape[1]} tokens of docs/training.md.")
    last_layer = []
    hook = target.model.norm.register_forward_pre_hook(lambda module, inputs: last_layer.append(inputs[0]))
    states, normed = target_states(target, ids, torch.ones_like(ids), TAPS)
    hook.remove()
    # The peer takes no anchor so near the end that a block would not be whole.
    loss_mask = torch.ones_like(ids)
    loss_mask[:, :8] = loss_mask[:, -BLOCK:] = 0
    batch = {"input_ids": ids, "loss_mask": loss_mask, "attention_mask": torch.ones_like(ids)}
    anchors = [draw_batch_anchors(batch, args.anchors, (SEED, step)) for step in range(args.steps)]
    valid = [cut_blocks(ids, loss_mask, one, config).weights for one in anchors]
    weights = torch.exp(-torch.arange(-1, BLOCK - 1) / 4.0)  # gamma of both recipes; slot 0 is never valid
    tensors = {
        "input_ids": ids[0],
        "loss_mask": loss_mask[0],
        "context_hidden_states": states[0],
        "teacher_hidden_states": normed[0],
        "last_hidden_states": last_layer[0][0],
        "anchors": torch.cat(anchors),
    }
    save_file({name: values.contiguous() for name, values in tensors.items()}, work / "batch.safetensors")
    settings = {
        "anchors": anchors[0].shape[1],
        "lr": LEARNING_RATE,
        "slots_per_weight": [(one.sum() / (one * weights).sum()).item() for one in valid],
    }
    (work / "settings.json").write_text(json.dumps(settings), encoding="utf-8")


class Watch(TrainerCallback):
    """Tells the meter when steps begin and end."""

    def __init__(self, meter: StepMeter):
        self.meter = meter

    def on_train_begin(self, *args, **kwargs):
        self.meter.begin()

    def on_step_end(self, *args, **kwargs):
        self.meter.step_done()


def own_trainer(work: Path, args: argparse.Namespace, **more) -> DrafterTrainer:
    data = load_file(work / "batch.safetensors")
    names = ("input_ids", "loss_mask", "context_hidden_states", "teacher_hidden_states")
    arguments = DrafterTrainingArguments(
        output_dir=str(work / "run"),
        recipe=args.recipe,
        # The peer's cross entropy without a refiner is that against the target's most likely token.
        recipe_options={"labels": "teacher"} if args.recipe == "dflash" else {},
        max_steps=args.steps,
        per_device_train_batch_size=1,
        num_anchors=args.anchors,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        seed=SEED,
        bf16=True,
        use_cpu=args.device == "cpu",
        report_to="none",
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        **{"loss_memory_mb": args.loss_memory_mb, **more},
    )
    device = torch.device(args.device)
    target = AutoModelForCausalLM.from_pretrained(work / "target", dtype=torch.bfloat16).to(device)
    drafter = XPressDrafter.from_pretrained(work / "drafter", dtype=torch.float32)
    rows = [{name: data[name] for name in names}] * args.steps
    return DrafterTrainer(drafter, arguments, target, train_dataset=rows)


def run_own(work: Path, args: argparse.Namespace) -> None:
    """One arm of ours, in this process."""
    if args.arm == UNCHUNKED:
        losses.BUFFER_BYTES = sys.maxsize  # softmaxes over all rows at once
    trainer = own_trainer(work, args, **ARMS[args.arm])
    meter = StepMeter(torch.device(args.device))
    trainer.add_callback(Watch(meter))
    trainer.train()
    meter.report(losses=[float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry])


def run_memory_case(work: Path, args: argparse.Namespace) -> None:
    """Peak of the loss above what was held when it began, in this process."""
    trainer = own_trainer(work, args, chunk_blocks=args.chunk)
    memory, found = Memory(torch.device(args.device)), []
    loss = trainer._loss

    def watched(*inputs):
        held = memory.held()
        memory.watch()
        result = loss(*inputs)
        found.append(memory.peak() - held)
        return result

    trainer._loss = watched
    trainer.train()
    per_logit = losses.bytes_per_logit(trainer.recipe, trainer._logit_bytes())
    logits = args.chunk * trainer.drafter.config.num_draft_tokens * trainer.target.config.vocab_size
    refiner = trainer.drafter.refiner
    weights = 0 if refiner is None else sum(parameter.numel() for parameter in refiner.parameters())
    # Gradients of the refiner are added up in float32; products take a bfloat16 copy of every matrix, on a CPU also of
    # the head, which they lay out anew.
    copies = weights + (trainer.target.head.weight.numel() if args.device == "cpu" else 0)
    predicted = logits * per_logit + BUFFERS * losses.BUFFER_BYTES + 4 * weights + 2 * copies
    print(json.dumps({"loss_peak": found, "predicted": predicted}))


def run_process(command: list[str], environment: dict[str, str]) -> dict | None:
    """The last line of a process as JSON, or `None` with its complaint on the screen."""
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        print(f"$ {' '.join(command)}\nfailed with {done.returncode}:\n{done.stderr[-1500:]}", file=sys.stderr)
        return None
    return json.loads(done.stdout.strip().splitlines()[-1])


def own_command(work: Path, args: argparse.Namespace, **more: object) -> list[str]:
    values = {"recipe": args.recipe, "device": args.device, "length": args.length, "anchors": args.anchors}
    values |= {"steps": args.steps, "loss-memory-mb": args.loss_memory_mb, "work": work, **more}
    return [sys.executable, __file__, *(str(part) for name, value in values.items() for part in (f"--{name}", value))]


def compare(work: Path, args: argparse.Namespace, console: Console) -> None:
    runs: dict[str, list[dict]] = {}
    names = [name for name, more in ARMS.items() if more is not None or args.peer_python]
    if args.recipe == "dflash":  # its labels are the teacher's here, which a sampled vocabulary may hide
        names.remove("ours, sampled vocabulary")
    bare = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    for number in range(args.rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            if ARMS[name] is None:
                script = str(Path(__file__).with_name("peer_step.py"))
                command = [args.peer_python, script, str(work), args.recipe, args.device, str(args.steps)]
                found = run_process(command, bare)
            else:
                found = run_process(own_command(work, args, arm=name), dict(os.environ))
            if found is not None:
                runs.setdefault(name, []).append(found)
    table = Table("arm", "step s", "of", "block rows/s", "text tokens/s", "step memory MiB", "peak MiB", "loss")
    for name in [name for name in names if name in runs]:
        row = summary(runs[name], args)
        table.add_row(
            name,
            f"{row['step_s']:.3f}",
            f"{row['fastest_s']:.3f}-{row['slowest_s']:.3f}",
            *(f"{row[key]:.0f}" for key in ("block_rows_per_s", "text_tokens_per_s", "step_mib", "peak_mib")),
            f"{row['first_loss']:.4f}",
        )
        if args.output:
            with open(args.output, "a", encoding="utf-8") as file:
                file.write(json.dumps({"arm": name, **provenance(args), **row, "runs": runs[name]}) + "\n")
    console.print(table)


def summary(runs: list[dict], args: argparse.Namespace) -> dict[str, float]:
    """Medians over the timed steps of all rounds, and over rounds for memory."""
    seconds = [one for run in runs for one in run["step_s"]]
    step_s = statistics.median(seconds)
    return {
        "step_s": step_s,
        "fastest_s": min(seconds),
        "slowest_s": max(seconds),
        "block_rows_per_s": args.anchors * (BLOCK - 1) / step_s,
        "text_tokens_per_s": args.length / step_s,
        "step_mib": statistics.median(run["peak"] - run["baseline"] for run in runs) / 2**20,
        "peak_mib": statistics.median(run["peak"] for run in runs) / 2**20,
        "first_loss": runs[0]["losses"][0],
    }


def measure_memory(work: Path, args: argparse.Namespace, console: Console) -> None:
    # Blocks below this size would stay with the allocator when they are freed, and later peaks would hide in them.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    table = Table("chunk", "anchors", "predicted MiB", "measured MiB", "measured / predicted")
    for chunk, anchors in MEMORY_CASES:
        found = run_process(own_command(work, args, chunk=chunk, anchors=anchors, steps=2), environment)
        if found is None:
            continue
        predicted, measured = found["predicted"], max(found["loss_peak"])
        table.add_row(
            str(chunk),
            str(anchors),
            *(f"{value / 2**20:.0f}" for value in (predicted, measured)),
            f"{measured / predicted:.2f}",
        )
    console.print(table)


def provenance(args: argparse.Namespace) -> dict[str, object]:
    options = ("recipe", "device", "length", "anchors", "steps", "rounds", "loss_memory_mb")
    return {
        **{name: getattr(args, name) for name in options},
        "machine": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", choices=("xpress", "dflash"), default="xpress")
    parser.add_argument("--peer-python", help="interpreter that has speculators 0.9")
    parser.add_argument("--memory", action="store_true", help="the loss's peak against the arithmetic instead")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--length", type=int, default=512, help="tokens of the text")
    parser.add_argument("--anchors", type=int, default=64, help="blocks of the text")
    parser.add_argument("--steps", type=int, default=4, help="steps of a process, the first one not timed")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--loss-memory-mb", type=int, default=128)
    parser.add_argument("--output", help="JSONL file that gets one row per arm")
    for hidden, kind in (("--work", Path), ("--arm", str), ("--chunk", int)):
        parser.add_argument(hidden, type=kind, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:  # one arm or case, started by the run below
        return run_own(args.work, args) if args.arm else run_memory_case(args.work, args)
    console = Console(width=119)
    run: Callable = measure_memory if args.memory else compare
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder), args)
        console.print(json.dumps(provenance(args)))
        run(Path(folder), args, console)


if __name__ == "__main__":
    main()
