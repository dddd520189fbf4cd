"""The drafter that is shipped as package data for the demo target."""

from __future__ import annotations

from pathlib import Path

import torch

from ..modeling.drafter import XPressDrafter

DRAFTER_FOLDER = Path(__file__).parent / "drafter"


def load_demo_drafter(dtype: torch.dtype = torch.bfloat16, device: str | torch.device = "cpu") -> XPressDrafter:
    """Loads the drafter shipped for the demo target.

    Raises:
        FileNotFoundError: the installed package was built without its data.
    """
    if not (DRAFTER_FOLDER / "model.safetensors").is_file():
        raise FileNotFoundError(
            f"{str(DRAFTER_FOLDER)!r} does not hold the shipped drafter: this installation is incomplete; reinstall "
            "xpress-hf, or name a drafter of your own."
        )
    return XPressDrafter.from_pretrained(DRAFTER_FOLDER, dtype=dtype).to(device).eval()
