"""Scenes: views with their cameras, rendered here (`spheres:`, `knot:`) or read from Blender's and LLFF's folders.

Blender's layout has `transforms_train.json` (and `_val`, `_test`) or one `transforms.json`: `camera_angle_x` or `fl_x`,
and `frames` with `file_path` and `transform_matrix`. LLFF's has `poses_bounds.npy` [views, 17] and `images/`: such
scenes are forward-facing, and their rays are in normalized device coordinates. Where a folder says nothing else, every
eighth view is held out. Colours with alpha are put on white.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from espalier.config import data_path
from espalier.errors import UserError
from espalier.radiance import rendered_scenes
from espalier.radiance.rays import Array, Lens, Rays, device_coordinates, focus_of, rays_of
from espalier.workload import Progress

HELD_OUT = 8
"""One of so many views is held out where a folder names none."""
FEWEST = 3
_PARTS = ("train", "val", "test")


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

    def rays(self, views: Tensor, pixels: Tensor) -> Rays:
        """Rays of pixels (row * width + column) of views; both int64 [rays]."""
        return rays_of(self.lens, self.poses[views], pixels, self.forward)

    def colours(self, views: Tensor, pixels: Tensor) -> Tensor:
        """True colours of pixels: float32 [rays, 3] from 0 to 1."""
        return self.images.view(len(self.images), -1, 3)[views, pixels].float() / 255

    def fingerprint(self) -> str:
        """Hash of images and cameras."""
        digest = hashlib.sha256(self.images.numpy().tobytes() + self.poses.numpy().tobytes())
        return digest.hexdigest()[:16]

    def cameras(self) -> dict[str, Any]:
        """All but the images, as JSON takes it."""
        return {
            "lens": [self.lens.width, self.lens.height, self.lens.focal, list(self.lens.center)],
            "poses": self.poses.tolist(),
            "parts": {name: list(views) for name, views in self.parts.items()},
            "box": self.box.tolist(),
            "background": list(self.background),
            "forward": self.forward,
        }


def of_cameras(kept: Mapping[str, Any]) -> Scene:
    """A scene without images from `Scene.cameras`."""
    width, height, focal, center = kept["lens"]
    return Scene(
        Lens(width, height, focal, (center[0], center[1])),
        torch.zeros(0, height, width, 3, dtype=torch.uint8),
        torch.tensor(kept["poses"]),
        kept["parts"],
        torch.tensor(kept["box"]),
        tuple(kept["background"]),
        kept["forward"],
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
    if place.is_dir() and (place / "poses_bounds.npy").exists():
        return _llff(place, progress)
    files = [place] if place.is_file() else [place / f"transforms_{part}.json" for part in _PARTS]
    files = [one for one in files if one.exists()] or [place / "transforms.json"]
    if not files[0].exists():
        raise UserError(
            f"data.path = {path!r} holds no scene.",
            why="it has neither transforms_train.json, transforms.json nor poses_bounds.npy",
            do='a folder in the layout of Blender or LLFF, or path = "knot:"',
        )
    return _blender(files, progress)


def _rendered(made: rendered_scenes.Made) -> Scene:
    views = rendered_scenes.render(made)
    images = torch.cat([one.images for one in views.values()])
    poses = torch.from_numpy(np.concatenate([one.poses for one in views.values()]))
    counts = [len(one.images) for one in views.values()]
    lens = rendered_scenes.lens_of(made)
    return Scene(lens, on_white(images), poses, _numbered(dict(zip(views, counts, strict=True))), box_of(lens, poses))


def _numbered(counts: Mapping[str, int]) -> dict[str, list[int]]:
    found, first = {}, 0
    for name, count in counts.items():
        found[name] = list(range(first, first + count))
        first += count
    return found


def on_white(images: Tensor) -> Tensor:
    """uint8 [..., 4], colours not multiplied by alpha, on white: uint8 [..., 3]."""
    alpha = images[..., 3:].float() / 255
    return (images[..., :3] * alpha + 255 * (1 - alpha)).round().to(torch.uint8)


def box_of(lens: Lens, poses: Tensor) -> Tensor:
    """The cube round the point that all cameras look at, as large as every one of them sees whole."""
    center = torch.from_numpy(focus_of(poses.numpy()))
    distance = (poses[:, :3, 3] - center).norm(dim=1).amin()
    half = distance * math.sin(math.atan(0.5 * min(lens.width, lens.height) / lens.focal))
    return torch.stack([center - half, center + half])


# --- Blender -----------------------------------------------------------------------------------------------------


def _blender(files: Sequence[Path], progress: Progress) -> Scene:
    tables = [read_json(file) for file in files]
    frames = [(file, frame) for file, table in zip(files, tables, strict=True) for frame in _frames(file, table)]
    paths = [_image_of(file, frame) for file, frame in frames]
    poses = torch.stack([pose_of(frame, f"{file}, frame {frame['file_path']!r}") for file, frame in frames])
    images, background, notes = read_images(paths, progress)
    lens = _one_lens(tables, images.shape[2], images.shape[1], files)
    if len(files) == 1:
        parts = _split(len(frames))
    else:
        names = [file.stem.removeprefix("transforms_") for file in files]
        parts = _numbered({name: len(table["frames"]) for name, table in zip(names, tables, strict=True)})
        parts = {"train": parts.get("train", []), "val": [], "test": [], **parts}
        parts["val"] = parts["val"] or parts["test"]
    _enough(parts["train"], str(files[0]))
    bad = [key for key in ("k1", "k2", "p1", "p2") if tables[0].get(key)]
    bad += ["fl_y"] if tables[0].get("fl_y") not in (None, tables[0].get("fl_x")) else []
    notes += [f"the distortion of the lens ({', '.join(bad)}) is left out"] if bad else []
    box = _box(tables[0]["box"], str(files[0])) if "box" in tables[0] else _seen(lens, poses, str(files[0]))
    return Scene(
        lens, images, poses, parts, box, background, notes=tuple(notes), files=tuple(map(str, [*files, *paths]))
    )


def _box(given: Any, where: str) -> Tensor:
    try:
        box = torch.tensor(given, dtype=torch.float32)
    except (TypeError, ValueError):
        box = torch.empty(0)
    if box.shape != (2, 3) or not bool((box[0] < box[1]).all() and box.isfinite().all()):
        raise UserError(f"{where} has a box {given!r}.", do='"box": [[x, y, z], [x, y, z]], the lower corner first')
    return box


def _seen(lens: Lens, poses: Tensor, where: str) -> Tensor:
    box = box_of(lens, poses)
    if not float((box[1] - box[0]).min()) > 1e-6:
        raise UserError(
            f"The cameras of {where} do not look at one point from outside.",
            why="one of them stands where their axes meet, as in a panorama",
            do='"box": [[x, y, z], [x, y, z]] in that file, the corners of what is looked at',
        )
    return box


def read_json(file: Path) -> dict[str, Any]:
    """An object in a file. Raises UserError."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{file} does not exist.", do="check the path") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"{file} is no JSON: {error}.", do="a file as Blender's scenes have it") from None
    if not isinstance(found, dict):
        raise UserError(f"{file} is a JSON {type(found).__name__}.", do='an object with "frames"')
    return found


