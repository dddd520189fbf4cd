"""Cards that are valid whatever is known, and drafters that travel through a Hub on this machine.

Rows of the facts: I2, I4, I5.
"""

import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard, ModelCardData
from typer.testing import CliRunner

from tests.checkpoints.foreign import DFLASH, ZLAB, values, write
from tests.conftest import build_drafter
from tests.stub_hub import TOKEN, Repository, StubHub
from xpress_hf import cli
from xpress_hf.checkpoints.loading import open_checkpoint
from xpress_hf.demo.drafter import DRAFTER_FOLDER
from xpress_hf.hub import CardFacts, hub_id, model_card

CARDS = Path(__file__).parents[1] / "model_cards"
CHECKOUT = Path(__file__).parents[1]


def metadata(card: ModelCard) -> dict:
    """Front matter, parsed by yaml and taken by huggingface_hub; nothing in it is null."""
    found = yaml.safe_load(str(card).split("---")[1])
    assert ModelCardData(**found).to_dict() == found
    assert ModelCard(str(card)).data.to_dict() == found
    for value in found.values():
        assert value not in (None, [], "")
        assert not isinstance(value, list) or None not in value
    return found


TABLE = {"setting": "ten prompts, one CPU", "columns": ["", "all"], "rows": [["refined", "2.53"]]}
KNOWN = {
    "license": "mit",
    "language": ["en"],
    "datasets": ["maker/data"],
    "target": {"id": "maker/target", "revision": "abc"},
    "acceptance": TABLE,
    "speed": {**TABLE, "rows": [["refined", "1.75"]]},
    "limits": "English only.",
    "training": {"recipe": "xpress", "data": "3 texts"},
}


MISSING = [names for count in (0, 1, 2, 8) for names in itertools.combinations(KNOWN, count)]


@pytest.mark.parametrize("missing", MISSING)
def test_a_card_is_valid_whatever_is_missing(missing):
    """I4."""
    facts = CardFacts(**{key: value for key, value in KNOWN.items() if key not in missing})
    card = model_card(build_drafter(), facts, "me/drafter")
    found = metadata(card)
    assert found["library_name"] == "xpress-hf"
    assert found["pipeline_tag"] == "text-generation"
    assert {"speculative-decoding", "xpress", "dflash"} <= set(found["tags"])
    assert ("base_model" in found) == ("base_model_relation" in found) == ("target" not in missing)
    assert ("license" in found) == ("license" not in missing)
    assert ("datasets" in found) == ("datasets" not in missing)
    assert ("2.53" in card.text) == ("acceptance" not in missing)
    assert ("1.75" in card.text) == ("speed" not in missing)
    assert ("Speed was not measured" in card.text) == ("speed" in missing)
    assert ("English only." in card.text) == ("limits" not in missing)
    assert "None" not in card.text
    assert "{{" not in card.text
    assert not re.search(r"\n{3}", card.text)


def test_what_the_checkpoint_says_of_itself_is_on_the_card():
    drafter = build_drafter(target={"name": "maker/target", "revision": "abc"}, length_head={"width": 12})
    card = model_card(drafter, None, "me/drafter")
    assert metadata(card)["base_model"] == "maker/target"
    assert metadata(card)["base_model_relation"] == "adapter"
    assert "adaflash" in metadata(card)["tags"]
    for words in (
        "revision abc",
        "layers 0, 1 (zero-based, of 3)",
        "8 slots, 7 drafts",
        "id 63",
        "rank 8, MLP 16, 2 sweeps",
        "width 12",
        'XPressDrafter.from_pretrained("me/drafter"',
        f"{sum(p.numel() for p in drafter.parameters()) / 1e6:.1f} M",
    ):
        assert words in card.text, words


