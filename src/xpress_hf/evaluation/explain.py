"""Why acceptance is low: what an expert would check, each by replaying the same answers with one thing changed."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..decoding.acceptance import AcceptanceRecord
from ..decoding.target import Target
from ..fingerprint import weights_hash
from ..modeling.drafter import XPressDrafter
from ..modeling.rebuilding import rebuild
from .bootstrap import bootstrap, pooled_ratio_difference
from .prompts import BenchmarkPrompt, encode_prompt
from .replay import end_ids, replay

# A change that gives less than this share of the acceptance length explains nothing.
LEAST_GAIN = 0.05
# Context rows that are left in the check of long contexts.
SHORT_CONTEXT = 256

SUSPECT, FINE, UNKNOWN = "suspect", "fine", "not checked"


@dataclass(frozen=True)
class Finding:
    """One check. acceptance_length: of the bare drafter with the change; `None` where nothing was replayed."""

    check: str
    measured: str
    verdict: str
    advice: str
    acceptance_length: float | None = None


@dataclass(frozen=True)
class Answer:
    """A greedy answer of the target: [S] ids with the prompt, and outputs [S, H] of the decoder layers read here."""

    ids: torch.Tensor
    prompt_length: int
    states: dict[int, torch.Tensor]

    def context(self, layers: Sequence[int]) -> torch.Tensor:
        return torch.cat([self.states[layer] for layer in layers], dim=-1)


@dataclass(frozen=True)
class Variant:
    """One thing changed: how the drafter is rebuilt, and from where it reads."""

    check: str
    label: str
    advice: str
    build: Callable[[XPressDrafter], XPressDrafter] = lambda drafter: drafter
    layers: list[int] | None = None
    embedding_scale: float | None = None
    context_rows: int | None = None


@dataclass
class Explainer:
    """Measures the bare drafter on a few answers, as it is and with one thing changed.

    Args:
        target, tokenizer, drafter: the pair under test.
        prompts: their first turns are answered greedily.
        max_new_tokens: longest answer.
        chat_template_kwargs: switches of the chat template that are in use.
    """

    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    drafter: XPressDrafter
    prompts: Sequence[BenchmarkPrompt]
    max_new_tokens: int = 128
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)

    def run(self, on_check: Callable[[str], None] = lambda name: None) -> list[Finding]:
        """All checks; `on_check` is called with the name of each replay before it."""
        on_check("answers")
        answers = self._answers(self.chat_template_kwargs)
        on_check("as it is")
        self.baseline = self._replay(self.drafter, answers)
        findings = [self._of_refiner(answers)]
        for variant in self._variants(answers):
            on_check(variant.label)
            findings.append(self._of_variant(variant, answers))
        for name, label, options, advice in self._prompts_changed():
            on_check(label)
            records = self._replay(self.drafter, self._answers(**options))
            findings.append(self._compared(name, label, advice, records))
        return [*findings, self._of_dtype(), self._of_quantisation(), *self._of_training_facts()]

    @property
    def layers(self) -> list[int]:
        return self.drafter.config.target_layer_ids

    @property
    def num_layers(self) -> int:
        return self.target.config.get_text_config().num_hidden_layers

    def _shifted(self, by: int) -> list[int] | None:
        """Taps moved by a layer, `None` where one would leave the layers that can be read."""
        layers = [layer + by for layer in self.layers]
        return layers if min(layers) >= 0 and max(layers) < self.num_layers - 1 else None

    @torch.no_grad()
    def _answers(self, chat_template_kwargs: dict[str, Any] | None, template: bool = True) -> list[Answer]:
        wanted = sorted({layer for by in (-1, 0, 1) for layer in self._shifted(by) or []})
        answers = []
        for prompt in self.prompts:
            if template:
                ids = encode_prompt(self.tokenizer, prompt.turns[0], self.target.device, chat_template_kwargs)
            else:
                ids = self.tokenizer(prompt.turns[0], return_tensors="pt")["input_ids"].to(self.target.device)
            options: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
            text = self.target.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=self.max_new_tokens, **options
            )
            states = self.target(input_ids=text, output_hidden_states=True, use_cache=False).hidden_states
            kept = {layer: states[layer + 1][0].cpu() for layer in wanted}
            answers.append(Answer(text[0].cpu(), ids.shape[1], kept))
        return answers

    def _replay(
        self, drafter: XPressDrafter, answers: Sequence[Answer], sweeps: int = 0, variant: Variant | None = None
    ) -> list[AcceptanceRecord]:
        """Records of a drafter on answers, one each."""
        scale = (self.drafter.config.target or {}).get("embedding_scale")
        if variant is not None and variant.embedding_scale is not None:
            scale = variant.embedding_scale
        layers = self.layers if variant is None or variant.layers is None else variant.layers
        rows = None if variant is None else variant.context_rows
        target, ends, before = Target(self.target, scale), end_ids(self.target), drafter.speculation.sweeps
        drafter.speculation.sweeps = sweeps
        records = []
        try:
            for answer in answers:
                cut = 0 if rows is None else max(answer.prompt_length - rows, 0)
                context = answer.context(layers)[cut:]
                records.append(replay(target, drafter, answer.ids[cut:], answer.prompt_length - cut, context, ends))
        finally:
            drafter.speculation.sweeps = before
        return records

    def _of_variant(self, variant: Variant, answers: Sequence[Answer]) -> Finding:
        records = self._replay(variant.build(self.drafter), answers, variant=variant)
        return self._compared(variant.check, variant.label, variant.advice, records)

    def _compared(self, check: str, label: str, advice: str, records: Sequence[AcceptanceRecord]) -> Finding:
        """Suspect where the change gives more, beyond what the choice of prompts explains."""
        before, after = (sum(some[1:], start=some[0]) for some in (self.baseline, records))
        if not (before.num_cycles and after.num_cycles):
            return Finding(check, f"{label}: no cycle", UNKNOWN, "Measure on longer answers.")
        table = np.array(
            [
                [sum(new.accepted), new.num_cycles, sum(old.accepted), old.num_cycles]
                for new, old in zip(records, self.baseline, strict=True)
            ]
        )
        found = bootstrap(table, pooled_ratio_difference)
        length = after.acceptance_length
        is_suspect = found.low > 0 and found.value >= LEAST_GAIN * before.acceptance_length
        measured = f"{label}: {length:.3f} against {before.acceptance_length:.3f}"
        return Finding(check, measured, SUSPECT if is_suspect else FINE, advice if is_suspect else "", length)

    def _variants(self, answers: Sequence[Answer]) -> Iterator[Variant]:
        yield from self._tap_variants()
        yield from self._mask_variants()
        config = self.drafter.config
        if config.sliding_window:
            kind = "full_attention" if "sliding_attention" in config.layer_types else "sliding_attention"
            advice = f"The drafter seems to have been trained with {kind} in all layers: correct `layer_types`."
            build = rebuilt(layer_types=[kind] * config.num_hidden_layers)
            yield Variant("sliding layers", f"all layers {kind}", advice, build)
        if self.drafter.dtype != torch.float32:
            advice = "The drafter suffers from half precision: load it with `dtype=torch.float32`."
            yield Variant("dtype", "drafter in float32", advice, lambda drafter: copy.deepcopy(drafter).float())
        other = "bidirectional" if set(config.block_attention_per_layer) == {"causal"} else "causal"
        advice = f"The drafter seems to have been trained with {other} blocks: correct `block_attention`."
        yield Variant("attention in the block", other, advice, rebuilt(block_attention=other))
        if config.min_visible_prefix == 1:
            layout = "shift" if config.slot_layout == "fill" else "fill"
            advice = f"The drafter seems to have been trained in the {layout} layout: correct `slot_layout`."
            yield Variant("slot layout", layout, advice, rebuilt(slot_layout=layout))
        used = Target.for_drafter(self.target, config).embedding_scale
        scale = 1.0 if used != 1.0 else math.sqrt(config.hidden_size)
        advice = f"Set `target.embedding_scale` in the drafter's config to {scale:g}."
        yield Variant("embedding scale", f"factor {scale:g} in place of {used:g}", advice, embedding_scale=scale)
        if max(answer.prompt_length for answer in answers) > SHORT_CONTEXT:
            advice = (
                "The drafter does worse with the whole context than with its end: train it on texts as long as yours, "
                "or give it sliding layers."
            )
            label = f"last {SHORT_CONTEXT} tokens of each prompt alone"
            yield Variant("long context", label, advice, context_rows=SHORT_CONTEXT)

    def _tap_variants(self) -> Iterator[Variant]:
        for by in (-1, 1):
            if (layers := self._shifted(by)) is None:
                continue
            advice = (
                f"The drafter reads better at {layers}: its stored ids count from another layer. Correct "
                "`target_layer_ids`, or pass `tap_offset` when you load the original."
            )
            yield Variant("taps off by one", f"taps {by:+d} ({layers})", advice, layers=layers)

    def _mask_variants(self) -> Iterator[Variant]:
        used, rows = self.drafter.config.mask_token_id, self.target.get_input_embeddings().num_embeddings
        ids = {
            "tokenizer's mask token": getattr(self.tokenizer, "mask_token_id", None),
            "first unused row": len(self.tokenizer),
            "padding token": getattr(self.tokenizer, "pad_token_id", None),
            "end of text": getattr(self.tokenizer, "eos_token_id", None),
            "last row": rows - 1,
        }
        seen = {used}
        for name, value in ids.items():
            if value is None or value >= rows or value in seen:
                continue
            seen.add(value)
            advice = f"The drafter was probably trained with mask id {value}: correct `mask_token_id` in its config."
            yield Variant("mask id", f"{name} ({value}) in place of {used}", advice, rebuilt(mask_token_id=value))

    def _prompts_changed(self) -> Iterator[tuple[str, str, dict[str, Any], str]]:
        """Changes that give other answers: (check, label, arguments of `_answers`, advice)."""
        template = self.tokenizer.chat_template
        if template is None:
            return
        if "enable_thinking" in str(template):
            value = not self.chat_template_kwargs.get("enable_thinking", True)
            kwargs = {**self.chat_template_kwargs, "enable_thinking": value}
            switch = json.dumps({"enable_thinking": value})
            advice = (
                f"The drafter knows answers with enable_thinking={value}: serve it with `--chat-template-kwargs "
                f"'{switch}'`, or train it on the other ones."
            )
            yield "thinking switch", f"enable_thinking={value}", {"chat_template_kwargs": kwargs}, advice
        advice = "The drafter knows texts without a chat template: train it on answers in the template you serve."
        yield "template", "no chat template", {"chat_template_kwargs": None, "template": False}, advice

    def _of_refiner(self, answers: Sequence[Answer]) -> Finding:
        if not self.drafter.num_sweeps:
            return Finding("refiner", "no sweeps are run", UNKNOWN, "")
        refined = self._replay(self.drafter, answers, self.drafter.num_sweeps)
        before, after = (sum(some[1:], start=some[0]) for some in (self.baseline, refined))
        measured = (
            f"{after.acceptance_length:.3f} with {self.drafter.num_sweeps} sweeps, {before.acceptance_length:.3f} bare"
        )
        hurts = after.acceptance_length < before.acceptance_length
        advice = "The refiner takes tokens away: run with `--sweeps 0`, or train it on." if hurts else ""
        return Finding("refiner", measured, SUSPECT if hurts else FINE, advice, after.acceptance_length)

    def _of_dtype(self) -> Finding:
        trained = (self.drafter.config.target or {}).get("dtype")
        live = str(self.target.dtype).removeprefix("torch.")
        measured = f"target {live}, drafter {str(self.drafter.dtype).removeprefix('torch.')}, trained with {trained}"
        if trained is None:
            return Finding("dtype", measured, UNKNOWN, "The drafter's config does not name the dtype of its target.")
        if trained == live:
            return Finding("dtype", measured, FINE, "")
        return Finding("dtype", measured, SUSPECT, f"Run the same command with `--dtype {trained}` and compare.")

    def _of_quantisation(self) -> Finding:
        found = getattr(self.target.config, "quantization_config", None)
        is_packed = any(not one.is_floating_point() for one in self.target.parameters())
        if found is None and not is_packed:
            return Finding("quantised target", "weights are not quantised", FINE, "")
        method = getattr(found, "quant_method", None) or "packed weights"
        advice = "Hidden states differ from those it learned from: compare with the target in bfloat16, or train on."
        return Finding("quantised target", f"quantised ({method})", SUSPECT, advice)

    def _of_training_facts(self) -> Iterator[Finding]:
        """What the drafter's config says about its target, against the target at hand."""
        facts = self.drafter.config.target or {}
        live = {
            "revision": getattr(self.target.config, "_commit_hash", None),
            "weights_hash": weights_hash(self.target),
            "chat_template_kwargs": self.chat_template_kwargs,
        }
        for name in live:
            check = "template" if name == "chat_template_kwargs" else "target revision"
            known, measured = facts.get(name), f"{name} {live[name]}, trained with {facts.get(name)}"
            if known is None or live[name] is None:
                yield Finding(check, measured, UNKNOWN, f"One side does not say its `{name}`.")
            elif known == live[name]:
                yield Finding(check, measured, FINE, "")
            else:
                yield Finding(check, measured, SUSPECT, f"Use the `{name}` that the drafter was trained with.")


def rebuilt(**changes: Any) -> Callable[[XPressDrafter], XPressDrafter]:
    """Copies a drafter with fields of its config changed."""
    return lambda drafter: rebuild(drafter, **copy.deepcopy(changes)).eval()


def print_findings(findings: Sequence[Finding], console: Console) -> None:
    """One line per check, what to do below the suspects."""
    table = Table(title="acceptance length of the bare drafter on the same answers, one thing changed at a time")
    for name in ("check", "measured", "verdict"):
        table.add_column(name, overflow="fold")
    for finding in findings:
        table.add_row(finding.check, finding.measured, finding.verdict)
    console.print(table, markup=False)
    suspects = [finding for finding in findings if finding.verdict == SUSPECT]
    for finding in suspects:
        console.print(f"{finding.check}: {finding.advice}", highlight=False, markup=False)
    if not suspects:
        console.print("no change gives more than what is set: nothing here explains a low acceptance", highlight=False)
