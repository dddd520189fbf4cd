"""Arms of a benchmark: ways to answer the same prompt with the same target."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import transformers
from transformers import PreTrainedModel
from transformers.generation import candidate_generator

from ..configuration import SpeculationConfig
from ..modeling.drafter import XPressDrafter

PLAIN, LOOKUP, ASSISTANT, DFLASH, REFINED, BARE, CONTROL = (
    "plain",
    "prompt-lookup",
    "assistant",
    "dflash",
    "refined",
    "bare",
    "control",
)
SWEEPS, DRAFT_LENGTHS, LOOPS = "sweeps", "draft-lengths", "loops"
# What the user may write, and what it means; `field=value` with the fields of `SpeculationConfig` may follow with "+".
MEANINGS = {
    PLAIN: "generate() alone",
    LOOKUP: "drafts copied from the text so far",
    ASSISTANT: "assisted decoding with the causal LM of `--assistant`",
    DFLASH: "the drafter's backbone alone, run by transformers' own block drafting",
    REFINED: "the drafter with its own settings",
    BARE: "the drafter with zero sweeps",
    CONTROL: "the drafter of `--control` with its own settings",
    SWEEPS: "the drafter with 0, 1, ..., D sweeps",
    DRAFT_LENGTHS: "the drafter with 1, 2, 4, ... drafts verified",
    LOOPS: "the drafter in the loop of transformers and in our own",
}
# Common in the literature on prompt lookup.
LOOKUP_TOKENS = 10


@dataclass(frozen=True)
class Arm:
    """One way to answer.

    Args:
        name: as in rows and tables.
        drafter: of ours, run with `speculation`; `None` for arms that transformers runs alone.
        speculation: its settings for this arm.
        options: further arguments of generate().
    """

    name: str
    drafter: XPressDrafter | None = None
    speculation: SpeculationConfig | None = None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """The name without settings."""
        return self.name.partition("+")[0]

    @property
    def assistant(self) -> PreTrainedModel | None:
        """The model that drafts, whoever runs it."""
        return self.drafter or self.options.get("assistant_model")

    def settings(self) -> dict[str, Any]:
        """For the header of a run: how the drafter is run, or the options of generate() that are no models."""
        if self.drafter is None:
            return {key: value for key, value in self.options.items() if isinstance(value, int | str)}
        with self.applied():
            own = self.drafter.speculation
            return {
                **own.to_dict(),
                "sweeps": self.drafter.num_sweeps,
                "draft_length": own.draft_length or self.drafter.config.num_draft_tokens,
                "loop": own.loop or "own",
            }

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The drafter runs with this arm's settings inside, and with its own again afterwards."""
        if self.drafter is None:
            yield
            return
        before, self.drafter.speculation = self.drafter.speculation, self.speculation
        try:
            yield
        finally:
            self.drafter.speculation = before


def default_arms(drafter: XPressDrafter, assistant: bool, control: bool) -> list[str]:
    """What is run where the user names no arms: everything that this pair allows."""
    own = [BARE] if drafter.refiner is None else [BARE, REFINED]
    stock = [DFLASH] if not why_no_stock_dflash(drafter) else []
    return [PLAIN, LOOKUP, *[ASSISTANT] * assistant, *stock, *own, *[CONTROL] * control]


def why_no_stock_dflash(drafter: XPressDrafter) -> str | None:
    """Why transformers' own block drafting cannot run this drafter's backbone; `None` where it can."""
    if not hasattr(candidate_generator, "DFlashTokenCandidateGenerator"):
        return f"transformers {transformers.__version__} has no block drafting of its own"
    if drafter.config.slot_layout != "fill":
        return f"transformers reads `slot_layout`='fill' only, the drafter has {drafter.config.slot_layout!r}"
    return None


