"""Trains the demo drafter in two stages: copies of the target's last layers with `dflash`, then the refiner with `xpress`.

    python examples/train_demo_drafter.py --features FOLDER --recipe dflash --output_dir stage1 --max_steps 2000
    python examples/train_demo_drafter.py --features FOLDER --recipe xpress --start stage1 --output_dir stage2
"""

from dataclasses import dataclass, field

from transformers import HfArgumentParser

from xpress_hf import XPressConfig, XPressDrafter
from xpress_hf.demo import load_demo_target
from xpress_hf.training.features import FeatureDataset
from xpress_hf.training.initialization import initialize_from_target
from xpress_hf.training.trainer import DrafterTrainer, DrafterTrainingArguments

# An id of the vocabulary that was reserved when the tokenizer was made and never occurs in text.
MASK_TOKEN_ID = 16


@dataclass
class DemoArguments:
    """Which answers to learn from, and from where to start."""

    features: str = field(metadata={"help": "Folder written by read_features.py."})
    eval_features: str | None = field(default=None, metadata={"help": "Folder of held-out answers."})
    start: str | None = field(default=None, metadata={"help": "Drafter to go on from; else copies of target layers."})
    block_size: int = field(default=6, metadata={"help": "Slots of a block, anchor included."})


def demo_config(target_config, block_size: int, layer_ids: list[int], refiner: dict | None) -> XPressConfig:
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    sizes = {name: getattr(target_config, name) for name in names}
    return XPressConfig(
        **sizes,
        num_hidden_layers=3,
        num_target_layers=target_config.num_hidden_layers,
        rms_norm_eps=target_config.rms_norm_eps,
        rope_parameters=dict(target_config.rope_parameters),
        max_position_embeddings=target_config.max_position_embeddings,
        block_size=block_size,
        mask_token_id=MASK_TOKEN_ID,
        target_layer_ids=layer_ids,
        refiner=refiner,
    )


def main() -> None:
    demo, args = HfArgumentParser((DemoArguments, DrafterTrainingArguments)).parse_args_into_dataclasses()
    target, _ = load_demo_target()
    dataset = FeatureDataset(demo.features)
    refiner = {"rank": 64, "mlp_width": 128, "sweeps": 2} if args.recipe == "xpress" else None
    drafter = XPressDrafter(demo_config(target.config, demo.block_size, dataset.meta.target_layer_ids, refiner))
    if demo.start is None:
        initialize_from_target(drafter, target)
    else:
        drafter.load_state_dict(XPressDrafter.from_pretrained(demo.start).state_dict(), strict=False)
    eval_dataset = FeatureDataset(demo.eval_features) if demo.eval_features else None
    trainer = DrafterTrainer(drafter, args, target, train_dataset=dataset, eval_dataset=eval_dataset)
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()


if __name__ == "__main__":
    main()
