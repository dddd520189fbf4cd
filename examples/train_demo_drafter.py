"""Trains the demo drafter: first `dflash` from copies of the target's last layers, then `xpress` with a refiner.

python examples/train_demo_drafter.py --features features --recipe dflash --output_dir warm ...
python examples/train_demo_drafter.py --features features --recipe xpress --start warm --output_dir drafter ...
"""

from dataclasses import dataclass, field

from transformers import HfArgumentParser

from xpress_hf import XPressDrafter
from xpress_hf.demo import load_demo_target
from xpress_hf.training.features import FeatureDataset
from xpress_hf.training.initialization import config_for_target, initialize_from_target
from xpress_hf.training.trainer import DrafterTrainer, DrafterTrainingArguments

# <empty_output>: marks cells without output in notebooks of the pre-training data; no chat text holds it.
MASK_TOKEN_ID = 16
REFINER = {"rank": 64, "mlp_width": 128, "sweeps": 2}


@dataclass
class DemoArguments:
    """What to learn from, and from where to start."""

    features: str = field(metadata={"help": "Folder written by read_features.py."})
    eval_features: str | None = field(default=None, metadata={"help": "Folder of held-out answers."})
    start: str | None = field(default=None, metadata={"help": "Drafter to go on from; else copies of target layers."})
    block_size: int = field(default=6, metadata={"help": "Slots of a block, anchor included."})


def main() -> None:
    demo, args = HfArgumentParser((DemoArguments, DrafterTrainingArguments)).parse_args_into_dataclasses()
    target, _ = load_demo_target(report=print)
    dataset = FeatureDataset(demo.features)
    refiner = REFINER if args.recipe == "xpress" else None
    sizes = {"num_hidden_layers": 3, "block_size": demo.block_size, "refiner": refiner}
    drafter = XPressDrafter(config_for_target(target, dataset.meta.target_layer_ids, MASK_TOKEN_ID, **sizes))
    if demo.start is None:
        initialize_from_target(drafter, target)
    else:
        drafter.load_state_dict(XPressDrafter.from_pretrained(demo.start).state_dict(), strict=False)
    held_out = FeatureDataset(demo.eval_features) if demo.eval_features else None
    trainer = DrafterTrainer(drafter, args, target, train_dataset=dataset, eval_dataset=held_out)
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()


if __name__ == "__main__":
    main()
