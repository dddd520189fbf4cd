"""Prompts that `xpress-hf demo` answers when none is given: written for the demo, in no benchmark."""

DEMO_PROMPTS = (
    "A baker makes 24 rolls in the morning and 18 in the afternoon. She sells each roll for $2 and has 6 left at "
    "night. How much money does she take in? Please reason step by step.",
    "Write a Python function `is_palindrome(text)` that ignores case and spaces, with a short example.",
    "Explain in five sentences why the sky is blue.",
)
