"""Block-diffusion drafters for `generate()`: lossless, faster decoding of causal LMs of Hugging Face transformers."""

from typing import TYPE_CHECKING, Any

from .configuration import SpeculationConfig, XPressConfig
from .decoding.acceptance import AcceptanceRecord
from .decoding.hook import install
from .modeling.drafter import XPressDrafter
from .registration import register
from .version import __version__

if TYPE_CHECKING:
    from .training.trainer import DrafterTrainer, DrafterTrainingArguments

__all__ = [
    "AcceptanceRecord",
    "DrafterTrainer",
    "DrafterTrainingArguments",
    "SpeculationConfig",
    "XPressConfig",
    "XPressDrafter",
    "__version__",
]

register()
install()


def __getattr__(name: str) -> Any:
    # The Trainer's imports take longer than all others together; only those who train pay for them.
    if name in ("DrafterTrainer", "DrafterTrainingArguments"):
        from .training import trainer

        return getattr(trainer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
