"""Seconds and memory, taken by the same means in every measurement.

Imports torch alone, so that an interpreter of another project can use it. `Memory`: on a CPU what is resident in the
process (Linux, /proc/self); on a GPU what torch has allocated there. `LiveBytes`: tensor by tensor, exact and the same
on every device, but blind to what kernels allocate inside.
"""

from __future__ import annotations

import ctypes
import json
import time
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Memory:
    """Bytes held now, and the largest value since `watch`."""

    def __init__(self, device: torch.device):
        self.device = device
        if device.type == "cpu":
            # What loading freed goes back to the system, or later peaks would hide in it.
            ctypes.CDLL(None).malloc_trim(0)

    def held(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.memory_allocated(self.device)
        return _resident("VmRSS")

    def watch(self) -> None:
        """Starts anew to look for the largest value."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            return
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")

    def peak(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return _resident("VmHWM")


class LiveBytes(TorchDispatchMode):
    """Bytes of all tensors that operations made while it was active and that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[int, int] = {}
        self._held = self._peak = 0

    def held(self) -> int:
        return self._held

    def watch(self) -> None:
        """Starts anew to look for the largest value."""
        self._peak = self._held

    def peak(self) -> int:
        return self._peak

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {storage._cdata for storage in _storages((args, kwargs))}
        for storage in _storages(result):
            if storage._cdata not in {*given, *self._sizes}:  # no view
                self._sizes[storage._cdata] = storage.nbytes()
                self._held += storage.nbytes()
                weakref.finalize(storage, self._free, storage._cdata)
                self._peak = max(self._peak, self._held)
        return result

    def _free(self, key: int) -> None:
        self._held -= self._sizes.pop(key)


def _storages(values: object) -> list[torch.UntypedStorage]:
    return [value.untyped_storage() for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def _resident(field: str) -> int:
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field))


class StepMeter:
    """One call of `step_done` behind every step; the first step warms up and is not timed."""

    def __init__(self, device: torch.device):
        self.device = device
        self.memory = Memory(device)
        self.seconds: list[float] = []
        self.start: float | None = None

    def begin(self) -> None:
        """Just before the first step: weights are loaded, no gradient and no optimizer state exists."""
        self.baseline = self.memory.held()
        self.memory.watch()

    def step_done(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        if self.start is not None:
            self.seconds.append(now - self.start)
        self.start = now

    def report(self, **more: object) -> None:
        """Prints one line of JSON, the last one of the process."""
        peak = self.memory.peak()
        print(json.dumps({"step_s": self.seconds, "baseline": self.baseline, "peak": peak, **more}), flush=True)
