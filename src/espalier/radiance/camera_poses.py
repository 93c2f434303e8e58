"""Camera poses from files of other programs: numbers that are none, matrices that are no pose, and cameras that look
away from the scene are refused.

A pose is a camera-to-world matrix in OpenGL's convention (see `rays`).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from espalier.radiance.rays import Array, Lens, focus_of
from espalier.recipe.errors import UserError
from espalier.recipe.foreign_files import JsonObject

UPRIGHT = 0.02
"""By how much the products of a pose's unit axes may differ from those of a rotation: files round their numbers."""


FARTHEST = 1e9
"""Largest coordinate of a pose: float32 squares it, and tells pixels of neighbours apart no more."""


class PosePlacement(NamedTuple):
    """Where poses of a folder lie in the coordinates of its scene: `matrix` (float32 [4, 4]) times the pose, then its
    place times `scale`."""

    matrix: Array
    scale: float

    def of(self, poses: Array) -> Tensor:
        """Poses [..., 4, 4] of the folder in the scene's coordinates."""
        placed = self.matrix @ poses
        placed[..., :3, 3] *= self.scale
        return torch.from_numpy(placed.astype(np.float32))


def number_of(value: object) -> float:
    """A value of a JSON file as a float: nan for what is no number, infinity for integers beyond float64."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf


def rows_of(value: object, counts: tuple[int, ...], width: int) -> Tensor | None:
    """So many rows of `width` numbers as float32; None of anything else. What is no number is nan."""
    if not isinstance(value, list) or len(value) not in counts:
        return None
    if not all(isinstance(row, list) and len(row) == width for row in value):
        return None
    return torch.tensor([[number_of(cell) for cell in row] for row in value], dtype=torch.float64).float()


def pose_of(frame: JsonObject, where: str) -> Tensor:
    """The pose of a frame: float32 [4, 4]. Raises UserError where it is none."""
    rows = rows_of(frame.get("transform_matrix"), (4, 3), 4)
    if rows is None:
        raise UserError(f"{where} has no transform_matrix of numbers.", do="four rows of four numbers")
    pose = checked_pose(rows[:3], where)
    if len(rows) == 4 and not torch.allclose(rows[3:], pose[3:], atol=1e-4):
        raise UserError(
            f"{where} has a transform_matrix that ends in {rows[3].tolist()}.",
            why="the last row of a pose is 0, 0, 0, 1",
            do="rows of the matrix, not columns",
        )
    return pose


def checked_pose(rows: Tensor, where: str) -> Tensor:
    """float32 [3, 4] as a pose [4, 4] with unit axes. Raises UserError where they are no right-handed rotation."""
    if not float(rows.abs().max()) < FARTHEST:
        raise UserError(
            f"{where} has a pose that is not finite, or beyond {FARTHEST:g}.", do="leave that frame out, or correct it"
        )
    lengths = rows[:, :3].norm(dim=0)
    axes = rows[:, :3] / lengths
    volume = float(torch.linalg.det(axes)) if float(lengths.min()) > 0 else 0.0
    if not abs(volume) >= 1e-3:
        raise UserError(
            f"{where} has a singular pose.",
            why="its three axes do not span the space",
            do="leave that frame out, or correct it",
        )
    skewed = float((axes.T @ axes - torch.eye(3)).abs().max()) > UPRIGHT
    if volume < 0 or skewed or float(lengths.max() / lengths.min()) > 1.05:
        raise UserError(
            f"{where} has a pose that is no rotation.",
            why="its axes (right, up, back) are not perpendicular, of one length and right-handed",
            do="camera-to-world matrices that neither mirror nor shear, or leave that frame out",
        )
    return torch.cat([torch.cat([axes, rows[:, 3:]], 1), torch.eye(4)[3:]])


def box_of(lens: Lens, poses: Tensor) -> Tensor:
    """The cube round the point that all cameras look at, as large as every one of them sees whole."""
    center = torch.from_numpy(focus_of(poses.numpy()))
    distance = (poses[:, :3, 3] - center).norm(dim=1).amin()
    slope = min(0.5 * lens.width / lens.focal, 0.5 * lens.height / (lens.focal * lens.aspect))
    half = distance * math.sin(math.atan(slope))
    return torch.stack([center - half, center + half])


def seen_box(lens: Lens, poses: Tensor, where: str) -> Tensor:
    """`box_of`. Raises UserError where cameras do not look at one point from outside."""
    box = box_of(lens, poses)
    if not float((box[1] - box[0]).min()) > 1e-6:
        raise UserError(
            f"The cameras of {where} do not look at one point from outside.",
            why="one of them stands where their axes meet, as in a panorama",
            do='"box": [[x, y, z], [x, y, z]] in that file, the corners of what is looked at',
        )
    check_facing(poses, box, where)
    return box


def check_facing(poses: Tensor, box: Tensor, where: str) -> None:
    """Raises UserError where most cameras outside of `box` look away from its middle, as they do when poses are in the
    convention of OpenCV and COLMAP."""
    places = poses[:, :3, 3]
    outside = ((places < box[0]) | (places > box[1])).any(1)
    ahead = -((box.mean(0) - places) * poses[:, :3, 2]).sum(1)
    away = int((ahead[outside] < 0).sum())
    if 2 * away > int(outside.sum()):
        raise UserError(
            f"{away} of {len(poses)} cameras of {where} look away from the scene.",
            why="poses are in OpenGL's convention (right, up, back: the camera looks along -z); these look like "
            "OpenCV's and COLMAP's (right, down, forward: +z)",
            do="negate the second and third column of each transform_matrix (camera to world, not world to camera); "
            'for cameras that look outwards give "box": [[x, y, z], [x, y, z]], the corners of what is looked at',
        )
