"""Settings of the conformance suite: one file for each section of the contract, its tests in the page's order."""

from __future__ import annotations

from hypothesis import settings

# No deadline for an example: how long one takes says more about the machine's other work than about the code.
settings.register_profile("forebay", deadline=None)
settings.load_profile("forebay")
