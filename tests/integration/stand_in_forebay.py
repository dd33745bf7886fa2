"""Stands in for the command ``forebay``: sub-commands that start at once and do nothing.

STAND_IN_FAIL names sub-commands that exit, STAND_IN_SILENT those that are never ready, STAND_IN_STUBBORN those that
ignore SIGTERM, STAND_IN_CHILD those that start a process of their own. STAND_IN_FOLDER gets a file per start.
"""

import http.server
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path


def _named(variable: str, command: str) -> bool:
    return command in os.environ.get(variable, "").split(",")


def main() -> None:
    """Run the sub-command until SIGTERM."""
    command = sys.argv[1]
    if folder := os.environ.get("STAND_IN_FOLDER"):
        with Path(folder, f"{command}-{os.getpid()}").open("w") as file:
            file.write(
                " ".join([*sys.argv[1:], os.environ.get("REDIS_URL", ""), os.environ.get("FOREBAY_SERVERS", "")])
            )
    if _named("STAND_IN_FAIL", command):
        print(f"{command} cannot find its left shoe", flush=True)
        sys.exit(3)
    signal.signal(signal.SIGTERM, signal.SIG_IGN if _named("STAND_IN_STUBBORN", command) else lambda *_: os._exit(0))
    if _named("STAND_IN_CHILD", command):
        child = subprocess.Popen(["sleep", "600"])
        print(f"child pid {child.pid}", flush=True)
    if _named("STAND_IN_SILENT", command):
        print(f"{command} thinks", flush=True)
    elif command == "serve-tiny":
        port = int(sys.argv[sys.argv.index("--port") + 1])
        server = http.server.ThreadingHTTPServer(("127.0.0.1", port), _Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
    else:
        print(f"2026-01-01 [info ] \x1b[1m{command}.ready\x1b[0m pid={os.getpid()}", flush=True)
    while True:
        signal.pause()


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        """Say yes to ``/model_info``."""
        self.send_response(200 if self.path == "/model_info" else 404)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Be quiet."""


if __name__ == "__main__":
    main()
