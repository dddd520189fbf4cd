"""Goes on training the shipped drafter on answers of its target, and shows what that changes on held-out answers.

xpress-hf regenerate --prompts examples/prompts.jsonl --output answers.jsonl --max-new-tokens 128
python examples/train_xpress.py --conversations answers.jsonl --output_dir drafter --max_steps 20
"""

from dataclasses import dataclass, field

import torch
from transformers import HfArgumentParser

from xpress_hf import DrafterTrainer, DrafterTrainingArguments
from xpress_hf.demo import load_demo_drafter, load_demo_target
from xpress_hf.training.data import ConversationDataset


@dataclass
class Data:
    """What to learn from."""

    conversations: str = field(metadata={"help": "JSONL file with answers of the target."})
    held_out: int = field(default=4, metadata={"help": "Answers that are not trained on."})


def main() -> None:
    parser = HfArgumentParser((Data, DrafterTrainingArguments))
    parser.set_defaults(recipe="xpress", num_anchors=48, per_device_train_batch_size=4, learning_rate=1e-4)
    parser.set_defaults(loss_vocab_size=12288, bf16=True, use_cpu=not torch.cuda.is_available(), report_to="none")
    data, args = parser.parse_args_into_dataclasses()
    target, tokenizer = load_demo_target(device=args.device, report=print)
    # Master weights are float32; `bf16` computes in half precision.
    drafter = load_demo_drafter(torch.float32, args.device)
    mask = drafter.config.mask_token_id
    texts = ConversationDataset(data.conversations, tokenizer, max_length=1024, mask_token_id=mask)
    texts = [texts[index] for index in range(len(texts))]
    train, held_out = texts[: -data.held_out], texts[-data.held_out :]
    trainer = DrafterTrainer(drafter, args, target, train_dataset=train, eval_dataset=held_out)
    before = trainer.evaluate()
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()
    after = trainer.evaluate()
    for name in ("eval_bare_acceptance_length", "eval_refined_acceptance_length"):
        print(f"{name}: {before[name]:.3f} before, {after[name]:.3f} after {trainer.state.global_step} steps")


if __name__ == "__main__":
    main()
