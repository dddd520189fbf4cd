"""Measuring drafters: agreement with plain generate, acceptance, time."""
