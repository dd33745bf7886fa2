"""A workflow in the style of AReaL, which runs here after its imports were changed (docs/migrating-from-areal.md)."""