def _frames(file: Path, table: Mapping[str, Any]) -> list[dict[str, Any]]:
    frames = table.get("frames")
    good = isinstance(frames, list) and all(isinstance(one, dict) and "file_path" in one for one in frames)
    if not good or not frames:
        raise UserError(f"{file} has no frames.", do='"frames": [{"file_path": …, "transform_matrix": …}, …]')
    return list(frames)


def _image_of(file: Path, frame: Mapping[str, Any]) -> Path:
    place = file.parent / str(frame["file_path"])
    found = [one for one in (place, *(place.with_name(place.name + end) for end in (".png", ".jpg"))) if one.is_file()]
    if not found:
        raise UserError(f"{file} names an image {str(frame['file_path'])!r} that is not there.", do="check the path")
    return found[0]


def pose_of(frame: Mapping[str, Any], where: str) -> Tensor:
    """The pose of a frame: float32 [4, 4]. Raises UserError where it is none."""
    try:
        pose = torch.tensor(frame["transform_matrix"], dtype=torch.float32)
    except (KeyError, TypeError, ValueError):
        raise UserError(f"{where} has no transform_matrix of numbers.", do="four rows of four numbers") from None
    if pose.shape not in ((4, 4), (3, 4)):
        raise UserError(f"{where} has a transform_matrix {list(pose.shape)}.", do="four rows of four numbers")
    return _checked(torch.cat([pose, torch.eye(4)[3:]]) if len(pose) == 3 else pose, where)


def _checked(pose: Tensor, where: str) -> Tensor:
    if not bool(pose.isfinite().all()):
        raise UserError(f"{where} has a pose that is not finite.", do="leave that frame out, or correct it")
    lengths = pose[:3, :3].norm(dim=0)
    if float(lengths.min()) == 0 or abs(float(torch.linalg.det(pose[:3, :3] / lengths))) < 1e-3:
        raise UserError(
            f"{where} has a singular pose.",
            why="its three axes do not span the space",
            do="leave that frame out, or correct it",
        )
    return torch.cat([torch.cat([pose[:3, :3] / lengths, pose[:3, 3:]], 1), torch.eye(4)[3:]])


