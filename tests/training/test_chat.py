"""What the assistant writes, found in the target's own chat template (H24)."""

import pytest

from tests.training.chat_fixtures import (
    BRACKETS,
    CHATML,
    MARKED,
    PROMPT,
    TEMPLATES,
    THINKING,
    build_tokenizer,
    call_of,
)
from xpress_hf.training.chat import ChatTemplate, mask_runs
from xpress_hf.training.data import encode_conversation

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
CALL = '<call>{"name": "weather", "arguments": {"city": "Oslo"}}</call>'
MESSAGES = [
    {"role": "user", "content": "the weather in Oslo ?"},
    {"role": "assistant", "content": "", "tool_calls": [call_of("weather", city="Oslo")]},
    {"role": "tool", "content": "rain, 12"},
    {"role": "assistant", "content": "\nit is rain \N{UMBRELLA}"},
    {"role": "user", "content": "the assistant ?"},
    {"role": "assistant", "content": "one, two: three"},
]


def supervised(tokenizer, text) -> list[str]:
    """Texts of the supervised runs."""
    runs = mask_runs(text["loss_mask"])
    return [tokenizer.decode(text["input_ids"][start:stop]) for start, stop in runs]


@pytest.mark.parametrize("name", ["chatml", "marked", "brackets"])
def test_masked_ids_are_the_answers_and_their_ends(name):
    """H24: a tool call and two more answers decode exactly to the assistant's texts with their end-of-turn tokens."""
    end = "</s>" if name == "brackets" else "<|im_end|>"
    tokenizer = build_tokenizer(TEMPLATES[name], end)
    text = encode_conversation({"messages": MESSAGES, "tools": [TOOL]}, tokenizer)
    # In the template without a header of the assistant's the blank before an answer is the template's.
    answers = [CALL, "\nit is rain \N{UMBRELLA}", "one, two: three"]
    found = supervised(tokenizer, text)
    blank = " " if name == "brackets" else ""
    assert [answer.removeprefix(blank) for answer in found] == [one + end for one in answers]
    assert text["loss_mask"].sum() == sum(len(tokenizer(one, add_special_tokens=False)["input_ids"]) for one in found)
    # The whole is what the template gives, up to the end of the last answer.
    whole = tokenizer.apply_chat_template(MESSAGES, tools=[TOOL], tokenize=False)
    assert whole.startswith(tokenizer.decode(text["input_ids"]))


def test_a_template_that_shows_earlier_answers_in_another_way():
    """H24: no prefixes here; the last answer has its (empty) chain of thought, the earlier ones have none."""
    tokenizer = build_tokenizer(THINKING)
    text = encode_conversation({"messages": MESSAGES}, tokenizer)
    assert supervised(tokenizer, text) == [
        CALL + "<|im_end|>",
        "\nit is rain \N{UMBRELLA}<|im_end|>",
        "<think>\n\n</think>\none, two: three<|im_end|>",
    ]


def test_the_thinking_switch_moves_the_chain_of_thought_into_the_prompt():
    """H24: the switch belongs to the record; the prompt with thinking off already holds the empty chain."""
    tokenizer = build_tokenizer(THINKING)
    record = {"messages": MESSAGES[-2:], "chat_template_kwargs": {"enable_thinking": False}}
    assert supervised(tokenizer, encode_conversation(record, tokenizer)) == ["one, two: three<|im_end|>"]
    record = {"messages": MESSAGES[-2:]}
    on = encode_conversation(record, tokenizer)
    off = encode_conversation(record, tokenizer, chat_template_kwargs={"enable_thinking": False})
    assert supervised(tokenizer, on) == ["<think>\n\n</think>\none, two: three<|im_end|>"]
    assert on["input_ids"].tolist() == off["input_ids"].tolist()
    assert off["loss_mask"].sum() < on["loss_mask"].sum()


def test_a_chain_of_thought_although_the_switch_is_off():
    """The prompt closes a chain that the answer has all the same: supervised is what differs from an empty chain."""
    tokenizer = build_tokenizer(THINKING)
    messages = [MESSAGES[-2], {**MESSAGES[-1], "reasoning_content": "think, think"}]
    record = {"messages": messages, "chat_template_kwargs": {"enable_thinking": False}}
    text = encode_conversation(record, tokenizer)
    assert supervised(tokenizer, text) == ["think, think\n</think>\none, two: three<|im_end|>"]


