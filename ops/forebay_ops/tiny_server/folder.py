"""What a model folder must be; free of torch, so that a bad one is told at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


class ModelError(RuntimeError):
    """The folder cannot be served; the message says why and what to do."""


class WeightsError(ValueError):
    """The weights of an update cannot be used; nothing was changed."""


def check_folder(folder: Path) -> None:
    """Fail early on a folder that holds no model.

    Raises:
        ModelError: it is missing or has no config.json.
    """
    if not folder.is_dir():
        raise ModelError(f"model folder {folder} does not exist: pass --model DIR with config.json and safetensors")
    if not (folder / "config.json").is_file():
        raise ModelError(f"model folder {folder} has no config.json: pass a Hugging Face model folder to --model")
