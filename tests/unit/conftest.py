"""Settings of all unit tests."""

from __future__ import annotations

from hypothesis import settings

# No deadline for an example: how long one takes says more about the machine's other work than about the code.
settings.register_profile("forebay", deadline=None)
settings.load_profile("forebay")
