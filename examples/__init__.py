"""Runnable examples: ``python -m examples.grpo`` and ``python -m examples.text``, from the root of the repository."""
