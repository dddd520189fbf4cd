"""Muon for matrices and AdamW for the rest, as one optimizer that `Trainer` can save and resume."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn


class MuonWithAdamW(torch.optim.Optimizer):
    """Hidden matrices are stepped by `torch.optim.Muon`, everything else (norms, mixers, embedding and readout tables)
    by AdamW. Schedulers see one list of parameter groups.

    Args:
        named_parameters: trainable parameters with names.
        matrix_lr: learning rate of Muon; the root mean square of its updates is that of AdamW.
        lr: learning rate of AdamW.

    Raises:
        ImportError: torch older than 2.9, which has no Muon.
    """

    # Tables indexed by token have rows that are seldom touched; orthogonalising their updates would move all of them.
    TABLES = ("token_embed", "readout")

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        matrix_lr: float,
        lr: float,
        weight_decay: float = 0.0,
    ):
        if not hasattr(torch.optim, "Muon"):
            raise ImportError(f"Muon needs torch >= 2.9, found {torch.__version__}; upgrade or use another optimizer.")
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, parameter in named_parameters:
            is_matrix = parameter.ndim == 2 and not any(table in name for table in self.TABLES)
            (matrices if is_matrix else others).append(parameter)
        self.parts: list[torch.optim.Optimizer] = []
        if matrices:
            # Updates as large as AdamW's, so that learning rates carry over between shapes.
            self.parts.append(
                torch.optim.Muon(matrices, lr=matrix_lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
            )
        if others:
            self.parts.append(torch.optim.AdamW(others, lr=lr, weight_decay=weight_decay))
        # The groups are the parts' own dicts, so that what a scheduler writes here is what the parts read.
        super().__init__([group for part in self.parts for group in part.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for part in self.parts:
            part.step()

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self.param_groups = [group for part in self.parts for group in part.param_groups]


def scale_learning_rate(optimizer: torch.optim.Optimizer, kept: Iterable[nn.Parameter], scale: float) -> None:
    """Splits the optimizer's groups so that parameters outside `kept` learn at `scale` times their rate."""
    kept_ids = {id(parameter) for parameter in kept}
    parts = optimizer.parts if isinstance(optimizer, MuonWithAdamW) else [optimizer]
    for part in parts:
        for group in list(part.param_groups):
            scaled = [parameter for parameter in group["params"] if id(parameter) not in kept_ids]
            unscaled = [parameter for parameter in group["params"] if id(parameter) in kept_ids]
            if not (scaled and unscaled):
                group["lr"] *= scale if scaled else 1.0
                continue
            group["params"] = unscaled
            part.add_param_group({**group, "params": scaled, "lr": group["lr"] * scale})
    if isinstance(optimizer, MuonWithAdamW):
        optimizer.param_groups = [group for part in parts for group in part.param_groups]
