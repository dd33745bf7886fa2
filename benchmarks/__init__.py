"""Benchmarks, each of two or more ways in one run: ``python -m benchmarks``, from the root of the repository."""
