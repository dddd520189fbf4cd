"""Answers of the demo target -> features on disk, once; training then needs no forward of the target.

python examples/read_features.py --conversations answers.jsonl --output features
"""

import argparse

from xpress_hf.demo import load_demo_target
from xpress_hf.training.data import ConversationDataset
from xpress_hf.training.features import write_features

TAPS = [1, 7, 14, 20, 27]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--conversations", nargs="+", required=True, help="JSONL files: messages, response_ids, finished"
    )
    parser.add_argument("--output", required=True, help="folder; an interrupted run goes on where it stopped")
    args = parser.parse_args()
    target, tokenizer = load_demo_target(report=print)
    texts = (text for path in args.conversations for text in ConversationDataset(path, tokenizer))
    count = write_features(target, texts, args.output, TAPS, tokenizer=tokenizer)
    print(f"{args.output}: {count} texts")


if __name__ == "__main__":
    main()
