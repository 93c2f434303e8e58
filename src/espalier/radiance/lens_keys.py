"""The lens in files of other programs: the keys that Blender, nerfstudio, instant-ngp and Metashape write, for a file
or for each of its frames. OpenCV's perspective distortion is honoured; other camera models are refused."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from espalier.radiance.camera_poses import number_of
from espalier.radiance.rays import ITERATIONS, Lens, undistorted
from espalier.recipe.errors import UserError
from espalier.recipe.foreign_files import JsonObject, printable

FOCAL = ("camera_angle_x", "camera_angle_y", "fl_x", "fl_y")
DISTORTION = ("k1", "k2", "k3", "p1", "p2")
KEYS = (*FOCAL, "cx", "cy", "w", "h", *DISTORTION, "camera_model")
PERSPECTIVE = ("PINHOLE", "SIMPLE_PINHOLE", "SIMPLE_RADIAL", "RADIAL", "OPENCV", "FULL_OPENCV", "PERSPECTIVE")
"""Camera models that `DISTORTION` describes, with those of its coefficients that are not 0."""
UNDISTORT = "undistort the pictures (colmap image_undistorter, ns-process-data), and give a lens without distortion"
INVERSE = 1e-4
"""By how much one more iteration may move a corner on the plane at depth 1, once its distortion is inverted."""


def of_frame(table: JsonObject, frame: JsonObject) -> dict[str, Any]:
    """The keys of a lens that hold for a frame: its own, and those of the file that these do not replace."""
    of_this_frame = {key: frame[key] for key in KEYS if frame.get(key) is not None}
    replaced = FOCAL if of_this_frame.keys() & set(FOCAL) else ()
    common = {key: table[key] for key in KEYS if table.get(key) is not None and key not in replaced}
    return common | of_this_frame


def lens_of(table: JsonObject, width: int, height: int, where: str) -> Lens:
    """The lens of a table for pictures of this size. Raises UserError."""
    wide = _number(table, "w", width)
    if not 0 < wide < math.inf:
        raise UserError(f"{where} has a width of {wide:g}.", do='"w" in pixels, or leave it out')
    factor = width / wide
    tall = _number(table, "h", height / factor)
    if not abs(tall * factor - height) <= 1:
        raise UserError(
            f"{where} is of images of {wide:g} × {tall:g} pixels, and its images have {width} × {height}.",
            do='the "w" and "h" of these images before they were made smaller, or neither; pictures on their side '
            "(EXIF) are not turned",
        )
    center = (_number(table, "cx", 0.5 * width / factor), _number(table, "cy", 0.5 * height / factor))
    inside = 0 <= center[0] <= wide and 0 <= center[1] <= height / factor
    if not inside or max(center) <= 1 < min(width, height):  # shares of the sides
        raise UserError(
            f"{where} has an optical center {center} in pictures of {wide:g} × {height / factor:g}.",
            do='"cx" and "cy" in pixels from the upper left corner, or neither',
        )
    focal, aspect = _focal(table, wide, height / factor, where)
    lens = Lens(width, height, focal * factor, (center[0] * factor, center[1] * factor), aspect)
    return lens._replace(distortion=_distortion(table, lens, where))


def _focal(table: JsonObject, wide: float, tall: float, where: str) -> tuple[float, float]:
    """The horizontal focal length in pixels of the table, and the vertical one over it."""
    across = _number(table, "fl_x", _of_angle(_number(table, "camera_angle_x", math.nan), wide))
    down = _number(table, "fl_y", _of_angle(_number(table, "camera_angle_y", math.nan), tall))
    if not 0 < across < math.inf:
        raise UserError(
            f"{where} says nothing of the lens.", do='"camera_angle_x": radians between 0 and 3.14, or "fl_x": pixels'
        )
    given = any(table.get(key) is not None for key in ("fl_y", "camera_angle_y"))
    if given and not 0.1 < down / across < 10:
        raise UserError(f"{where} has a vertical focal length of {down:g}.", do='"fl_y" in pixels, or leave it out')
    return across, down / across if given else 1.0


def _of_angle(angle: float, side: float) -> float:
    """The focal length of a field of view in radians over `side` pixels; nan of what is no angle."""
    return 0.5 * side / math.tan(0.5 * angle) if 0 < angle < math.pi else math.nan


def _distortion(table: JsonObject, lens: Lens, where: str) -> tuple[float, ...]:
    """k1, k2, k3, p1, p2, or nothing where all are 0. Raises UserError for those that cannot be inverted."""
    model = table.get("camera_model")
    if model is not None and str(model).upper() not in PERSPECTIVE:
        raise UserError(
            f"{where} has the camera_model {printable(model)}.",
            why="only perspective cameras are understood",
            do=UNDISTORT,
        )
    values = tuple(_number(table, key, 0.0) for key in DISTORTION)
    if not any(values):
        return ()
    corners = torch.tensor([[0.0, 1, 0, 1], [0, 0, 1, 1]]) * torch.tensor([[lens.width], [lens.height]])
    plane = lens.on_plane(*corners)
    steps = [torch.stack(undistorted(*plane, values, count)) for count in (ITERATIONS, ITERATIONS + 1)]
    if not float((steps[0] - steps[1]).abs().max()) < INVERSE:
        words = ", ".join(f"{key} = {value}" for key, value in zip(DISTORTION, values, strict=True))
        raise UserError(f"{where} has a distortion that cannot be inverted ({words}).", do=UNDISTORT)
    return values


def _number(table: JsonObject, key: str, default: float) -> float:
    return default if table.get(key) is None else number_of(table[key])


def common_lens(lenses: Sequence[tuple[str, Lens]]) -> Lens:
    """The lens of all (where, lens). Raises UserError naming the first two that differ."""
    first_where, first = lenses[0]
    for where, lens in lenses:
        if not np.allclose(_numbers(lens), _numbers(first), rtol=1e-3, atol=1e-4):
            raise UserError(
                f"{where} has a focal length of {_described(lens)}, and {first_where} one of {_described(first)}.",
                why="all views have one lens",
                do="pictures of one camera and zoom; others in a scene of their own",
            )
    return first


def _numbers(lens: Lens) -> list[float]:
    return [lens.focal, *lens.center, lens.aspect, *(lens.distortion or [0.0] * len(DISTORTION))]


def _described(lens: Lens) -> str:
    words = f"{lens.focal:.1f} pixels and a center at {lens.center[0]:.1f}, {lens.center[1]:.1f}"
    return words if lens[4:] == (1.0, ()) else f"{words}, aspect and distortion {lens[4:]}"
