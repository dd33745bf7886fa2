"""``python -m forebay_ops.tiny_server --model DIR``."""

import typer

from forebay_ops.tiny_server.cli import serve_tiny

if __name__ == "__main__":
    typer.run(serve_tiny)
