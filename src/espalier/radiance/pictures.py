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

from espalier.machine.resource_limits import refuse_large
from espalier.parallel.workload import Progress
from espalier.recipe.errors import UserError
from espalier.recipe.foreign_files import parsing, printable
from espalier.recipe.units import plural

if TYPE_CHECKING:
    from PIL.Image import Image

DECODING = 20
"""Bytes of a pixel while its picture is decoded and put on white."""
ORIENTATION = 0x0112
"""EXIF's tag; 1: as stored."""
_COLOURS = ("1", "L", "LA", "P", "PA", "RGB", "RGBA")
"""Modes of Pillow that become RGB or RGBA without a colour profile."""


class PictureHeader(NamedTuple):
    """What the header of one picture says; `turned`: EXIF has an orientation."""

    width: int
    height: int
    alpha: bool
    turned: bool


def headers(paths: Sequence[Path]) -> tuple[PictureHeader, list[str]]:
    """What the headers of all pictures say, and remarks.

    Raises UserError for what is no picture, for different ones, and for more pixels than memory holds.
    """
    kinds = {path: _kind(path) for path in dict.fromkeys(paths)}
    first = kinds[paths[0]]
    for path, kind in kinds.items():
        _check_alike(path, kind, paths[0], first)
    _check_memory(len(paths), first.width * first.height, paths[0])
    turned = sum(kind.turned for kind in kinds.values())
    note = f"the EXIF orientation of {plural(turned, 'picture')} is not applied: pixels are used as they are stored"
    return first, [note] if turned else []


def _check_alike(path: Path, kind: PictureHeader, first_path: Path, first: PictureHeader) -> None:
    if kind[:2] != first[:2]:
        raise UserError(
            f"{path} is {kind.width} × {kind.height}, and {first_path} is {first.width} × {first.height}.",
            why="all views have one lens",
            do="images of one size",
        )
    if kind.alpha != first.alpha:
        lacks, has = (first_path, path) if kind.alpha else (path, first_path)
        raise UserError(
            f"{has} has an alpha channel, and {lacks} has none.",
            why="nobody knows what of the second is background",
            do="alpha in all images, or in none",
        )


def _check_memory(views: int, pixels: int, path: Path) -> None:
    do = "make the pictures smaller (the lens follows by their width), or name fewer frames"
    what = f"A scene of {plural(views, 'view')} of {pixels:,} pixels ({printable(path)}, …)"
    refuse_large(what, 3 * views * pixels + DECODING * pixels, do)


def read_images(paths: Sequence[Path], progress: Progress) -> tuple[Tensor, tuple[float, float, float], list[str]]:
    """(uint8 [views, height, width, 3] on their background, its colour, remarks), of pictures alike (`headers`).

    Raises UserError.
    """
    kind = _kind(paths[0])
    images = torch.empty(len(paths), kind.height, kind.width, 3, dtype=torch.uint8)
    decoded: dict[Path, int] = {}
    for view, path in enumerate(paths):
        images[view] = images[decoded[path]] if path in decoded else _decoded(path, kind.alpha)
        decoded.setdefault(path, view)
        progress(view + 1, len(paths))
    if kind.alpha:
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
    """What to say where views share a picture."""
    path, views = Counter(paths).most_common(1)[0]
    return [f"{printable(path.name)} is the picture of {views} views with different cameras"] if views > 1 else []


def _kind(path: Path) -> PictureHeader:
    """Size and channels of a picture. Raises UserError for colours that red, green and blue of 8 bits cannot hold."""
    with _opened(path) as opened:
        clear = "transparency" in opened.info
        mode = opened.mode
        grey_of_16_bits = mode.startswith("I;16") or (mode == "I" and opened.format == "PNG")
        if clear if grey_of_16_bits else mode not in _COLOURS:
            raise ValueError(f"its colours are {mode}, which are not converted; save it as RGB of 8 bits")
        turned = opened.getexif().get(ORIENTATION, 1) not in (0, 1)
        return PictureHeader(*opened.size, clear or "A" in opened.getbands(), turned)


def _decoded(path: Path, alpha: bool) -> Tensor:
    """uint8 [height, width, 3], on white."""
    with _opened(path) as opened:
        if opened.mode.startswith("I"):  # 16 bits of grey, which Pillow would cut off at 255
            grey = np.rint(np.asarray(opened).astype(np.float32) / 257).clip(0, 255).astype(np.uint8)
            return torch.from_numpy(grey)[:, :, None].expand(-1, -1, 3)
        image = torch.from_numpy(np.array(opened.convert("RGBA" if alpha else "RGB")))
        return on_white(image) if alpha else image


@contextmanager
def _opened(path: Path) -> Iterator[Image]:
    """A picture whose header was read. Raises UserError for whatever Pillow raises; its warnings are not shown, as
    sizes are compared with memory."""
    from PIL import Image

    do = "a PNG or JPEG that is whole, of at most 178 million pixels"
    with parsing(path, do), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Image.open(path) as opened:
            yield opened
