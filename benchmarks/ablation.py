"""What each part of the xPress recipe is worth: arms trained alike from one warm start, then measured alike.

    python benchmarks/ablation.py --start WARM --features FEATURES --data DATA --output runs/ablation [--steps 300]

WARM is a drafter without refiner (recipe `dflash`, examples/train_demo_drafter.py), FEATURES a folder of features of
the embedded target. Every arm sees the same texts, steps and blocks, then answers held-out prompts in bfloat16 with
generate(), greedy and sampled at temperature 1. An arm that was trained or measured before is not run again.
Acceptance lengths count the bonus token and are pooled over cycles; intervals are bootstrapped over prompts.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
import transformers
from rich.progress import track

import xpress_hf
from xpress_hf import XPressDrafter
from xpress_hf.demo import load_demo_target
from xpress_hf.evaluation.bootstrap import bootstrap, pooled_ratio, pooled_ratio_difference
from xpress_hf.evaluation.prompts import encode_prompt, read_prompts
from xpress_hf.evaluation.records import cpu_name
from xpress_hf.modeling.refiner import CausalRefiner, RefinerState
from xpress_hf.training.features import FeatureDataset
from xpress_hf.training.trainer import DrafterTrainer, DrafterTrainingArguments

FILES = ("gsm8k.jsonl", "humaneval.jsonl")
REFINER = {"rank": 64, "mlp_width": 128, "sweeps": 2}
# Name -> recipe, its options, further training arguments.
ARMS: dict[str, tuple[str, dict, dict]] = {
    "dflash": ("dflash", {}, {}),
    "xpress": ("xpress", {}, {}),
    "no free-running": ("xpress", {"free_running": 0.0}, {}),
    "no base anchor": ("xpress", {"base": [0.0, 0.0]}, {}),
    "frozen backbone": ("xpress", {}, {"freeze_backbone": True}),
    "markov head": ("xpress", {}, {}),
    "dpace": ("xpress", {"position_weights": "dpace", "gamma": None}, {}),
    "chain": ("xpress", {"chain": 0.5}, {}),
}


class MarkovHead(CausalRefiner):
    """A refiner that sees the previous token alone: no hidden states, no mixing over slots."""

    def begin(self, hidden_states: torch.Tensor) -> RefinerState:
        rank, size = self.in_proj.out_features, hidden_states.shape[1]
        identity = torch.eye(size, dtype=hidden_states.dtype, device=hidden_states.device).expand(rank, -1, -1)
        return RefinerState(hidden_states.new_zeros(*hidden_states.shape[:2], rank), identity)


def build(name: str, start: str) -> XPressDrafter:
    """The warm start with the refiner of this arm."""
    warm = XPressDrafter.from_pretrained(start)
    config = copy.deepcopy(warm.config)
    config.refiner = None if name == "dflash" else REFINER
    torch.manual_seed(0)
    drafter = XPressDrafter(config)
    if name == "markov head":
        drafter.refiner.__class__ = MarkovHead
    drafter.load_state_dict(warm.state_dict(), strict=False)
    return drafter


def train(
    drafter: XPressDrafter, target, recipe: str, options: dict, args: argparse.Namespace, folder: Path, **more
) -> None:
    """One arm; nothing where `folder` holds a finished one."""
    if (folder / "train.json").exists():
        return
    arguments = DrafterTrainingArguments(
        output_dir=str(folder),
        recipe=recipe,
        recipe_options=options,
        max_steps=args.steps,
        per_device_train_batch_size=4,
        num_anchors=48,
        chunk_blocks=48,
        loss_vocab_size=12288,
        # The backbone learns at the same rate in every arm, a new refiner faster.
        learning_rate=args.learning_rate * (1 if drafter.refiner is None else args.refiner_rate),
        backbone_lr_scale=1 if drafter.refiner is None else 1 / args.refiner_rate,
        lr_scheduler_type="linear",
        warmup_steps=20,
        seed=7,
        bf16=True,
        use_cpu=not torch.cuda.is_available(),
        report_to="none",
        logging_steps=50,
        save_strategy="no",
        disable_tqdm=True,
        **more,
    )
    start = time.perf_counter()
    trainer = DrafterTrainer(drafter, arguments, target, train_dataset=FeatureDataset(args.features))
    trainer.train()
    trainer.save_model()
    (folder / "train.json").write_text(
        json.dumps({"log": trainer.state.log_history, "s": time.perf_counter() - start})
    )


def measure(
    drafter: XPressDrafter,
    target,
    tokenizer,
    prompts,
    args: argparse.Namespace,
    folder: Path,
    temperatures: tuple[int, ...] = (0, 1),
) -> list[dict]:
    """One row per prompt and temperature, kept in `folder`; what is there is not measured again."""
    path = folder / "rows.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    done = {(row["id"], row["temperature"]) for row in rows}
    with open(path, "a", encoding="utf-8") as file:
        for temperature in temperatures:
            open_prompts = [prompt for prompt in prompts if (prompt.id, temperature) not in done]
            options = {"do_sample": True, "temperature": 1.0} if temperature else {"do_sample": False}
            for start in track(
                range(0, len(open_prompts), args.batch), description=f"{folder.name}, T = {temperature}"
            ):
                batch = open_prompts[start : start + args.batch]
                texts = [encode_prompt(tokenizer, prompt.turns[0], target.device)[0].tolist() for prompt in batch]
                inputs = tokenizer.pad({"input_ids": texts}, padding_side="left", return_tensors="pt")
                torch.manual_seed(0)
                target.generate(**inputs, assistant_model=drafter, max_new_tokens=args.new, top_k=0, **options)
                for prompt, record in zip(batch, drafter.last_row_acceptance, strict=True):
                    row = {"id": prompt.id, "temperature": temperature}
                    row.update(kept=record.accepted, verified=record.verified)
                    file.write(json.dumps(row) + "\n")
                    rows.append(row)
                file.flush()
    wanted = {prompt.id for prompt in prompts}
    return [row for row in rows if row["id"] in wanted]


def table(rows: list[dict]) -> np.ndarray:
    """[P, 2] kept drafts and cycles of each prompt."""
    return np.array([[sum(row["kept"]), len(row["kept"])] for row in rows])


def difference(left: list[dict], right: list[dict]) -> str:
    """95 % interval over prompts of two pooled acceptance lengths, `left` - `right`."""
    found = bootstrap(np.hstack([table(left), table(right)]), pooled_ratio_difference)
    return f"[{found.low:+.3f}, {found.high:+.3f}]"


def provenance(args: argparse.Namespace) -> str:
    return (
        f"command: python {' '.join(sys.argv)}\n"
        f"torch {torch.__version__}, transformers {transformers.__version__}, xpress_hf {xpress_hf.__version__}; "
        f"{cpu_name()}, {torch.get_num_threads()} threads; bfloat16; {args.limit} prompts each of "
        f"{' and '.join(FILES)}, {args.new} new tokens; {args.steps} steps of at most 192 blocks, learning rate "
        f"{args.learning_rate:g}, of a refiner {args.refiner_rate:g} times as high"
    )


def report(measured: dict[str, list[dict]], args: argparse.Namespace) -> str:
    lines = [
        provenance(args),
        "| arm | T = 0 | minus xpress, 95 % | T = 1 | minus xpress, 95 % |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, rows in measured.items():
        cells = [name]
        for temperature in (0, 1):
            own, other = (
                sorted((row for row in some if row["temperature"] == temperature), key=lambda row: row["id"])
                for some in (rows, measured.get("xpress", rows))
            )
            value = 1 + pooled_ratio(table(own))
            cells += [f"{value:.3f}", "" if name == "xpress" else difference(own, other)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def trained(name: str, folder: Path, args: argparse.Namespace) -> XPressDrafter:
    """The drafter of an arm as generate() runs it."""
    drafter = XPressDrafter.from_pretrained(folder, dtype=torch.bfloat16).eval()
    if name == "markov head":
        drafter.refiner.__class__ = MarkovHead
    drafter.speculation.sweeps = None if drafter.refiner is None else args.sweeps
    return drafter


def parser(description: str) -> argparse.ArgumentParser:
    """Options of all scripts that train and measure arms."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--start", required=True, help="drafter without refiner that all arms start from")
    parser.add_argument("--features", required=True, help="folder of features of the embedded target")
    parser.add_argument("--data", required=True, help=f"folder with {' and '.join(FILES)}")
    parser.add_argument("--output", required=True, help="folder for drafters and rows")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--refiner-rate", type=float, default=8.0, help="learning rate of a refiner / of the backbone")
    parser.add_argument("--sweeps", type=int, default=2, help="sweeps of a refiner in decoding")
    parser.add_argument("--limit", type=int, default=40, help="prompts of each file")
    parser.add_argument("--batch", type=int, default=16, help="prompts answered together")
    parser.add_argument("--new", type=int, default=64, help="new tokens per prompt")
    return parser


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    args = options.parse_args()
    transformers.logging.set_verbosity_error()
    target, tokenizer = load_demo_target(report=print)
    prompts = [prompt for name in FILES for prompt in read_prompts(Path(args.data) / name, args.limit)]
    folders = {name: Path(args.output) / name.replace(" ", "-") for name in args.arms}
    for name, folder in folders.items():
        recipe, fields, more = ARMS[name]
        train(build(name, args.start), target, recipe, fields, args, folder, **more)
    measured = {
        name: measure(trained(name, folder, args), target, tokenizer, prompts, args, folder)
        for name, folder in folders.items()
    }
    print(report(measured, args))


if __name__ == "__main__":
    main()
