"""Checkpoint layouts: tables and pure functions on dicts, so that the model can load any of them."""
