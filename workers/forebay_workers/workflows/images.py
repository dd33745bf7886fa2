"""Images as prompts carry them, for processors and for inference servers.

A prompt's images are bytes or base64 text of image files, which is what travels; an episode that is called by hand may
have PIL images. Paths and URLs are not read: workers may be elsewhere, and no prompt should make one open a file.
"""

from __future__ import annotations

import base64
import binascii
import io
import re
from typing import TYPE_CHECKING, Any

from forebay.errors import SlotDataError, WorkflowError

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["decode_image", "encode_image", "require_pillow"]

_DATA_URL = re.compile(r"\s*data:[^,]{0,200};base64,", re.IGNORECASE)
_ORIENTATION = 0x0112
"""The EXIF tag that says how to turn an image."""


def require_pillow() -> None:
    """Raise WorkflowError where pillow is not installed."""
    try:
        import PIL.Image  # noqa: F401 -- whether it is there
    except ImportError:
        raise WorkflowError("images need pillow; install forebay[vision]") from None


def encode_image(image: Image | bytes) -> str:
    """Base64 text of a PIL image (as PNG, which loses nothing) or of an image file's bytes, to be put in a prompt."""
    if isinstance(image, bytes):
        return base64.b64encode(image).decode("ascii")
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return base64.b64encode(buffer.getvalue()).decode("ascii")


def decode_image(value: Any, where: str) -> tuple[Image, str]:
    """``(RGB image, its base64 text)`` of one of a prompt's images.

    The text decodes to exactly this image: a file that a reader could turn or convert in ways of its own (an EXIF
    orientation, a palette, transparency) is written anew, all others are sent as they came.

    Raises:
        SlotDataError: it is no image; the message begins with `where`.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    raw = _raw(value, where)
    try:
        image = Image.open(io.BytesIO(raw)) if raw is not None else value
        turned = image.getexif().get(_ORIENTATION, 1) != 1
        plain = image.mode == "RGB" and not turned and "transparency" not in image.info
        image = ImageOps.exif_transpose(image).convert("RGB")
    except UnidentifiedImageError:
        raise SlotDataError(f"{where} is {_size(raw)} that are no image file") from None
    # pillow's decoders raise these for broken files, and the first of them for more pixels than it allows
    except (Image.DecompressionBombError, OSError, ValueError, SyntaxError) as error:
        raise SlotDataError(f"{where} cannot be decoded: {error}") from None
    return image, encode_image(raw) if plain and raw is not None else encode_image(image)


def _raw(value: Any, where: str) -> bytes | None:
    """The bytes of an image file; None: `value` is an image already."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        start = found.end() if (found := _DATA_URL.match(value)) else 0
        try:
            return base64.b64decode("".join(value[start:].split()), validate=True)
        except (binascii.Error, ValueError):
            shown = value if len(value) <= 60 else value[:57] + "..."
            raise SlotDataError(
                f"{where}={shown!r} is no base64; put the image file's bytes or their base64 text in the prompt: "
                "workers read neither paths nor URLs"
            ) from None
    if hasattr(value, "getexif") and hasattr(value, "convert"):
        return None
    raise SlotDataError(f"{where} is a {type(value).__name__}; an image is bytes or base64 text of an image file")


def _size(raw: bytes | None) -> str:
    return f"{len(raw or b'')} bytes"
