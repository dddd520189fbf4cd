"""Block-diffusion drafters for `generate()`: lossless, faster decoding of causal LMs of Hugging Face transformers."""

from .configuration import SpeculationConfig, XPressConfig
from .decoding.acceptance import AcceptanceRecord
from .decoding.hook import install
from .modeling.drafter import XPressDrafter
from .registration import register

__version__ = "0.1.0"

__all__ = ["AcceptanceRecord", "SpeculationConfig", "XPressConfig", "XPressDrafter"]

register()
install()
