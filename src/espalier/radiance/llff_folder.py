"""LLFF's folders of forward-facing captures: `poses_bounds.npy` [views, 17] and `images/`.

Poses are centred and scaled so that the near plane is at depth 1, and rays are in normalized device coordinates.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from espalier.radiance import pictures
from espalier.radiance.camera_poses import FARTHEST, PosePlacement, checked_pose
from espalier.radiance.capture import Capture, check_enough, held_out_split
from espalier.radiance.lens_keys import lens_of
from espalier.radiance.rays import Array, Lens, device_coordinates, pose_of_axes, rays_of
from espalier.recipe import foreign_files
from espalier.recipe.errors import UserError
from espalier.recipe.units import plural

TABLE = "poses_bounds.npy"
_ENDINGS = (".png", ".jpg", ".jpeg")
WIDEST = 80
"""Degrees from the mean direction up to which rays of forward-facing views have normalized device coordinates, which
are infinite at 90."""


def read(folder: Path) -> Capture:
    """The capture in a folder of LLFF. Raises UserError."""
    file = folder / TABLE
    where = str(file)
    table = _table(file)
    entries = sorted((folder / "images").glob("*"))
    paths = [path for path in entries if path.suffix.lower() in _ENDINGS]
    if len(paths) != len(table):
        raise UserError(f"{folder} has {len(paths)} images and {len(table)} poses.", do="one image for each pose")
    parts = held_out_split(paths)
    check_enough(parts["train"], str(folder))
    kind, turned = pictures.headers(paths)
    with np.errstate(over="ignore"):  # to infinity, which is refused
        matrices = table[:, :15].reshape(-1, 3, 5).astype(np.float32)
    axes = np.stack([matrices[:, :, 1], -matrices[:, :, 0], matrices[:, :, 2]], 2)  # LLFF: down, right, back
    rows = torch.from_numpy(np.concatenate([axes, matrices[:, :, 3:4]], 2))
    poses = torch.stack([checked_pose(row, f"{where}, row {number}") for number, row in enumerate(rows)]).numpy()
    near = float(table[:, 15].min())
    if not 1 / FARTHEST < near < FARTHEST:
        raise UserError(f"{where} has a nearest depth of {near}.", do="depths above 0 in column 16")
    lens = _lens(matrices[:, :, 4], kind.width, kind.height, where)
    placement = _centred(poses, 1 / (0.75 * near), where)
    placed = placement.of(poses)
    others = len(entries) - len(paths)
    notes = [f"not used: {plural(others, 'file')} of images/ that are no PNG or JPEG"] if others else []
    box = _device_box(lens, placed, where)
    return Capture(lens, paths, placed, parts, box, [file], (*notes, *turned), True, placement)


def _table(file: Path) -> NDArray[np.float64]:
    """[views, 17]: a pose, with the size and focal length, and two depths a row."""
    do = "an array of 17 columns, as LLFF writes it"
    with foreign_files.parsing(file, do):
        table = np.lib.format.open_memmap(file, mode="r")  # compares the shape with the file's size
    if table.dtype.kind not in "fiu":
        raise UserError(f"{file} is no array of numbers.", do=do)
    if table.ndim != 2 or table.shape[1] != 17:
        raise UserError(f"{file} has the shape {list(table.shape)}.", do="17 columns, as LLFF writes it")
    return table.astype(np.float64)


def _lens(rows: Array, width: int, height: int, where: str) -> Lens:
    """The lens for pictures of this size, of rows [views, 3] of height, width and focal length that are all the same.
    Raises UserError."""
    words = [f"{wide:g} × {tall:g} pixels and a focal length of {focal:.1f}" for tall, wide, focal in rows]
    for number, row in enumerate(rows):
        if not (np.isfinite(row).all() and (row > 0).all()):
            raise UserError(
                f"{where}, row {number} says nothing of the lens.",
                do="height, width and focal length above 0, in pixels",
            )
        if not np.allclose(row, rows[0], rtol=1e-3):
            raise UserError(
                f"{where}, row {number} has {words[number]}, and row 0 has {words[0]}.",
                why="all views have one lens",
                do="views of one camera, as LLFF writes them",
            )
    tall, wide, focal = map(float, rows[0])
    return lens_of({"w": wide, "h": tall, "fl_x": focal}, width, height, where)


def _centred(poses: Array, scale: float, where: str) -> PosePlacement:
    """Of poses as seen from their mean, which looks along -z, and times `scale`. Raises UserError without a mean."""
    back = _unit(poses[:, :3, 2].mean(0), where)
    right = _unit(np.cross(poses[:, :3, 1].mean(0), back), where)
    mean = pose_of_axes(right, back, poses[:, :3, 3].mean(0))
    return PosePlacement(np.linalg.inv(mean), scale)


def _unit(vector: Array, where: str) -> Array:
    length = float(np.linalg.norm(vector))
    if length < 1e-3:
        raise _not_forward(where, "their directions add up to nothing")
    return vector / length


def _not_forward(where: str, why: str) -> UserError:
    return UserError(
        f"The cameras of {where} do not face one side.",
        why=f"{why}, and scenes in LLFF's layout are forward-facing",
        do="Blender's layout (transforms.json) for cameras round a scene",
    )


def _device_box(lens: Lens, poses: Tensor, where: str) -> Tensor:
    """What the corners of all views reach between the near plane and infinity. Raises UserError for corners far from
    the mean direction."""
    last = lens.width * lens.height - 1
    pixels = torch.tensor([0, lens.width - 1, last - lens.width + 1, last]).repeat(len(poses))
    cameras = poses.repeat_interleave(4, 0)
    seen = rays_of(lens, cameras, pixels)
    degrees = torch.rad2deg(torch.acos((-seen.views[:, 2]).clamp(-1, 1)))
    if float(degrees.max()) > WIDEST:
        why = f"a corner of view {int(degrees.argmax()) // 4} is {float(degrees.max()):.0f}° from their mean direction"
        raise _not_forward(where, why)
    start, towards = device_coordinates(lens, seen.origins, seen.views)
    both = torch.cat([start, start + towards])
    return torch.stack([both.amin(0), both.amax(0)])
