"""Pictures of scenes: sizes from headers first, compared with memory; then each file decoded once, with Pillow."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from espalier.errors import EspalierError, UserError
from espalier.foreign_files import printable
from espalier.hardware.resource_limits import free_memory
from espalier.units import plural, show_size
from espalier.workload import Progress

if TYPE_CHECKING:
    from PIL.Image import Image

DECODING = 20
"""Bytes of a pixel while its picture is decoded and put on white."""
ORIENTATION = 0x0112
"""EXIF's tag; 1: as stored."""
_COLOURS = ("1", "L", "LA", "P", "PA", "RGB", "RGBA")
"""Modes of Pillow that become RGB or RGBA without a colour profile."""


class Headers(NamedTuple):
    """What all pictures of a scene have, and what to say of them."""

    width: int
    height: int
    alpha: bool
    notes: tuple[str, ...]


def headers(paths: Sequence[Path]) -> Headers:
    """Size and channels of all pictures, from their headers alone.

    Raises UserError for what is no picture, for different ones, and for more pixels than memory holds.
    """
    turned = 0
    first: tuple[int, int, bool] = (0, 0, False)
    for number, path in enumerate(dict.fromkeys(paths)):
        with _opened(path) as opened:
            alpha = _has_alpha(opened)
            size = (*opened.size, alpha)
            turned += opened.getexif().get(ORIENTATION, 1) not in (0, 1)
        first = size if number == 0 else first
        _check_alike(path, size, paths[0], first)
    width, height, alpha = first
    _check_memory(len(paths), width * height, paths[0])
    note = f"the EXIF orientation of {plural(turned, 'picture')} is not applied: pixels are used as they are stored"
    return Headers(width, height, alpha, (note,) if turned else ())


def _check_alike(path: Path, size: tuple[int, int, bool], first_path: Path, first: tuple[int, int, bool]) -> None:
    if size[:2] != first[:2]:
        raise UserError(
            f"{path} is {size[0]} × {size[1]}, and {first_path} is {first[0]} × {first[1]}.",
            why="all views have one lens",
            do="images of one size",
        )
    if size[2] != first[2]:
        lacks, has = (first_path, path) if size[2] else (path, first_path)
        raise UserError(
            f"{has} has an alpha channel, and {lacks} has none.",
            why="nobody knows what of the second is background",
            do="alpha in all images, or in none",
        )


def _check_memory(views: int, pixels: int, path: Path) -> None:
    needed, free = 3 * views * pixels + DECODING * pixels, free_memory()
    if 0 < free < needed:
        raise UserError(
            f"{plural(views, 'view')} of {pixels:,} pixels ({printable(path)}, …) need {show_size(needed)}, and "
            f"{show_size(free)} of memory are free.",
            do="make the pictures smaller (the lens follows by their width), or name fewer frames",
        )


def read_images(
    paths: Sequence[Path], progress: Progress, header: Headers | None = None
) -> tuple[Tensor, tuple[float, float, float], list[str]]:
    """(uint8 [views, height, width, 3] on their background, its colour, remarks), of what `headers` found in them.

    Raises UserError.
    """
    header = headers(paths) if header is None else header
    images = torch.empty(len(paths), header.height, header.width, 3, dtype=torch.uint8)
    decoded: dict[Path, int] = {}
    for view, path in enumerate(paths):
        if path in decoded:
            images[view] = images[decoded[path]]
        else:
            image = _decoded(path, header.alpha)
            images[view] = on_white(image) if header.alpha else image
        decoded.setdefault(path, view)
        progress(view + 1, len(paths))
    if header.alpha:
        return images, (1.0, 1.0, 1.0), []
    borders = [images[:, 0], images[:, -1], images[:, :, 0], images[:, :, -1]]
    colour = (torch.cat(borders, 1).float().view(-1, 3).median(0).values / 255).tolist()
    note = f"images without alpha: the background is the usual colour of their borders, {[round(c, 2) for c in colour]}"
    return images, (colour[0], colour[1], colour[2]), [note]


def on_white(images: Tensor) -> Tensor:
    """uint8 [..., 4], colours not multiplied by alpha, on white: uint8 [..., 3]."""
    alpha = images[..., 3:].float() / 255
    return (images[..., :3] * alpha + 255 * (1 - alpha)).round().to(torch.uint8)


def repeated(paths: Sequence[Path]) -> list[str]:
    """What to say of pictures that several views have."""
    return [
        f"{printable(path.name)} is the picture of {views} views with different cameras"
        for path, views in Counter(paths).most_common(3)
        if views > 1
    ]


def _has_alpha(opened: Image) -> bool:
    """Whether a picture has alpha. Raises ValueError for colours that 8 bits of red, green and blue cannot hold as they
    are."""
    clear = "transparency" in opened.info
    grey_of_16_bits = opened.mode.startswith("I;16") or (opened.mode == "I" and opened.format == "PNG")
    if (opened.mode not in _COLOURS and not grey_of_16_bits) or (clear and grey_of_16_bits):
        colours = f"{opened.mode} with transparency" if clear else opened.mode
        raise ValueError(f"its colours are {colours}, which are not converted; save it as RGB of 8 bits")
    return clear or "A" in opened.getbands()


def _decoded(path: Path, alpha: bool) -> Tensor:
    """uint8 [height, width, 4 with `alpha`, else 3]."""
    with _opened(path) as opened:
        if opened.mode.startswith("I"):  # 16 bits of grey, which Pillow would cut off at 255
            grey = np.rint(np.asarray(opened).astype(np.float32) / 257).clip(0, 255).astype(np.uint8)
            return torch.from_numpy(grey)[:, :, None].repeat(1, 1, 3)
        return torch.from_numpy(np.array(opened.convert("RGBA" if alpha else "RGB")))


@contextmanager
def _opened(path: Path) -> Iterator[Image]:
    """A picture whose header was read. Raises UserError for whatever Pillow raises; its warnings are not shown, as
    sizes are compared with memory."""
    try:
        from PIL import Image
    except ImportError:
        raise UserError("Images are read with Pillow.", do='pip install "espalier[scenes]"') from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(path) as opened:
                yield opened
    except EspalierError:
        raise
    except Exception as error:  # Pillow's parsers have no common base of their errors
        reason = printable(str(error) or type(error).__name__).rstrip(".")
        raise UserError(f"{printable(path)} is no image that can be read: {reason}.", do="a PNG or JPEG") from None