@pytest.mark.parametrize(
    "name",
    [
        *(None, "", "target", "/models/target", "./target", "../a/b", "a/b/c", "C:\\models", "tests/checkpoints", 3),
        *("a/b..c", "a/b--c", "a/b.git", "a/b-", "a/" + "b" * 97),  # no names on the Hub
    ],
)
def test_a_target_from_disk_is_no_base_model(name, monkeypatch):
    """I4, I5: a Hub id or nothing."""
    monkeypatch.chdir(CHECKOUT)
    assert hub_id(name) is None
    facts = CardFacts(target={"id": name}, datasets=[name, "maker/data"])
    found = metadata(model_card(build_drafter(), facts))
    assert "base_model" not in found
    assert "base_model_relation" not in found
    assert found["datasets"] == ["maker/data"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "no valid JSON"),
        ("[]", "list"),
        ('{"licence": "mit"}', "licence"),
        ('{"target": {"name": "a/b"}}', "name"),
        ('{"target": null}', "target"),
        ('{"speed": {"columns": ["a"], "rows": [["b"]]}}', "setting"),
        ('{"speed": {"columns": ["a"], "rows": [["b", "c"]], "setting": "x"}}', "one cell per column"),
        ('{"speed": {"columns": ["a"], "rows": [1], "setting": "x"}}', "`speed`.*lists"),
        ('{"speed": {"columns": ["a"], "rows": "b", "setting": "x"}}', "`speed`.*lists"),
        ('{"speed": {"columns": 3}}', "`speed`.*lists"),
        ('{"speed": {"setting": 3}}', r"`speed\.setting`.*3"),
        ('{"license": ["mit"]}', r"`license`.*\['mit'\]"),
        ('{"title": 3}', "`title`.*3"),
        ('{"tags": ["a", 3]}', r"`tags\[1\]`.*3"),
        ('{"language": {"en": 1}}', "`language`.*en"),
        ('{"training": {"recipe": 3}}', r"`training\.recipe`.*3"),
        ('{"training": {"commands": [3]}}', r"`training\.commands\[0\]`.*3"),
    ],
)
def test_facts_that_cannot_be_used(tmp_path, text, words):
    (tmp_path / "facts.json").write_text(text)
    with pytest.raises(ValueError, match=words):
        CardFacts.read(tmp_path / "facts.json")


def test_facts_in_another_encoding(tmp_path):
    (tmp_path / "facts.json").write_bytes(b"\xff\xfe{")
    with pytest.raises(ValueError, match=r"facts\.json.*no valid JSON"):
        CardFacts.read(tmp_path / "facts.json")


def test_one_text_stands_for_a_list_of_one():
    """As in the front matter of other cards; null is as good as nothing."""
    facts = CardFacts(language="en", tags="mine", datasets="maker/data", training={"commands": "xpress-hf train"})
    card = model_card(build_drafter(), facts)
    found = metadata(card)
    assert (found["language"], found["datasets"], found["tags"][-1]) == (["en"], ["maker/data"], "mine")
    assert "```bash\nxpress-hf train\n```" in card.text
    empty = CardFacts(language=None, tags=None, datasets=None, license="", training={"commands": None})
    assert metadata(model_card(build_drafter(), empty)) == metadata(model_card(build_drafter()))


def test_text_inside_a_table_stays_in_its_cell():
    facts = CardFacts(
        mask_token="<|MASK|>",
        target={"description": "one\nof | two"},
        acceptance={"setting": "s", "columns": ["a", "b"], "rows": [["x\ny", "p|q"]]},
    )
    lines = model_card(build_drafter(), facts).text.splitlines()
    assert "| mask token | id 63, <\\|MASK\\|> |" in lines
    assert "| target | one of \\| two |" in lines
    assert "| x y | p\\|q |" in lines


def test_the_revision_belongs_to_the_target_that_is_named():
    drafter = build_drafter(target={"name": "maker/target", "revision": "abc"})
    assert 'from_pretrained(name, revision="abc", dtype="auto")' in model_card(drafter).text
    other = model_card(drafter, CardFacts(target={"id": "maker/other"})).text
    assert "abc" not in other
    local = model_card(build_drafter(), CardFacts(target={"id": "/models/target", "revision": "abc"})).text
    assert 'from_pretrained(name, dtype="auto")' in local


def test_the_id_of_the_card_itself_is_checked():
    with pytest.raises(ValueError, match="not an id"):
        model_card(build_drafter(), None, "not an id")


