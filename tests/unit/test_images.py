"""Images of prompts (contract, section 10): what a processor sees is what a server is sent."""

from __future__ import annotations

import base64
import io
from typing import Any

import pytest
from PIL import Image

from forebay.errors import SlotDataError
from forebay_workers.workflows import encode_image
from forebay_workers.workflows.images import decode_image


def corners(mode: str = "RGB", size: tuple[int, int] = (6, 4)) -> Image.Image:
    """An image whose upper left pixel is another colour."""
    image = Image.new("RGB", size, "white")
    image.putpixel((0, 0), (255, 0, 0))
    return image.convert(mode)


def file(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """An image file's bytes."""
    buffer = io.BytesIO()
    image.save(buffer, format=kind, **options)
    return buffer.getvalue()


def sent_image(text: str) -> Image.Image:
    """What a server makes of base64 text without any conversion of its own."""
    return Image.open(io.BytesIO(base64.b64decode(text)))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "BMP"])
def test_a_plain_file_is_sent_as_it_came(kind: str) -> None:
    """Bytes and base64 of an RGB file reach the server unchanged, and the processor gets its pixels."""
    raw = file(corners(), kind)
    for value in (raw, base64.b64encode(raw).decode(), "data:image/x;base64," + base64.b64encode(raw).decode()):
        image, sent = decode_image(value, "images[0]")
        assert base64.b64decode(sent) == raw
        assert image.mode == "RGB"
        assert image.tobytes() == sent_image(sent).tobytes()


@pytest.mark.parametrize("mode", ["P", "L", "RGBA", "LA", "1", "CMYK"])
def test_other_modes_are_sent_as_what_the_processor_sees(mode: str) -> None:
    """A palette, transparency and the like are converted once, here, and not by every reader in its own way."""
    image, sent = decode_image(file(corners(mode), "TIFF" if mode == "CMYK" else "PNG"), "images[0]")
    assert image.mode == sent_image(sent).mode == "RGB"
    assert image.tobytes() == sent_image(sent).tobytes()


def test_an_orientation_is_applied_once() -> None:
    """An image that its EXIF data turns is sent turned: a server that ignores the tag sees what the processor sees."""
    exif = Image.Exif()
    exif[0x0112] = 6
    image, sent = decode_image(file(corners(), "PNG", exif=exif), "images[0]")
    assert image.size == sent_image(sent).size == (4, 6)
    assert sent_image(sent).getexif().get(0x0112, 1) == 1
    assert image.tobytes() == sent_image(sent).tobytes()


def test_a_pil_image_loses_nothing() -> None:
    """encode_image and an image in the data itself give the same pixels."""
    image, sent = decode_image(corners(), "images[0]")
    assert sent == encode_image(corners())
    assert image.tobytes() == corners().tobytes() == sent_image(sent).tobytes()
    assert encode_image(b"abc") == base64.b64encode(b"abc").decode()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("cats/tom.png", "'cats/tom.png' is no base64.*neither paths nor URLs"),
        ("https://example.org/" + "a" * 90, r"='https://example.org/a+\.\.\.' is no base64"),
        ("file.", "no base64"),
        ("", "0 bytes that are no image file"),
        (b"GIF", "3 bytes that are no image file"),
        (file(corners())[:40], "40 bytes that are no image file"),
        (file(corners(size=(400, 400)), "JPEG")[:700], "cannot be decoded"),
        (7, "is a int; an image is bytes or base64"),
        (None, "is a NoneType"),
        ({"url": "x"}, "is a dict"),
    ],
)
def test_what_is_no_image(value: Any, message: str) -> None:
    """Anything else is bad data; the error names its place and says what an image is."""
    with pytest.raises(SlotDataError, match=rf"^images\[3\].*{message}"):
        decode_image(value, "images[3]")


def test_too_many_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small file that claims to be a huge image is refused before its pixels are made."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    with pytest.raises(SlotDataError, match=r"cannot be decoded.*decompression bomb"):
        decode_image(file(corners(size=(9, 9))), "images[0]")
