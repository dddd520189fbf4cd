"""Gives the shipped drafter a longer block (DBloom): ceiling bin first, then a few steps with the new slots.

xpress-hf regenerate --prompts examples/prompts.jsonl --output answers.jsonl --max-new-tokens 128
python examples/expand_block.py answers.jsonl expanded --block-size 8
"""

import argparse

import torch

from xpress_hf import DrafterTrainer, DrafterTrainingArguments
from xpress_hf.demo import load_demo_drafter, load_demo_target
from xpress_hf.evaluation.expansion_bound import ExpansionBound
from xpress_hf.training.data import ConversationDataset
from xpress_hf.training.expansion import expand_block
from xpress_hf.training.launch import measure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("conversations", help="JSONL file with answers of the target")
    parser.add_argument("output", help="folder for the drafter")
    parser.add_argument("--block-size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    target, tokenizer = load_demo_target(report=print)
    drafter = load_demo_drafter(torch.float32)
    texts = ConversationDataset(options.conversations, tokenizer, max_length=1024)
    before = measure(target, drafter, texts, limit=8)
    print(before, ExpansionBound.of(before, options.block_size), sep="\n")

    larger = expand_block(drafter, options.block_size)
    print("naive:", measure(target, larger, texts, limit=8))
    args = DrafterTrainingArguments(
        output_dir=options.output,
        recipe="dbloom",
        # The answers are greedy, so their tokens are the target's most likely ones and need not be found again.
        recipe_options={"old_drafts": drafter.config.num_draft_tokens, "labels": "text"},
        loss_vocab_size=12288,
        per_device_train_batch_size=4,
        num_anchors=24,
        max_steps=options.steps,
        learning_rate=1e-4,
        bf16=True,
        use_cpu=not torch.cuda.is_available(),
        report_to="none",
    )
    trainer = DrafterTrainer(larger, args, target, train_dataset=texts)
    trainer.train()
    trainer.save_model()
    print("trained:", measure(target, larger, texts, limit=8))


if __name__ == "__main__":
    main()
