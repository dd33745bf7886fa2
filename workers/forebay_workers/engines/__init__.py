"""The worker's inference engine: many servers behind one ``agenerate``."""

from __future__ import annotations

from forebay_workers.engines.fleet import Fleet, ServerStats
from forebay_workers.engines.router import Router

__all__ = ["Fleet", "Router", "ServerStats"]