def parse_arms(
    words: Iterable[str],
    drafter: XPressDrafter,
    assistant: PreTrainedModel | None = None,
    control: XPressDrafter | None = None,
) -> list[Arm]:
    """Arms by name, `plain` first, each way to run a drafter once.

    Args:
        words: names of `MEANINGS`, with settings added as in `refined+sweeps=3+loop=own`.
        assistant: causal LM for the arm `assistant`. control: drafter for the arm `control`.

    Raises:
        ValueError: an unknown name or setting, or an arm whose model is missing or that this drafter does not allow.
    """
    arms: list[Arm] = [Arm(PLAIN)]
    for word in words:
        name, *settings = word.strip().split("+")
        if name not in MEANINGS:
            raise ValueError(f"`--arms`: unknown arm {name!r}; known arms are {', '.join(MEANINGS)}.")
        if settings and name not in (REFINED, BARE, CONTROL):
            raise ValueError(f"`--arms`: {name!r} takes no settings, got {word!r}; add them to {REFINED!r}.")
        arms += _expand(word.strip(), name, settings, drafter, assistant, control)
    distinct: dict[Any, Arm] = {}
    for arm in arms:
        key = arm.name if arm.drafter is None else (id(arm.drafter), *sorted(arm.settings().items()))
        distinct.setdefault(key, arm)
    return list(distinct.values())


def _expand(
    word: str,
    name: str,
    settings: list[str],
    drafter: XPressDrafter,
    assistant: PreTrainedModel | None,
    control: XPressDrafter | None,
) -> list[Arm]:
    """The arms that one word means."""
    if name == PLAIN:
        return []
    if name == LOOKUP:
        return [Arm(name, options={"prompt_lookup_num_tokens": LOOKUP_TOKENS})]
    if name == ASSISTANT:
        if assistant is None:
            raise ValueError("`--arms`: 'assistant' needs a small causal LM; name one with `--assistant`.")
        return [Arm(name, options={"assistant_model": assistant})]
    if name == DFLASH:
        if reason := why_no_stock_dflash(drafter):
            raise ValueError(f"`--arms`: 'dflash' cannot be run: {reason}; leave it out.")
        return [Arm(name, options={"assistant_model": drafter, "speculation_type": "dflash"})]
    if name == CONTROL and control is None:
        raise ValueError("`--arms`: 'control' needs a second drafter; name one with `--control`.")
    if name in (REFINED, SWEEPS) and drafter.refiner is None:
        raise ValueError(f"`--arms`: {name!r} needs a refiner, and the drafter has none; use {BARE!r}.")
    own = control if name == CONTROL else drafter
    longest = drafter.config.num_draft_tokens
    if name == SWEEPS:
        return [_drafter_arm(f"sweeps={count}", own, [f"sweeps={count}"]) for count in range(longest + 1)]
    if name == DRAFT_LENGTHS:
        lengths = sorted({*(2**power for power in range(longest.bit_length())), longest})
        return [_drafter_arm(f"draft_length={length}", own, [f"draft_length={length}"]) for length in lengths]
    if name == LOOPS:
        return [_drafter_arm(f"loop={loop}", own, [f"loop={loop}"]) for loop in ("stock", "own")]
    return [_drafter_arm(word, own, ["sweeps=0", *settings] if name == BARE else settings)]


def _drafter_arm(name: str, drafter: XPressDrafter, settings: list[str]) -> Arm:
    """A drafter of ours, its own settings changed by `field=value` words."""
    known = {one.name for one in dataclasses.fields(SpeculationConfig)}
    changes: dict[str, Any] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or key not in known:
            raise ValueError(f"`--arms`: {setting!r} in {name!r} must be field=value with a field of {sorted(known)}.")
        changes[key] = _value(value)
    return Arm(name, drafter, dataclasses.replace(drafter.speculation, **changes))


def _value(word: str) -> bool | int | str:
    if word in ("true", "false"):
        return word == "true"
    return int(word) if word.lstrip("-").isdigit() else word