def lens_of(table: Mapping[str, Any], width: int, height: int, where: str) -> Lens:
    """The lens of a table for images of this size. Raises UserError."""
    try:
        angle, focal = float(table.get("camera_angle_x", math.nan)), float(table.get("fl_x", math.nan))
        factor = width / float(table.get("w", width))
        center = (float(table.get("cx", 0.5 * width / factor)), float(table.get("cy", 0.5 * height / factor)))
    except (TypeError, ValueError, ZeroDivisionError):
        angle, focal, factor, center = math.nan, math.nan, 1.0, (0.0, 0.0)
    if not all(map(math.isfinite, center)):
        raise UserError(f"{where} has an optical center {center}.", do='"cx" and "cy" in pixels, or neither')
    if not 0 < factor < math.inf:
        raise UserError(f"{where} has a width of {table.get('w')}.", do='"w" in pixels, or leave it out')
    if isinstance(tall := table.get("h", height / factor), int | float) and abs(tall * factor - height) > 1:
        raise UserError(
            f"{where} is of images of {table.get('w', width)} × {tall} pixels, and its images have {width} × {height}.",
            do='the "w" and "h" of these images before they were made smaller, or neither',
        )
    if math.isfinite(focal) and focal > 0:
        return Lens(width, height, focal * factor, (center[0] * factor, center[1] * factor))
    if not 0 < angle < math.pi:
        raise UserError(
            f"{where} says nothing of the lens.", do='"camera_angle_x": radians between 0 and 3.14, or "fl_x": pixels'
        )
    return Lens.of_angle(width, height, angle)._replace(center=(center[0] * factor, center[1] * factor))


def _one_lens(tables: Sequence[Mapping[str, Any]], width: int, height: int, files: Sequence[Path]) -> Lens:
    """The lens of all tables. Raises UserError where they differ."""
    every = [lens_of(table, width, height, str(file)) for table, file in zip(tables, files, strict=True)]
    for lens, file in zip(every, files, strict=True):
        if not np.allclose((lens.focal, *lens.center), (every[0].focal, *every[0].center), rtol=1e-3):
            raise UserError(
                f"{file} has a focal length of {lens.focal:.1f} pixels, and {files[0]} one of {every[0].focal:.1f}.",
                why="all views have one lens",
                do='the same "camera_angle_x" (or "fl_x", "cx" and "cy") in all files',
            )
    return every[0]


def _split(views: int) -> dict[str, list[int]]:
    held = list(range(0, views, HELD_OUT)) if views > FEWEST else []
    return {"train": [one for one in range(views) if one not in held], "val": held, "test": held}


def _enough(train: Sequence[int], where: str) -> None:
    if len(train) < FEWEST:
        raise UserError(
            f"{where} has {len(train)} views to train on.",
            why=f"a scene is not determined by fewer than {FEWEST}",
            do="add views",
        )


# --- images ------------------------------------------------------------------------------------------------------


def read_images(paths: Sequence[Path], progress: Progress) -> tuple[Tensor, tuple[float, float, float], list[str]]:
    """(uint8 [views, height, width, 3] on their background, its colour, remarks). Raises UserError."""
    found: list[Tensor] = []
    for done, path in enumerate(paths):
        found.append(_image(path))
        if found[-1].shape[:2] != found[0].shape[:2]:
            one, other = (f"{image.shape[1]} × {image.shape[0]}" for image in (found[0], found[-1]))
            raise UserError(
                f"{path} is {other}, and {paths[0]} is {one}.", why="all views have one lens", do="images of one size"
            )
        if found[-1].shape[2] != found[0].shape[2]:
            lacks, has = (paths[0], path) if found[-1].shape[2] == 4 else (path, paths[0])
            raise UserError(
                f"{has} has an alpha channel, and {lacks} has none.",
                why="nobody knows what of the second is background",
                do="alpha in all images, or in none",
            )
        progress(done + 1, len(paths))
    images = torch.stack(found)
    if images.shape[3] == 4:
        return on_white(images), (1.0, 1.0, 1.0), []
    border = (
        torch.cat([images[:, 0], images[:, -1], images[:, :, 0], images[:, :, -1]], 1).float().view(-1, 3).median(0)
    )
    colour = (border.values / 255).tolist()
    note = f"images without alpha: the background is the usual colour of their borders, {[round(c, 2) for c in colour]}"
    return images, (colour[0], colour[1], colour[2]), [note]