def test_the_card_of_the_demo_drafter_is_written_by_the_tool(tmp_path):
    """The committed card, byte for byte, from the committed facts; no figure is lost on the way."""
    facts = CARDS / "smollm2-135m-instruct-xpress.json"
    arguments = ["card", "demo", "--facts", str(facts), "--output", str(tmp_path / "card.md")]
    outcome = CliRunner().invoke(cli.app, arguments)
    assert outcome.exit_code == 0, outcome.output
    text = (tmp_path / "card.md").read_text()
    assert text == (CARDS / "smollm2-135m-instruct-xpress.md").read_text()
    found = metadata(ModelCard(text))
    assert found["base_model"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert found["license"] == "apache-2.0"
    for figure in json.loads(facts.read_text())["acceptance"]["rows"] + [["1.75", "1.93", "1.61"]]:
        assert all(cell in text for cell in figure)
    assert CliRunner().invoke(cli.app, arguments[:-2]).output == text
    assert model_card(open_checkpoint(DRAFTER_FOLDER)).text != ModelCard(text).text


SESSION = """
import json, os, sys
import torch
from tests.conftest import build_drafter, build_target, prompt
from xpress_hf import DrafterTrainer, DrafterTrainingArguments, XPressDrafter

token, work = sys.argv[1:3]
found = {}

def outcome(name, function):
    try:
        found[name] = function()
    except Exception as error:
        found[name] = f"{type(error).__name__}: {error}"

def loads(repo, reference, **kwargs):
    state = XPressDrafter.from_pretrained(repo, **kwargs).state_dict()
    return all(torch.equal(value, state[key]) for key, value in reference.state_dict().items())

first, second = build_drafter(seed=1), build_drafter(seed=2)
outcome("push", lambda: first.push_to_hub("me/drafter", private=True, token=token, facts={"license": "mit"}))
outcome("no token", lambda: loads("me/drafter", first))
outcome("token", lambda: loads("me/drafter", first, token=token))
outcome("push again", lambda: second.push_to_hub("me/drafter", token=token, max_shard_size=20_000))
outcome("newest", lambda: loads("me/drafter", second, token=token))
commit = found["push"].rsplit("/", 1)[-1]
outcome("revision", lambda: loads("me/drafter", first, token=token, revision=commit))
outcome("unknown revision", lambda: loads("me/drafter", first, token=token, revision="nothing"))
first.generation_config.num_assistant_tokens = 3
outcome("limited", lambda: first.push_to_hub("me/limited", token=token))
first.generation_config.num_assistant_tokens = None
outcome("free again", lambda: first.push_to_hub("me/limited", token=token, tags="mine"))
outcome("branch", lambda: first.push_to_hub("me/drafter", token=token, revision="trial", tags=["mine"]))
outcome("from branch", lambda: loads("me/drafter", first, token=token, revision="trial"))
outcome("local files", lambda: loads("me/drafter", second, token=token, local_files_only=True))
outcome("never fetched", lambda: loads("maker/other", second, local_files_only=True))
outcome("foreign", lambda: XPressDrafter.from_pretrained("maker/zlab").config.block_size)
outcome("saved", lambda: first.save_pretrained(work + "/saved", push_to_hub=True, repo_id="me/saved", token=token))

target = build_target()
target.save_pretrained(work + "/target")
target = type(target).from_pretrained(work + "/target")
arguments = DrafterTrainingArguments(
    output_dir=work + "/run", hub_model_id="me/trained", hub_token=token, report_to=[], use_cpu=True, recipe="xpress"
)
trainer = DrafterTrainer(first, arguments, target)
logged = {"eval_base_acceptance_length": 2.0, "eval_refined_acceptance_length": 2.25, "step": 7}
trainer.state.log_history.append(logged)
outcome("trained", lambda: str(trainer.push_to_hub(language="en", dataset=None, license="mit")))
outcome("from trained", lambda: loads("me/trained", first, token=token))
print("FOUND", json.dumps(found))
"""


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    """What one process finds against the stub, and the stub."""
    work = tmp_path_factory.mktemp("hub")
    write(work / "zlab", ZLAB, values(DFLASH))
    files = {path.name: path.read_bytes() for path in (work / "zlab").iterdir()}
    files |= {"dflash.py": b"raise SystemExit('remote code ran')", "pytorch_model.bin": b"no", "model.pt": b"no"}
    with StubHub() as hub:
        hub.repositories["maker/zlab"] = Repository()
        hub.repositories["maker/zlab"].commit(files)
        environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
        environment |= {
            "HF_ENDPOINT": hub.endpoint,
            "HF_HOME": str(work / "cache"),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "PYTHONPATH": os.pathsep.join([str(CHECKOUT), *sys.path]),
        }
        command = [sys.executable, "-c", SESSION, TOKEN, str(work)]
        outcome = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
        assert outcome.returncode == 0, outcome.stderr[-4000:]
        offline = {**environment, "HF_HUB_OFFLINE": "1"}
        again = "from xpress_hf import XPressDrafter as X; print(X.from_pretrained('maker/zlab').config.block_size)"
        later = subprocess.run([sys.executable, "-c", again], capture_output=True, text=True, env=offline, timeout=300)
    found = json.loads(outcome.stdout.split("FOUND ")[1])
    return {**found, "offline": later.stdout.strip() or later.stderr[-2000:]}, hub


OWN_FILES = {"config.json", "model.safetensors", "tensor_hashes.json", "README.md"}


def test_a_pushed_drafter_holds_what_it_needs(session):
    """I2: nothing borrowed, nothing missing; the card is the template's."""
    found, hub = session
    repository = hub.repositories["me/drafter"]
    files = repository.commits[found["push"].rsplit("/", 1)[-1]]
    assert set(files) == OWN_FILES
    data = metadata(ModelCard(files["README.md"].decode()))
    assert data["license"] == "mit"
    assert "base_model" not in data
    assert "8 slots, 7 drafts" in files["README.md"].decode()
    assert set(hub.repositories["me/saved"].files("main")) == OWN_FILES


def test_private_repositories_need_the_token(session):
    found, hub = session
    assert hub.repositories["me/drafter"].private
    assert found["no token"].startswith("OSError")
    assert "me/drafter" in found["no token"]
    assert found["token"] is True


def test_revisions(session):
    found, _ = session
    assert found["newest"] is True
    assert found["revision"] is True
    assert found["from branch"] is True
    assert found["unknown revision"].startswith("OSError")
    assert "nothing" in found["unknown revision"]


def test_a_second_push_keeps_the_card_and_leaves_no_old_weights(session):
    _, hub = session
    files = hub.repositories["me/drafter"].files("main")
    assert "model.safetensors" not in files
    assert "model.safetensors.index.json" in files
    assert metadata(ModelCard(files["README.md"].decode()))["license"] == "mit"


def test_a_limit_of_drafts_goes_with_the_push_that_drops_it(session):
    found, hub = session
    limited = hub.repositories["me/limited"].commits[found["limited"].rsplit("/", 1)[-1]]
    assert json.loads(limited["generation_config.json"])["num_assistant_tokens"] == 3
    assert set(hub.repositories["me/limited"].files("main")) == OWN_FILES


def test_offline(session):
    found, _ = session
    assert found["local files"] is True
    assert found["never fetched"].startswith("OSError")
    assert found["offline"] == "8"


def test_only_config_and_safetensors_are_asked_for(session):
    found, hub = session
    assert found["foreign"] == 8
    asked = {line.split("/")[-1] for line in hub.requests if "/maker/zlab/resolve/" in line}
    assert {"config.json", "model.safetensors"} <= asked
    assert not [name for name in asked if name.endswith((".py", ".bin", ".pt", ".pkl", ".msgpack", ".h5"))]


def test_the_trainer_pushes_a_drafter(session):
    """I5: the target came from disk, so there is no base model, and the push is one commit."""
    found, hub = session
    assert found["from trained"] is True, found["trained"]
    files = hub.repositories["me/trained"].files("main")
    assert set(files) >= OWN_FILES
    text = files["README.md"].decode()
    data = metadata(ModelCard(text))
    assert "base_model" not in data
    assert (data["license"], data["language"]) == ("mit", ["en"])
    for words in ("| refined | 2.250 |", "| bare | 2.000 |", "at step 7", "Recipe `xpress`", '"me/trained"'):
        assert words in text, words
    assert sum("me/trained/commit" in line for line in hub.requests) == 1
