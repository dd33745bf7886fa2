"""``make chaos``: real processes, killed at random, and books outside Redis that say whether the guarantee held.

``docs/chaos.md`` says what is killed, what is proved and how to read the output.
"""
