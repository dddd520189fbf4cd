"""Decoding with a drafter: what is borrowed from the target, the candidate generator, and acceptance records."""
