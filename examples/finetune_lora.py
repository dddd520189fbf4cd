"""Fits the shipped drafter to one's own texts through LoRA: a small adapter to save, push, load and merge.

xpress-hf regenerate --prompts examples/prompts.jsonl --output answers.jsonl --max-new-tokens 128
python examples/finetune_lora.py answers.jsonl adapter
"""

import sys

import torch
from peft import LoraConfig, PeftModel, get_peft_model

from xpress_hf import DrafterTrainer, DrafterTrainingArguments
from xpress_hf.demo import DEMO_PROMPTS, load_demo_drafter, load_demo_target
from xpress_hf.training.data import ConversationDataset


def main(conversations: str, output: str) -> None:
    target, tokenizer = load_demo_target(report=print)
    layers = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    drafter = get_peft_model(load_demo_drafter(torch.float32), LoraConfig(r=16, lora_alpha=32, target_modules=layers))
    drafter.print_trainable_parameters()
    args = DrafterTrainingArguments(
        output_dir=output,
        recipe="xpress",
        num_anchors=48,
        max_steps=20,
        learning_rate=5e-4,
        loss_vocab_size=12288,
        bf16=True,
        use_cpu=not torch.cuda.is_available(),
        report_to="none",
    )
    dataset = ConversationDataset(conversations, tokenizer, max_length=1024)
    DrafterTrainer(drafter, args, target, train_dataset=dataset).train()
    drafter.save_pretrained(output)

    loaded = PeftModel.from_pretrained(load_demo_drafter(torch.float32), output)
    merged = loaded.merge_and_unload().to(target.dtype).eval()
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": DEMO_PROMPTS[0]}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    output_ids = target.generate(**inputs, assistant_model=merged, max_new_tokens=64, do_sample=False)
    print(tokenizer.decode(output_ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    print(merged.last_acceptance)


if __name__ == "__main__":
    main(*sys.argv[1:])
