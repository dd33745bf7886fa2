"""A producer as a process, to be killed: ``python a_producer.py WORKFLOW COUNT`` submits so many, and never ends."""

from __future__ import annotations

import signal
import sys

from forebay import Client

if __name__ == "__main__":
    with Client.connect(wait_s=30) as client:
        for _ in range(int(sys.argv[2])):
            client.submit({"ids": [1, 2]}, sys.argv[1], {})
        signal.pause()
