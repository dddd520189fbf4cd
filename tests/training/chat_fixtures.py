"""A byte-level tokenizer learned from a few words, with chat templates of the kinds that targets have."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<|pad|>", "<|im_start|>", "<|im_end|>", "<|mask|>", "<|bos|>", "</s>"]

TOOLS = "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
CALLS = "{% for call in m.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor %}"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"

CHATML = (
    TOOLS
    + "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    + CALLS
    + "<|im_end|>\n{% endfor %}"
    + PROMPT
)
# The end-of-turn token is outside of the marks, as in some published templates.
MARKED = (
    TOOLS
    + "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    + CALLS
    + "{% endgeneration %}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    + PROMPT
)
# Thinks before its last answer only, so that earlier answers are shown in another way than the last one.
THINKING = (
    TOOLS
    + "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    + "{% if m.role == 'assistant' and loop.last %}<think>\n{{ m.reasoning_content or '' }}\n</think>\n{% endif %}"
    + "{{ m.content }}"
    + CALLS
    + "<|im_end|>\n{% endfor %}"
    + PROMPT
    + "{% if add_generation_prompt and enable_thinking is defined and not enable_thinking %}"
    + "<think>\n\n</think>\n{% endif %}"
)
# No header of its own for the assistant.
BRACKETS = (
    "<|bos|>{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content }}"
    + CALLS
    + "</s>{% endif %}{% endfor %}"
)
TEMPLATES = {"chatml": CHATML, "marked": MARKED, "thinking": THINKING, "brackets": BRACKETS}

WORDS = "system user assistant tool call the weather in Oslo is rain and answer think one two three \n\n\n . , : ; 12"


def build_tokenizer(template: str | None = CHATML, end: str = "<|im_end|>") -> PreTrainedTokenizerFast:
    """260 to 330 ids; `end` is the end-of-text token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([WORDS] * 4, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        bos_token="<|bos|>",
        eos_token=end,
        additional_special_tokens=SPECIAL,
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


def call_of(name: str, **arguments: str) -> dict:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}