def test_an_answer_starts_where_the_prompt_ends():
    """Line breaks that begin an answer must not melt into the one that ends the prompt."""
    tokenizer = build_tokenizer(CHATML)
    messages = [{"role": "user", "content": "two"}, {"role": "assistant", "content": "\n\nthree"}]
    template = ChatTemplate(tokenizer)
    prompt = template.prompt_ids(messages[:1])
    whole = tokenizer(template.render(messages), add_special_tokens=False)["input_ids"]
    assert whole[: len(prompt)] != prompt, "nothing melts here"
    text = encode_conversation({"messages": messages}, tokenizer)
    assert text["input_ids"][: len(prompt)].tolist() == prompt
    assert text["loss_mask"].tolist() == [0] * len(prompt) + [1] * (len(text["input_ids"]) - len(prompt))
    assert supervised(tokenizer, text) == ["\n\nthree<|im_end|>"]


def test_response_ids_are_kept_and_closed_once():
    tokenizer = build_tokenizer(CHATML)
    # Ids of single bytes: no tokenizer would give them for this text.
    answer = [tokenizer.convert_tokens_to_ids(letter) for letter in "rain"]
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    messages = [*MESSAGES[:4], {"role": "user", "content": "one"}, {"role": "assistant", "content": "rain"}]
    for given in (answer, [*answer, end]):
        text = encode_conversation({"messages": messages, "response_ids": given}, tokenizer)
        assert text["input_ids"].tolist()[-5:] == [*answer, end]
        assert supervised(tokenizer, text)[-1] == "rain<|im_end|>"
        assert len(supervised(tokenizer, text)) == 3
    cut = encode_conversation({"messages": messages, "response_ids": answer, "finished": False}, tokenizer)
    assert cut["input_ids"].tolist()[-4:] == answer
    short = encode_conversation({"messages": messages, "response_ids": answer}, tokenizer, max_length=6)
    assert len(short["input_ids"]) == len(short["loss_mask"]) == 6


def test_the_end_of_turn_is_the_templates_own():
    """Some tokenizers end a text with another token than their template ends a turn."""
    tokenizer = build_tokenizer(CHATML, end="</s>")
    record = {"messages": MESSAGES[-2:], "response_ids": tokenizer("one")["input_ids"]}
    assert supervised(tokenizer, encode_conversation(record, tokenizer)) == ["one<|im_end|>"]
    del record["response_ids"]
    assert supervised(tokenizer, encode_conversation(record, tokenizer)) == ["one, two: three<|im_end|>"]
    assert supervised(tokenizer, encode_conversation({**record, "finished": False}, tokenizer)) == ["one, two: three"]


def test_a_template_without_any_end_of_turn():
    tokenizer = build_tokenizer(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}",
        end="</s>",
    )
    text = encode_conversation({"messages": MESSAGES[-2:]}, tokenizer)
    assert tokenizer.decode(text["input_ids"]) == "user: the assistant ?\nassistant: one, two: three\n</s>"
    assert supervised(tokenizer, text) == [" one, two: three\n</s>"]


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (None, "no chat template"),
        # Shown twice, and no generation prompt to tell where the answer starts.
        (CHATML.replace("{{ m.content }}", "{{ m.content }} {{ m.content }}").replace(PROMPT, ""), "cannot mark"),
        (BRACKETS.replace(" {{ m.content }}", ""), "cannot mark"),
        (MARKED.replace("m.role == 'assistant'", "m.role == 'model'"), "none around the answers"),
        ("{{ raise_exception('only one turn') }}", r"refuses .* \['user', 'assistant'\]: only one turn"),
    ],
)
def test_templates_that_cannot_mark_are_named(template, words):
    with pytest.raises(ValueError, match=words):
        encode_conversation({"messages": MESSAGES[-2:]}, build_tokenizer(template))


def test_runs_of_a_mask():
    assert mask_runs([1, 1, 0, 1]) == [(0, 2), (3, 4)]
    assert mask_runs([0, 0]) == mask_runs([]) == []
