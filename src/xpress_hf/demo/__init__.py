"""The embedded default: a real small target from a package index and the drafter shipped for it."""

from .drafter import load_demo_drafter
from .prompts import DEMO_PROMPTS
from .target import DEMO_TARGET, load_demo_target, locate_gguf

__all__ = ["DEMO_PROMPTS", "DEMO_TARGET", "load_demo_drafter", "load_demo_target", "locate_gguf"]
