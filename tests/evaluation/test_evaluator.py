"""The evaluator: closed-form values, one number everywhere, resumed runs, chats of two turns."""

import dataclasses
import json
from concurrent.futures import ThreadPoolExecutor

import evaluate
import pytest
import torch

from tests.conftest import VOCAB, OracleDrafter, build_cycle_target, build_drafter, build_target, plain
from tests.training.chat_fixtures import CHATML, build_tokenizer
from xpress_hf import AcceptanceRecord
from xpress_hf.decoding.target import Target, taps
from xpress_hf.evaluation import evaluator as evaluator_module
from xpress_hf.evaluation.evaluator import EvaluationSettings, Evaluator
from xpress_hf.evaluation.metric import METRIC_FOLDER, acceptance_figures
from xpress_hf.evaluation.observer import anchor_position
from xpress_hf.evaluation.prompts import BenchmarkPrompt, PromptSet
from xpress_hf.evaluation.records import pool, read_records
from xpress_hf.evaluation.replay import end_ids, replay
from xpress_hf.evaluation.summary import summarize
from xpress_hf.modeling.drafter import BlockDraft
from xpress_hf.modeling.refiner import greedy_choice


class WordIds:
    """Texts of numbers: what a number says is its id. No template."""

    chat_template = None

    def __call__(self, text, return_tensors=None):
        return {"input_ids": torch.tensor([[int(one) for one in text.split()]])}

    def decode(self, ids, skip_special_tokens=True):
        return " ".join(str(int(one)) for one in ids)


def prompts(*texts: str, turns: int = 1) -> list[PromptSet]:
    items = [BenchmarkPrompt(f"p/{number}", "p", [text] * turns) for number, text in enumerate(texts)]
    return [PromptSet("p.jsonl", "00", items)]


def cycle_pair(wrong_slot: int | None = None):
    """Target that counts modulo 16 and an oracle of block 4 for texts that start at 0."""
    target = build_cycle_target()
    drafter = build_drafter(kind=OracleDrafter, vocab_size=16, mask_token_id=15, block_size=4)
    drafter.continuation = [index % 16 for index in range(200)]
    if wrong_slot == 2:
        # One draft kept and one bonus: cycles start every two positions behind the first new token.
        drafter.is_wrong = lambda position: position % 2 == 0
    return target, drafter


def figures_of(target, drafter, text: str, new: int) -> dict:
    evaluator = Evaluator(target, WordIds(), drafter, EvaluationSettings(new))
    evaluator.drafter.speculation.sweeps = 0
    evaluator.arm = "bare"
    return summarize(evaluator.run(prompts(text)), "float32")[0]


def test_an_oracle_on_the_cycle_target():
    """Row H28: block 4, every block full: 4.0 tokens per cycle with the bonus, 3.0 without."""
    figures = figures_of(*cycle_pair(), "0 1", 25)
    assert figures["acceptance_length"] == 4.0
    assert figures["acceptance_length_without_bonus"] == 3.0
    assert figures["acceptance_length_prompt_mean"] == 4.0
    assert figures["position_acceptance"] == [1.0, 1.0, 1.0]
    assert figures["histogram"] == [0, 0, 0, 6]
    assert figures["ceiling_share"] == 1.0
    # Two more slots could add two tokens in every cycle.
    assert (figures["expansion"]["new_block_size"], figures["expansion"]["bound"]) == (6, 2.0)
    assert figures["agreement"] == {"equal": 1, "near_tie": 0, "other": 0}


def test_an_error_forced_at_slot_two():
    figures = figures_of(*cycle_pair(wrong_slot=2), "0 1", 25)
    assert figures["acceptance_length"] == 2.0
    assert figures["position_acceptance"] == [1.0, 0.0, None]
    assert figures["expansion"]["bound"] == 0.0
    assert not figures["expansion"]["pays"]


def random_pair(**overrides):
    """A random target with an end id, and a drafter that keeps some of its drafts."""
    target = build_target(factor=2.0)
    drafter = build_drafter(factor=2.0, block_size=4, **overrides)
    target.generation_config.eos_token_id = [11, 12]
    return target, drafter


