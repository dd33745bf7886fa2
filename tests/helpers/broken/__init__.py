"""Modules that cannot be imported."""
