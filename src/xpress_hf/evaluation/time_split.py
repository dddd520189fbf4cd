"""Where the time of a decode phase goes: drafting, refining, verifying, and everything else."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from ..modeling import drafter as drafter_module
from ..modeling.drafter import XPressDrafter, unwrap_drafter

# Exclusive of each other. draft: backbone, borrowed head and the base choice, or the forwards of another assistant;
# refine: all sweeps; verify: forwards of the target.
PARTS = ("draft", "refine", "verify")


class DecodeClock(BaseStreamer):
    """Times the parts of one `generate()` call by hooks, and counts the cycles of loops that keep no record.

    It listens as a streamer: what happened before the first new token is the prefill and is forgotten. On an
    accelerator every hook waits for the device, so that a part's time is the time of its own kernels.

    Args:
        target: its forwards are `verify`; its output head, where someone else calls it, is `draft`.
        assistant: drafter or causal LM whose forwards are `draft`; `None` where no model drafts.

    Attributes:
        seconds: exclusive seconds by part since the first new token.
        spans: timed spans since then, each of which costs `span_cost_s`.
        first_tokens: new tokens that came with the prefill; more than one where a draft was verified with the prompt.
    """

    def __init__(self, target: PreTrainedModel, assistant: nn.Module | None = None):
        self.target, self.assistant = unwrap_drafter(target), unwrap_drafter(assistant)
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.spans = 0
        self._stack: list[str] = []
        self._since = 0.0
        self._waits = self.target.device.type != "cpu"
        self._inputs: list[int] = []
        self._outputs: list[int] = []

    @contextmanager
    def running(self) -> Iterator[DecodeClock]:
        """Installs the hooks, and takes them off afterwards, also after an error."""
        with ExitStack() as stack:
            self._watch(stack, self.target, lambda: "verify")
            stack.callback(self.target.register_forward_pre_hook(self._note_width, with_kwargs=True).remove)
            if (head := self.target.get_output_embeddings()) is not None:
                self._watch(stack, head, lambda: self._stack[-1] if self._stack else "draft")
            if self.assistant is not None:
                self._watch(stack, self.assistant, lambda: "draft")
            if isinstance(self.assistant, XPressDrafter):
                self._replace(stack, self.assistant, "draft_block", "draft")
                self._replace(stack, drafter_module, "refine_block", "refine")
            yield self

    def put(self, value: torch.Tensor) -> None:
        self._outputs.append(value.numel())
        # The first value is the prompt, the second ends the prefill.
        if len(self._outputs) == 2:
            self.seconds, self.spans = dict.fromkeys(PARTS, 0.0), 0

    def end(self) -> None:
        pass

    @property
    def first_tokens(self) -> int:
        return self._outputs[1]

    def split(self, decode_s: float) -> dict[str, float]:
        """Seconds of a decode phase by part, `rest` included, so that they add up to it."""
        return {**self.seconds, "rest": decode_s - sum(self.seconds.values())}

    def cycles(self) -> tuple[list[int], list[int]]:
        """Drafts kept and drafts verified per cycle, for loops that stream once per forward of the target."""
        prompt_length, *committed = self._outputs
        drafted = [self._inputs[0] - prompt_length, *(width - 1 for width in self._inputs[1:])]
        pairs = [(new - 1, drafts) for new, drafts in zip(committed, drafted, strict=True) if drafts]
        return [kept for kept, _ in pairs], [drafts for _, drafts in pairs]

    def enter(self, part: str) -> None:
        now = self._now()
        if self._stack:
            self.seconds[self._stack[-1]] += now - self._since
        self._stack.append(part)
        self._since = now
        self.spans += 1

    def leave(self) -> None:
        now = self._now()
        self.seconds[self._stack.pop()] += now - self._since
        self._since = now

    def _now(self) -> float:
        if self._waits:
            torch.accelerator.synchronize(self.target.device)
        return time.perf_counter()

    def _note_width(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        self._inputs.append(kwargs["input_ids"].shape[1])

    def _watch(self, stack: ExitStack, module: nn.Module, part: Callable[[], str]) -> None:
        stack.callback(module.register_forward_pre_hook(lambda *_: self.enter(part())).remove)
        stack.callback(module.register_forward_hook(lambda *_: self.leave()).remove)

    def _replace(self, stack: ExitStack, owner: Any, name: str, part: str) -> None:
        """Puts a timed function in the place of `owner.name`."""
        original, was_own = getattr(owner, name), name in vars(owner)

        def timed(*args: Any, **kwargs: Any) -> Any:
            self.enter(part)
            try:
                return original(*args, **kwargs)
            finally:
                self.leave()

        setattr(owner, name, timed)
        if was_own:
            stack.callback(setattr, owner, name, original)
        else:
            stack.callback(delattr, owner, name)


def span_cost_s(target: PreTrainedModel, calls: int = 200, rounds: int = 9) -> float:
    """Seconds that timing one span costs: hooks on a module that does nothing, median over rounds."""
    clock, idle = DecodeClock(target), nn.Identity()

    def round_s() -> float:
        start = time.perf_counter()
        for _ in range(calls):
            idle(None)
        return time.perf_counter() - start

    bare = sorted(round_s() for _ in range(rounds))[rounds // 2]
    with ExitStack() as stack:
        clock._watch(stack, idle, lambda: "verify")
        hooked = sorted(round_s() for _ in range(rounds))[rounds // 2]
    return max(hooked - bare, 0.0) / calls