class HalfOracle(OracleDrafter):
    """Bare drafts are wrong at every third position, refined ones at every fifth."""

    def draft_block(self, target, known_ids, context, cache, choose=greedy_choice, **kwargs):
        super(OracleDrafter, self).draft_block(target, known_ids, context, cache, **kwargs)
        anchor, size = anchor_position(self, cache, **kwargs), self.config.num_draft_tokens
        following = torch.tensor(self.continuation[anchor + 1 : anchor + 1 + size])
        following = torch.nn.functional.pad(following, (0, size - len(following)))
        positions = torch.arange(anchor + 1, anchor + 1 + size)

        def one_hot(ids):
            return 20.0 * torch.nn.functional.one_hot(ids % VOCAB, VOCAB)[None].float()

        bare = one_hot(torch.where(positions % 3 == 0, following + 1, following))
        refined = one_hot(torch.where(positions % 5 == 0, following + 1, following))
        first = choose(bare, None)
        if self.num_sweeps == 0:
            return BlockDraft(first, bare)
        return BlockDraft(choose(refined, first), refined)


def half_oracle_pair(length: int = 60):
    target = build_target()
    drafter = build_drafter(kind=HalfOracle, block_size=4)
    drafter.continuation = plain(target, torch.tensor([[3, 4, 5]]), max_new_tokens=length)[0].tolist()
    return target, drafter


def test_where_the_refiner_helped_and_hurt():
    """Against a slow twin that walks through the text with both drafts."""
    target, drafter = half_oracle_pair()
    record = Evaluator(target, WordIds(), drafter, EvaluationSettings(40)).run(prompts("3 4 5"))[0]
    text = drafter.continuation[:43]
    anchor, accepted, bare, changed = 3, [], [], []
    while anchor < len(text) - 2:
        room = min(3, len(text) - anchor - 2)
        places = range(anchor + 1, anchor + 1 + room)
        kept = [next((n for n, p in enumerate(places) if p % step == 0), room) for step in (5, 3)]
        accepted.append(kept[0])
        bare.append(kept[1])
        changed.append(any((p % 3 == 0) != (p % 5 == 0) for p in range(anchor + 1, anchor + 4)))
        anchor += kept[0] + 1
    assert record.accepted == accepted
    assert record.bare_accepted == bare
    assert record.changed == changed
    assert record.sweeps_until_stable == [int(one) for one in changed]
    assert record.agreement.equal
    refiner = summarize([record], "float32")[0]["refiner"]
    assert refiner["helped"] == sum(a > b for a, b in zip(accepted, bare, strict=True)) / len(accepted)
    assert refiner["hurt"] == sum(a < b for a, b in zip(accepted, bare, strict=True)) / len(accepted) > 0
    assert refiner["bare_draft"] == 1 + sum(bare) / len(bare)


