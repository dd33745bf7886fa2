"""Runs a local stack of stand-ins in this process: ``run_stack.py HOME [KEYWORD=VALUE ...]``, numbers as values."""

import asyncio
import sys
from pathlib import Path
from typing import Any

from forebay.errors import ForebayError
from forebay_ops.supervisor import LocalStack, LocalStackConfig


async def _run(home: Path, values: dict[str, Any]) -> None:
    stand_in = Path(__file__).with_name("stand_in_forebay.py")
    defaults = {"server_port": 0, "model_path": home, "workers": 1}
    config = LocalStackConfig(home=home, forebay=(sys.executable, str(stand_in)), **{**defaults, **values})
    async with LocalStack(config) as stack:
        print("stack is up", flush=True)
        await stack.wait()


if __name__ == "__main__":
    pairs = (word.split("=") for word in sys.argv[2:])
    try:
        asyncio.run(_run(Path(sys.argv[1]), {key: int(value) for key, value in pairs}))
    except ForebayError as error:
        sys.exit(str(error))
