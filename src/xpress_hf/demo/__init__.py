"""The embedded default: a real small target from a package index and the drafter shipped for it."""

from .target import DEMO_TARGET, load_demo_target, locate_gguf

__all__ = ["DEMO_TARGET", "load_demo_target", "locate_gguf"]