@pytest.mark.parametrize("loop", ["stock", "own"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_watching_changes_nothing(loop, temperature):
    target, drafter = random_pair()
    drafter.speculation.loop = loop
    evaluator = Evaluator(target, WordIds(), drafter, EvaluationSettings(30, (temperature,)))
    record = evaluator.run(prompts("3 4 5"))[0]
    assert not {"draft_block"} & set(vars(drafter))
    torch.manual_seed(evaluator_module.stream_seed(prompts("3 4 5")[0].prompts[0], 0, 0))
    options = {"do_sample": True, "top_k": 0} if temperature else {"do_sample": False}
    target.generate(torch.tensor([[3, 4, 5]]), assistant_model=drafter, max_new_tokens=30, **options)
    assert (record.accepted, record.verified) == (drafter.last_acceptance.accepted, drafter.last_acceptance.verified)
    assert len(record.changed) == len(record.accepted) > 0
    assert (record.bare_accepted is None) == bool(temperature)


@pytest.mark.parametrize("loop", ["stock", "own"])
@pytest.mark.parametrize("sweeps", [0, 2])
def test_one_number_everywhere(loop, sweeps, tmp_path):
    """Evaluator, `last_acceptance`, replay (the trainer's), metric and file, on answers that end and that are cut."""
    target, drafter = half_oracle_pair(80)
    # An end id that the texts reach: cycles behind it must be counted alike.
    target.generation_config.eos_token_id = drafter.continuation[30]
    drafter.speculation.loop, drafter.speculation.sweeps = loop, sweeps
    sets = prompts("3 4 5", "3 4 5 " + " ".join(map(str, drafter.continuation[3:6])))
    settings = EvaluationSettings(60)
    records = Evaluator(target, WordIds(), drafter, settings).run(sets, tmp_path / "rows.jsonl")
    parts, replayed, latest = Target.for_drafter(target, drafter.config), [], []
    for item in sets[0].prompts:
        ids = torch.tensor([[int(one) for one in item.turns[0].split()]])
        text = target.generate(ids, assistant_model=drafter, max_new_tokens=60, do_sample=False)[0]
        latest.append(drafter.last_acceptance)
        states = target(text[None], output_hidden_states=True).hidden_states
        context = taps(states, drafter.config.target_layer_ids, 3)[0]
        replayed.append(replay(parts, drafter, text, ids.shape[1], context, end_ids(target)))
    assert latest == replayed == [record.acceptance for record in records]
    metric = evaluate.load(str(METRIC_FOLDER), cache_dir=str(tmp_path))
    metric.add_batch(predictions=[one.accepted for one in records], references=[one.verified for one in records])
    found = metric.compute(num_draft_tokens=3)
    expected = acceptance_figures(latest)
    assert {name: found[name] for name in expected} == expected
    assert "bonus token counts" in found["definitions"]["acceptance_length"]
    stored = read_records(tmp_path / "rows.jsonl")[1]
    assert pool(stored) == pool(records)
    assert sum(pool(stored).accepted) > 0


def test_pooled_over_cycles_is_not_the_mean_over_answers():
    records = [AcceptanceRecord(3, [3] * 9, [3] * 9), AcceptanceRecord(3, [0], [2]), AcceptanceRecord(3)]
    figures = acceptance_figures(records)
    assert figures["acceptance_length"] == 1 + 27 / 10
    assert figures["acceptance_length_prompt_mean"] == (4 + 1) / 2
    assert figures["ceiling_share"] == 1.0
    assert figures["num_answers"] == 3


def test_two_processes_merged_by_the_metric_equal_one(tmp_path):
    rows = [([3, 1, 0], [3, 3, 3]), ([2], [2]), ([], []), ([0, 0, 3, 1], [3, 3, 3, 1])]

    def load(**options):
        return evaluate.load(str(METRIC_FOLDER), cache_dir=str(tmp_path), **options)

    def run(rank: int) -> dict | None:
        metric = load(num_process=2, process_id=rank, experiment_id="two")
        mine = rows[rank::2]
        metric.add_batch(predictions=[one[0] for one in mine], references=[one[1] for one in mine])
        return metric.compute(num_draft_tokens=3)

    # Both wait for each other, as processes do.
    with ThreadPoolExecutor(2) as pool_of_two:
        merged, other = pool_of_two.map(run, range(2))
    assert other is None
    alone = load()
    alone.add_batch(predictions=[one[0] for one in rows], references=[one[1] for one in rows])
    assert merged == alone.compute(num_draft_tokens=3)
    assert merged["acceptance_length"] == 1 + 10 / 8


def test_a_metric_of_impossible_counts_is_refused(tmp_path):
    metric = evaluate.load(str(METRIC_FOLDER), cache_dir=str(tmp_path))
    metric.add_batch(predictions=[[4]], references=[[4]])
    with pytest.raises(ValueError, match="violated by 4, 4"):
        metric.compute(num_draft_tokens=3)


def chat_pair():
    tokenizer = build_tokenizer(CHATML)
    target = build_target(vocab_size=len(tokenizer), factor=3.0)
    drafter = build_drafter(vocab_size=len(tokenizer), mask_token_id=3, block_size=4, factor=3.0)
    return target, tokenizer, drafter


def test_an_interrupted_run_gives_the_file_of_an_uninterrupted_one(tmp_path):
    target, tokenizer, drafter = chat_pair()
    settings = EvaluationSettings(12, (0.0, 1.0), (0, 5))
    sets = prompts("one two", "three", "the rain", turns=2)
    whole = Evaluator(target, tokenizer, drafter, settings).run(sets, tmp_path / "whole.jsonl")
    assert len(whole) == 3 * 2 * 3 == Evaluator(target, tokenizer, drafter, settings).num_answers(sets)

    def interrupt(count):
        interrupt.count += count
        # Between the two turns of a sampled chat.
        if interrupt.count == 9:
            raise KeyboardInterrupt

    interrupt.count = 0
    path = tmp_path / "parts.jsonl"
    with pytest.raises(KeyboardInterrupt):
        Evaluator(target, tokenizer, drafter, settings).run(sets, path, interrupt)
    assert len(read_records(path)[1]) == 9
    path.write_bytes(path.read_bytes() + b'{"kind": "pro')
    found = Evaluator(target, tokenizer, drafter, settings).run(sets, path)
    assert found == whole
    assert summarize(read_records(path)[1], "float32") == summarize(whole, "float32")
    # Seeds make other answers, temperatures too; the same seed makes the same.
    lengths = {(one.temperature, one.seed): one.accepted for one in whole if one.id == "p/0" and one.turn == 0}
    assert len({tuple(one) for one in lengths.values()}) > 1


def test_more_prompts_go_on_in_the_same_file_and_other_settings_do_not(tmp_path):
    target, tokenizer, drafter = chat_pair()
    path, sets = tmp_path / "rows.jsonl", prompts("one two", "three")
    first = Evaluator(target, tokenizer, drafter, EvaluationSettings(8))
    first.run([dataclasses.replace(sets[0], prompts=sets[0].prompts[:1])], path)
    assert len(first.run(sets, path)) == 2
    with pytest.raises(ValueError, match="`max_new_tokens` 8 there, 9 now"):
        Evaluator(target, tokenizer, drafter, EvaluationSettings(9)).run(sets, path)
    drafter.speculation.sweeps = 1
    with pytest.raises(ValueError, match="`speculation`"):
        Evaluator(target, tokenizer, drafter, EvaluationSettings(8)).run(sets, path)


def test_the_second_turn_reads_the_models_own_answer():
    target, tokenizer, drafter = chat_pair()
    evaluator = Evaluator(target, tokenizer, drafter, EvaluationSettings(10))
    asked = []
    original = evaluator._generate
    evaluator._generate = lambda ids, *rest: asked.append(ids) or original(ids, *rest)
    evaluator.run(prompts("one two", turns=2))
    answer = plain(target, asked[0], max_new_tokens=10)[0, asked[0].shape[1] :]
    words = tokenizer.decode(answer, skip_special_tokens=True)
    # Each turn with the drafter and plain.
    assert len(asked) == 4
    chat = [("user", "one two"), ("assistant", words), ("user", "one two")]
    expected = tokenizer.apply_chat_template(
        [{"role": role, "content": text} for role, text in chat], add_generation_prompt=True, tokenize=False
    )
    assert tokenizer.decode(asked[2][0]) == expected


def test_prompts_longer_than_the_context():
    target, drafter = half_oracle_pair()
    target.config.max_position_embeddings = 20
    long = " ".join(["3"] * 15)
    with pytest.raises(ValueError, match=r"p/1: 15 tokens of prompt and `max_new_tokens`=6 .* the 20 places"):
        Evaluator(target, WordIds(), drafter, EvaluationSettings(6)).run(prompts("3 4 5", long))
    evaluator = Evaluator(target, WordIds(), drafter, EvaluationSettings(6))
    records = evaluator.run(prompts("3 4 5 6 7", turns=2))
    assert len(records) == 1
    assert evaluator.skipped == ["p/0, turn 1: 16 tokens of conversation"]


def test_answers_without_a_cycle():
    target, drafter = half_oracle_pair()
    target.generation_config.eos_token_id = drafter.continuation[3]
    records = Evaluator(target, WordIds(), drafter, EvaluationSettings(6)).run(prompts("3 4 5"))
    assert (records[0].new_tokens, records[0].accepted) == (1, [])
    group = summarize(records, "float32")[0]
    assert group["acceptance_length"] is None
    assert group["intervals"]["acceptance_length"] is None
    assert group["expansion"] is None
    json.dumps(group, allow_nan=False)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"max_new_tokens": 0}, "`max_new_tokens` must be >= 1, got 0"),
        ({"temperatures": (-1.0,)}, "`temperatures`"),
        ({"seeds": ()}, "`seeds`"),
        ({"seeds": (1, 1)}, "`seeds`"),
    ],
)
def test_bad_settings(values, reason):
    with pytest.raises(ValueError, match=reason):
        EvaluationSettings(**values)


def test_another_text_than_plain_is_counted():
    """A drafter that broke the promise: half of the answers differ beyond a tie."""
    target, drafter = half_oracle_pair()
    evaluator = Evaluator(target, WordIds(), drafter, EvaluationSettings(20))
    original = evaluator._generate

    def spoiled(ids, temperature, assistant):
        text = original(ids, temperature, assistant)
        if assistant is not None and ids.shape[1] == 3:
            text[10] = (text[10] + 1) % VOCAB
        return text

    evaluator._generate = spoiled
    records = evaluator.run(prompts("3 4 5", "3 4 5 6"))
    assert summarize(records, "float32")[0]["agreement"] == {"equal": 1, "near_tie": 0, "other": 1}
    assert records[0].agreement.position == 7
