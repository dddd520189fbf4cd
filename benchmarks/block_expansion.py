"""What a longer block is worth (DBloom): before, naive, trained, and the same training at the old size.

    python benchmarks/block_expansion.py --start WARM --features FEATURES --data DATA --output runs/expansion \\
        [--block-size 8] [--new-block-size 12] [--steps 300]

WARM is a drafter without refiner, FEATURES a folder of features of the embedded target. First WARM is trained at
`--block-size` by the plain `dflash` recipe, then from there with the new slots (`dbloom`) and, as control, once more
at the old size; each for the same steps on the same texts. Greedy generate() in bfloat16 on held-out prompts;
acceptance lengths count the bonus token and are pooled over cycles, intervals are bootstrapped over prompts. Stages
that finished before are not run again.
"""

from __future__ import annotations

from pathlib import Path

import transformers
from ablation import FILES, difference, measure, parser, provenance, train, trained

from xpress_hf import XPressDrafter
from xpress_hf.decoding.acceptance import AcceptanceRecord
from xpress_hf.demo import load_demo_target
from xpress_hf.evaluation.expansion_bound import ExpansionBound
from xpress_hf.evaluation.prompts import read_prompts
from xpress_hf.modeling.rebuilding import rebuild
from xpress_hf.training.expansion import expand_block

# Answers in the features are greedy, so their tokens are the target's most likely ones.
DBLOOM = {"labels": "text"}


def record_of(rows: list[dict], num_draft_tokens: int) -> AcceptanceRecord:
    record = AcceptanceRecord(num_draft_tokens)
    for row in rows:
        record += AcceptanceRecord(num_draft_tokens, row["kept"], row["verified"])
    return record


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--block-size", type=int, default=8)
    options.add_argument("--new-block-size", type=int, default=12)
    args = options.parse_args()
    transformers.logging.set_verbosity_error()
    target, tokenizer = load_demo_target(report=print)
    prompts = [prompt for name in FILES for prompt in read_prompts(Path(args.data) / name, args.limit)]
    folders = {name: Path(args.output) / name for name in ("before", "naive", "trained", "control")}

    start = rebuild(XPressDrafter.from_pretrained(args.start), block_size=args.block_size)
    train(start, target, "dflash", {}, args, folders["before"])
    before = XPressDrafter.from_pretrained(folders["before"])
    longer = expand_block(before, args.new_block_size)
    longer.save_pretrained(folders["naive"])
    recipe = {**DBLOOM, "old_drafts": before.config.num_draft_tokens}
    train(longer, target, "dbloom", recipe, args, folders["trained"])
    train(before, target, "dflash", {}, args, folders["control"])

    print(provenance(args))
    rows = {}
    for name, folder in folders.items():
        drafter = trained(name, folder, args)
        rows[name] = sorted(
            measure(drafter, target, tokenizer, prompts, args, folder, temperatures=(0,)), key=lambda row: row["id"]
        )
        record = record_of(rows[name], drafter.config.num_draft_tokens)
        if name == "before":
            print(ExpansionBound.of(record, args.new_block_size))
        old = [min(kept, before.config.num_draft_tokens) for kept in record.accepted]
        print(
            f"| {name} | {drafter.config.block_size} | {record.acceptance_length:.3f} | "
            f"{difference(rows[name], rows['before'])} | "
            f"{1 + sum(old) / len(old):.3f} | {record.ceiling_share:.1%} | {' '.join(map(str, record.histogram))} |"
        )


if __name__ == "__main__":
    main()