def _image(path: Path) -> Tensor:
    """uint8 [height, width, 3 or 4]."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise UserError("Images are read with Pillow.", do='pip install "espalier[scenes]"') from None
    try:
        with Image.open(path) as opened:
            if opened.mode.startswith("I"):  # 16 bits of grey, which Pillow would cut off at 255
                grey = np.rint(np.asarray(opened).astype(np.float32) / 257).clip(0, 255).astype(np.uint8)
                return torch.from_numpy(grey)[:, :, None].repeat(1, 1, 3)
            alpha = "A" in opened.getbands() or "transparency" in opened.info
            return torch.from_numpy(np.array(opened.convert("RGBA" if alpha else "RGB")))
    except (OSError, UnidentifiedImageError) as error:
        raise UserError(f"{path} is no image that can be read: {error}.", do="a PNG or JPEG") from None


# --- LLFF --------------------------------------------------------------------------------------------------------


def _llff(place: Path, progress: Progress) -> Scene:
    file = place / "poses_bounds.npy"
    try:
        table = np.load(file, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read: {error}.", do="an array of 17 columns, as LLFF writes it") from None
    if table.ndim != 2 or table.shape[1] != 17:
        raise UserError(f"{file} has the shape {list(table.shape)}.", do="17 columns, as LLFF writes it")
    ends = (".png", ".jpg", ".jpeg")
    paths = sorted(one for one in (place / "images").glob("*") if one.suffix.lower() in ends)
    if len(paths) != len(table):
        raise UserError(f"{place} has {len(paths)} images and {len(table)} poses.", do="one image for each pose")
    images, background, notes = read_images(paths, progress)
    matrices = table[:, :15].reshape(-1, 3, 5).astype(np.float32)
    axes = np.stack([matrices[:, :, 1], -matrices[:, :, 0], matrices[:, :, 2]], 2)  # LLFF: down, right, back
    poses = [np.concatenate([axes[one], matrices[one, :, 3:4]], 1) for one in range(len(table))]
    rows = [_checked(torch.from_numpy(np.concatenate([pose, np.eye(4, dtype=np.float32)[3:]])), f"{file}, row {k}")
            for k, pose in enumerate(poses)]  # fmt: skip
    near = float(table[:, 15].min())
    if not (math.isfinite(near) and near > 0):
        raise UserError(f"{file} has a nearest depth of {near}.", do="depths above 0 in column 16")
    parts = _split(len(table))
    _, width, focal = map(float, matrices[0, :, 4])
    if not (0 < width < math.inf and 0 < focal < math.inf):
        raise UserError(f"{file}, row 0 says nothing of the lens.", do="width and focal length above 0, in pixels")
    lens = Lens.of_angle(images.shape[2], images.shape[1], 2 * math.atan(0.5 * width / focal))
    _enough(parts["train"], str(place))
    centred = _centred(torch.stack(rows).numpy(), 1 / (0.75 * near), str(file))
    box = _device_box(lens, centred)
    return Scene(lens, images, centred, parts, box, background, True, tuple(notes), tuple(map(str, [file, *paths])))


def _centred(poses: Array, scale: float, where: str) -> Tensor:
    """Poses seen from their mean, which looks along -z, and times `scale`. Raises UserError where there is none."""
    back = _unit(poses[:, :3, 2].mean(0), where)
    right = _unit(np.cross(poses[:, :3, 1].mean(0), back), where)
    mean = np.eye(4, dtype=np.float32)
    mean[:3, :3] = np.stack([right, np.cross(back, right), back], 1)
    mean[:3, 3] = poses[:, :3, 3].mean(0)
    found = np.linalg.inv(mean) @ poses
    found[:, :3, 3] *= scale
    return torch.from_numpy(found.astype(np.float32))


def _unit(vector: Array, where: str) -> Array:
    length = float(np.linalg.norm(vector))
    if length < 1e-3:
        raise UserError(
            f"The cameras of {where} do not face one side.",
            why="their directions add up to nothing, and scenes in LLFF's layout are forward-facing",
            do="Blender's layout (transforms.json) for cameras round a scene",
        )
    return vector / length


def _device_box(lens: Lens, poses: Tensor) -> Tensor:
    """What the corners of all views reach between the near plane and infinity."""
    last = lens.width * lens.height - 1
    pixels = torch.tensor([0, lens.width - 1, last - lens.width + 1, last]).repeat(len(poses))
    cameras = poses.repeat_interleave(4, 0)
    seen = rays_of(lens, cameras, pixels)
    start, towards = device_coordinates(lens, seen.origins, seen.views)
    both = torch.cat([start, start + towards])
    return torch.stack([both.amin(0), both.amax(0)])
