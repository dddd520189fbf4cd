"""`python -m xpress_hf.cli`."""

from . import run

run()
