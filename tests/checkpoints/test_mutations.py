"""200 seeded mutations of checkpoint folders, and 100 of the reference implementations' own folders where these are at
hand: a clear error, or a drafter that computes what the original does."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints.foreign import (
    ADAFLASH,
    DEEPSPEC,
    DFLARE,
    DFLASH,
    LENGTH_HEAD,
    SERVING,
    SERVING_HEAD,
    SPECULATORS_HEAD,
    SPECULATORS_XPRESS,
    TARGETS_OWN,
    ZLAB,
    values,
    write,
)
from tests.conftest import build_drafter, fuzz_seeds
from xpress_hf import XPressDrafter

BASES = {
    "zlab": (ZLAB, DFLASH),
    "dflare": (ZLAB, DFLARE),
    "serving": (SERVING, {**DFLASH, **SERVING_HEAD}),
    "speculators": (SPECULATORS_XPRESS, {**DFLASH, **SPECULATORS_HEAD}),
    "adaflash": (ADAFLASH, {**DFLASH, **LENGTH_HEAD}),
    "deepspec": (DEEPSPEC, {**DFLASH, **TARGETS_OWN}),
    "own": (None, None),
}
# Sizes that the tensors can contradict. Other numbers (norm epsilon, rotary base, taps) are the config's alone.
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)
GARBAGE = ("x", [], {}, -1, [1, "x"], {"a": 1})


def build(base: str, folder: Path) -> None:
    config, shapes = BASES[base]
    if config is None:
        build_drafter().save_pretrained(folder)
    else:
        write(folder, config, values(shapes))


def change_tensors(folder: Path, change: Callable[[dict], dict]) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({key: value.contiguous() for key, value in change(tensors).items()}, folder / "model.safetensors")


def places(config: dict) -> list[tuple[dict, str]]:
    """Every field, nested ones included."""
    found = [(config, key) for key in config]
    for value in config.values():
        if isinstance(value, dict):
            found += places(value)
    return found


def change_config(folder: Path, change: Callable[[dict], None]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def truncate(folder: Path, draw: random.Random) -> None:
    path = folder / draw.choice(["model.safetensors", "config.json"])
    content = path.read_bytes()
    path.write_bytes(content[: draw.randrange(len(content))])


def flip_header(folder: Path, draw: random.Random) -> None:
    """One byte of the header; in our own layout any byte, since values are hashed there."""
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    length = 8 + int.from_bytes(content[:8], "little")
    place = draw.randrange(len(content) if (folder / "tensor_hashes.json").exists() else length)
    content[place] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def drop_tensor(folder: Path, draw: random.Random) -> None:
    def change(tensors: dict) -> dict:
        gone = draw.choice(sorted(tensors))
        return {key: value for key, value in tensors.items() if key != gone}

    change_tensors(folder, change)


def rename_tensor(folder: Path, draw: random.Random) -> None:
    def change(tensors: dict) -> dict:
        old = draw.choice(sorted(tensors))
        new = draw.choice([old + "s", old.replace("weight", "bias"), "layers.7." + old, old.upper(), "x." + old])
        return {new if key == old else key: value for key, value in tensors.items()}

    change_tensors(folder, change)


def add_tensor(folder: Path, draw: random.Random) -> None:
    name = draw.choice(["extra", "layers.2.norm.weight", "embed_tokens.weight", "head.bias", "refiner.extra", "d2t"])
    change_tensors(folder, lambda tensors: {**tensors, name: torch.ones(2, 2)})


def reshape_tensor(folder: Path, draw: random.Random) -> None:
    def change(tensors: dict) -> dict:
        name = draw.choice(sorted(tensors))
        value = tensors[name]
        shapes = [
            value[:-1],
            value.flatten(),
            value[None],
            value.repeat(2, *[1] * (value.ndim - 1)),
            value.reshape(-1, 1),
        ]
        return {**tensors, name: draw.choice([shape for shape in shapes if shape.shape != value.shape])}

    change_tensors(folder, change)


def spoil_values(folder: Path, draw: random.Random) -> None:
    def change(tensors: dict) -> dict:
        name = draw.choice(sorted(tensors))
        spoiled = [tensors[name].to(torch.int32), torch.full_like(tensors[name], torch.nan)]
        return {**tensors, name: draw.choice(spoiled)}

    change_tensors(folder, change)


def drop_field(folder: Path, draw: random.Random) -> None:
    def change(config: dict) -> None:
        place, key = draw.choice(places(config))
        del place[key]

    change_config(folder, change)


def spoil_field(folder: Path, draw: random.Random) -> None:
    def change(config: dict) -> None:
        place, key = draw.choice(places(config))
        place[key] = draw.choice(GARBAGE)

    change_config(folder, change)


def contradict(folder: Path, draw: random.Random) -> None:
    def change(config: dict) -> None:
        sizes = [(place, key) for place, key in places(config) if key in SIZES]
        place, key = draw.choice(sizes)
        place[key] = draw.choice([place[key] * 2, place[key] + 1, place[key] - 1, 0, 2**40, str(place[key])])

    change_config(folder, change)


def add_field(folder: Path, draw: random.Random) -> None:
    change_config(
        folder, lambda config: config.update({draw.choice(["note", "blok_size", "x"]): draw.choice(GARBAGE)})
    )


def replace_json(folder: Path, draw: random.Random) -> None:
    (folder / "config.json").write_text(draw.choice(["", "[]", "null", "{}", '"text"', "{'a': 1}", "[" * 5000]))


def index_beside(folder: Path, draw: random.Random) -> None:
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    name = draw.choice(["part.safetensors", "gone.safetensors", "../part.safetensors", "", "part"])
    index = draw.choice([{"weight_map": {"fc.weight": name}}, {"weight_map": name}, [name]])
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


MUTATIONS = (
    truncate,
    flip_header,
    drop_tensor,
    rename_tensor,
    add_tensor,
    reshape_tensor,
    spoil_values,
    drop_field,
    spoil_field,
    contradict,
    add_field,
    replace_json,
    index_beside,
)


@torch.no_grad()
def computed(drafter: XPressDrafter) -> list:
    """What the drafter gives for fixed inputs, and how its block is read."""
    draw, config = torch.Generator().manual_seed(0), drafter.config
    width = len(config.target_layer_ids) * config.target_hidden_size
    hidden = drafter(
        noise_embeds=torch.randn(1, config.block_size, config.hidden_size, generator=draw),
        context_hidden_states=torch.randn(1, 5, width, generator=draw),
        position_ids=torch.arange(5 + config.block_size)[None],
    ).last_hidden_state
    found = [hidden]
    if drafter.refiner is not None:
        state = drafter.refiner.begin(hidden)
        found.append(drafter.refiner.bias(state, torch.arange(config.block_size)[None]))
    if drafter.length_head is not None:
        found.append(drafter.length_head(hidden))
    return [*found, config.slot_layout, config.mask_token_id, config.target_layer_ids, config.block_size]


def equal(one: list, two: list) -> bool:
    return len(one) == len(two) and all(
        torch.allclose(a, b, atol=1e-4, rtol=1e-5) if isinstance(a, torch.Tensor) else a == b
        for a, b in zip(one, two, strict=True)
    )


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    found = {}
    for base in BASES:
        folder = tmp_path_factory.mktemp(base)
        build(base, folder)
        found[base] = computed(XPressDrafter.from_pretrained(folder))
    return found


def check(folder: Path, mutation: Callable, draw: random.Random, expected: list) -> None:
    mutation(folder, draw)
    try:
        drafter = XPressDrafter.from_pretrained(folder)
    except (ValueError, OSError) as error:
        drafter, message = None, str(error)
    if drafter is None:
        assert len(message) > 30, message
    else:
        assert equal(computed(drafter), expected), f"{mutation.__name__} gives something else"


@pytest.mark.parametrize("seed", fuzz_seeds(200))
def test_a_mutated_checkpoint(tmp_path, originals, seed):
    draw = random.Random(seed)
    base = draw.choice(sorted(BASES))
    build(base, tmp_path)
    check(tmp_path, MUTATIONS[seed % len(MUTATIONS)], draw, originals[base])


REFERENCES = (
    "dflash_forward/checkpoint",
    "dflare_forward/checkpoint",
    "adaflash_head/checkpoint",
    "xpress_checkpoint/serving",
    "xpress_checkpoint/speculators",
)


@pytest.mark.parametrize("seed", fuzz_seeds(100))
def test_a_mutated_reference_checkpoint(tmp_path, golden, seed):
    draw = random.Random(seed)
    source = golden / draw.choice(REFERENCES)
    for path in source.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    check(tmp_path, MUTATIONS[seed % len(MUTATIONS)], draw, computed(XPressDrafter.from_pretrained(source)))


def test_the_comparison_can_fail(tmp_path, originals):
    """Values that no file of hashes guards are taken as they are, and show in the outputs."""
    build("zlab", tmp_path)
    change_tensors(tmp_path, lambda tensors: {**tensors, "norm.weight": tensors["norm.weight"] * 2})
    assert not equal(computed(XPressDrafter.from_pretrained(tmp_path)), originals["zlab"])
