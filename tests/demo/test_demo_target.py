"""The shipped drafter on the real demo target: exact in float32, near ties alone in bfloat16."""

import pytest
import torch

from xpress_hf.demo import DEMO_PROMPTS, load_demo_drafter
from xpress_hf.demo.drafter import DRAFTER_FOLDER
from xpress_hf.evaluation.agreement import FLOAT32_TIE, HALF_PRECISION_TIE, first_difference
from xpress_hf.evaluation.prompts import encode_prompt, read_prompts

pytestmark = [pytest.mark.demo, pytest.mark.slow]


@pytest.fixture
def compare(capsys):
    """Runs prompts with and without the drafter and prints the counts, also in a run that passes."""

    def run(*arguments, **options):
        with capsys.disabled():
            return compare_texts(*arguments, **options)

    return run


def compare_texts(target, judge, tokenizer, prompts, new):
    """Texts with and without the drafter: (number equal, list of first differences, record)."""
    drafter = load_demo_drafter(target.dtype)
    equal, differences, record = 0, [], None
    for prompt in prompts:
        ids = encode_prompt(tokenizer, prompt, target.device)
        plain = target.generate(ids, max_new_tokens=new, do_sample=False)[0]
        found = target.generate(ids, assistant_model=drafter, max_new_tokens=new, do_sample=False)[0]
        difference = first_difference(judge, ids.shape[1], plain, found)
        equal += difference is None
        differences += [difference] if difference is not None else []
        record = drafter.last_acceptance if record is None else record + drafter.last_acceptance
    gaps = ", ".join(f"{difference.relative_gap:.1e}" for difference in differences) or "none"
    print(f"\n{target.dtype}: {equal} of {len(prompts)} texts equal; relative gaps of first differences: {gaps}")
    print(record)
    return equal, differences, record


def worded(prompt_files, count):
    names = ("gsm8k.jsonl", "humaneval.jsonl")
    return [prompt.turns[0] for name in names for prompt in read_prompts(prompt_files / name, count)]


def test_float32_ids_equal_plain_generate(compare, demo_targets, prompt_files):
    exact, _, tokenizer = demo_targets
    _, differences, record = compare(exact, exact, tokenizer, worded(prompt_files, 10), new=32)
    assert all(difference.relative_gap <= FLOAT32_TIE for difference in differences)
    assert record.acceptance_length > 1.5, "drafts must be accepted, else nothing inside a block was tested"


def test_half_precision_differs_at_near_ties_only(compare, demo_targets, prompt_files):
    exact, low, tokenizer = demo_targets
    _, differences, _ = compare(low, exact, tokenizer, worded(prompt_files, 5), new=64)
    assert all(difference.relative_gap <= HALF_PRECISION_TIE for difference in differences)


def test_the_mask_token_never_occurs_in_prompts(demo_targets, prompt_files):
    tokenizer = demo_targets[2]
    mask = load_demo_drafter().config.mask_token_id
    texts = [*DEMO_PROMPTS, *worded(prompt_files, 300)]
    assert not [text for text in texts if mask in tokenizer(text)["input_ids"]]
    assert mask in tokenizer.all_special_ids or tokenizer.decode([mask]) == "<empty_output>"


def test_the_shipped_drafter_fits(demo_targets):
    assert sum(path.stat().st_size for path in DRAFTER_FOLDER.iterdir()) <= 40_000_000
    config = load_demo_drafter().config
    target = demo_targets[1].config
    assert (config.vocab_size, config.hidden_size) == (target.vocab_size, target.hidden_size)
    assert max(config.target_layer_ids) < target.num_hidden_layers - 1


def test_sampling_with_the_demo_pair(demo_targets):
    _, low, tokenizer = demo_targets
    drafter = load_demo_drafter()
    ids = encode_prompt(tokenizer, DEMO_PROMPTS[0], low.device)
    torch.manual_seed(0)
    low.generate(ids, assistant_model=drafter, max_new_tokens=32, do_sample=True, temperature=0.7)
    assert drafter.last_acceptance.acceptance_length > 1.2
