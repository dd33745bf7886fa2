"""What Redis holds, and the only code that talks to it."""

from forebay.store.connection import connect
from forebay.store.store import Store

__all__ = ["Store", "connect"]
