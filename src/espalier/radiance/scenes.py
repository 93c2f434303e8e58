"""Scenes: views with their cameras, rendered here (`spheres:`, `knot:`) or read from Blender's, nerfstudio's and LLFF's
folders (`transforms_file`, `llff_folder`). Colours with alpha are put on white.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from espalier.parallel.workload import Progress
from espalier.radiance import llff_folder, rendered_scenes, transforms_file
from espalier.radiance.camera_poses import PosePlacement, box_of
from espalier.radiance.pictures import on_white, read_images
from espalier.radiance.rays import Lens, Rays, rays_of
from espalier.recipe import data_path
from espalier.recipe.errors import UserError
from espalier.recipe.foreign_files import JsonObject, unused


@dataclass(frozen=True)
class Scene:
    """Views of one scene.

    Attributes:
        lens: what all of them are seen through.
        images: uint8 [views, height, width, 3], on the background; empty where only cameras are kept.
        poses: float32 [views, 4, 4]; of a forward-facing scene in units in which the near plane is at depth 1.
        parts: `train`, `val` and `test`: numbers of views.
        box: float32 [2, 3], the corners of what is looked at, in the coordinates of rays.
        background: colour that rays have beyond the box.
        forward: rays are in normalized device coordinates.
        notes: what the user should know.
        placement: from the folder's coordinates to those of `poses`; None where they are the same.
    """

    lens: Lens
    images: Tensor
    poses: Tensor
    parts: Mapping[str, Sequence[int]]
    box: Tensor
    background: tuple[float, float, float] = (1.0, 1.0, 1.0)
    forward: bool = False
    notes: tuple[str, ...] = ()
    files: tuple[str, ...] = field(default=(), compare=False)
    placement: PosePlacement | None = field(default=None, compare=False)

    def rays(self, views: Tensor, pixels: Tensor) -> Rays:
        """Rays of pixels (row * width + column) of views; both int64 [rays]."""
        return self.rays_through(self.lens, self.poses[views], pixels)

    def rays_through(self, lens: Lens, poses: Tensor, pixels: Tensor) -> Rays:
        """Rays of pixels of any cameras; `poses` [rays, 4, 4] in the scene's coordinates."""
        return rays_of(lens, poses, pixels, self.lens if self.forward else None)

    def colours(self, views: Tensor, pixels: Tensor) -> Tensor:
        """True colours of pixels: float32 [rays, 3] from 0 to 1."""
        return self.images.view(len(self.images), -1, 3)[views, pixels].float() / 255

    def fingerprint(self) -> str:
        """Hash of images and cameras."""
        digest = hashlib.sha256(self.images.numpy().data)
        digest.update(self.poses.numpy().tobytes())
        return digest.hexdigest()[:16]

    def cameras(self) -> dict[str, Any]:
        """All but the images, as JSON takes it."""
        return {
            "lens": [*self.lens[:3], list(self.lens.center), self.lens.aspect, list(self.lens.distortion)],
            "poses": self.poses.tolist(),
            "parts": {name: list(views) for name, views in self.parts.items()},
            "box": self.box.tolist(),
            "background": list(self.background),
            "forward": self.forward,
            "placement": self.placement and [self.placement.matrix.tolist(), self.placement.scale],
        }


def of_cameras(cameras: JsonObject) -> Scene:
    """A scene without images from `Scene.cameras`."""
    width, height, focal, center, aspect, distortion = cameras["lens"]
    placement = cameras["placement"]
    return Scene(
        Lens(width, height, focal, (center[0], center[1]), aspect, tuple(distortion)),
        torch.zeros(0, height, width, 3, dtype=torch.uint8),
        torch.tensor(cameras["poses"]),
        cameras["parts"],
        torch.tensor(cameras["box"]),
        tuple(cameras["background"]),
        cameras["forward"],
        placement=placement and PosePlacement(np.array(placement[0], np.float32), placement[1]),
    )


def load(path: str, folder: Path | None, progress: Progress) -> Scene:
    """The scene at a `data.path`. Raises UserError for what is no scene."""
    if path.partition(":")[0] in rendered_scenes.KINDS:
        return _rendered(rendered_scenes.parse(path))
    place = Path(path).expanduser()
    if folder is not None and not place.exists() and (folder / place).exists():
        place = folder / place
    if not place.exists():
        raise data_path.missing(path, "knot:")
    in_llff = (place / llff_folder.TABLE).exists()
    capture = llff_folder.read(place) if in_llff else transforms_file.read(_files(path, place))
    files = sorted(capture.files[0].parent.glob("transforms*.json"))
    others = [unused("file", file.name) for file in files if file not in capture.files]
    images, background, notes = read_images(capture.pictures, progress)
    return Scene(
        capture.lens, images, capture.poses, capture.parts, capture.box, background, capture.forward,
        notes=(*others, *capture.notes, *notes),
        files=tuple(map(str, [*capture.files, *dict.fromkeys(capture.pictures)])),
        placement=capture.placement,
    )  # fmt: skip


def _files(path: str, place: Path) -> list[Path]:
    """The files that describe the cameras. Raises UserError where there is none."""
    files = [place] if place.is_file() else [place / f"transforms_{part}.json" for part in transforms_file.PARTS]
    files = [file for file in files if file.exists()] or [place / "transforms.json"]
    if not files[0].exists():
        raise UserError(
            f"data.path = {path!r} holds no scene.",
            why="it has neither transforms_train.json, transforms.json nor poses_bounds.npy",
            do='a folder in the layout of Blender or LLFF, or path = "knot:"',
        )
    return files


def _rendered(made: rendered_scenes.Made) -> Scene:
    views = rendered_scenes.render(made)
    images = torch.stack([on_white(image) for part in views.values() for image in part.images])
    poses = torch.from_numpy(np.concatenate([part.poses for part in views.values()]))
    parts = {}
    first = 0
    for name, part in views.items():
        parts[name] = list(range(first, first + len(part.images)))
        first += len(part.images)
    lens = rendered_scenes.lens_of(made)
    return Scene(lens, images, poses, parts, box_of(lens, poses))
