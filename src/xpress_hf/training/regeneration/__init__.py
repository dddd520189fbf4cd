"""Answers of the target to prompts: what a drafter learns from. Resumable, by the target itself or by a server."""

from .job import Answerer, Summary, regenerate
from .local import TargetAnswerer
from .prompts import Answer, Prompt, Sampling, read_prompts
from .server import Server, ServerAnswerer, ServerError

__all__ = [
    "Answer",
    "Answerer",
    "Prompt",
    "Sampling",
    "Server",
    "ServerAnswerer",
    "ServerError",
    "Summary",
    "TargetAnswerer",
    "read_prompts",
    "regenerate",
]
