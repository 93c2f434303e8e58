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
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
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
_OF_LENS = ("camera_angle_x", "fl_x", "cx", "cy", "w", "h")
_DISTORTION = ("k1", "k2", "k3", "k4", "k5", "k6", "p1", "p2", "is_fisheye")
_PERSPECTIVE = ("PINHOLE", "SIMPLE_PINHOLE", "SIMPLE_RADIAL", "RADIAL", "OPENCV", "FULL_OPENCV", "PERSPECTIVE")
"""Camera models without distortion, or with one that the other keys give."""
WIDEST = 80
"""Degrees from the mean direction up to which rays of forward-facing views have normalized device coordinates, which
are infinite at 90."""


class Placement(NamedTuple):
    """Where poses of a folder lie in the coordinates of its scene: `matrix` (float32 [4, 4]) times the pose, then its
    place times `scale`."""

    matrix: Array
    scale: float

    def of(self, poses: Array) -> Tensor:
        """Poses [..., 4, 4] of the folder in the scene's coordinates."""
        found = self.matrix @ poses
        found[..., :3, 3] *= self.scale
        return torch.from_numpy(found.astype(np.float32))


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
    placement: Placement | None = field(default=None, compare=False)

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
            "placement": self.placement and [self.placement.matrix.tolist(), self.placement.scale],
        }


def of_cameras(kept: Mapping[str, Any]) -> Scene:
    """A scene without images from `Scene.cameras`."""
    width, height, focal, center = kept["lens"]
    placement = kept.get("placement")  # which runs of earlier versions lack
    return Scene(
        Lens(width, height, focal, (center[0], center[1])),
        torch.zeros(0, height, width, 3, dtype=torch.uint8),
        torch.tensor(kept["poses"]),
        kept["parts"],
        torch.tensor(kept["box"]),
        tuple(kept["background"]),
        kept["forward"],
        placement=placement and Placement(np.array(placement[0], np.float32), placement[1]),
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
    images = torch.stack([on_white(image) for one in views.values() for image in one.images])
    poses = torch.from_numpy(np.concatenate([one.poses for one in views.values()]))
    counts = [len(one.images) for one in views.values()]
    lens = rendered_scenes.lens_of(made)
    return Scene(lens, images, poses, _numbered(dict(zip(views, counts, strict=True))), box_of(lens, poses))


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
    distortion = _distortion(tables)
    notes += [f"the distortion of the lens ({', '.join(distortion)}) is left out"] if distortion else []
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
    """The lens of all tables and frames. Raises UserError where they differ."""
    first = lens_of(tables[0], width, height, str(files[0]))
    for table, file in zip(tables, files, strict=True):
        _same(lens_of(table, width, height, str(file)), first, str(file), str(files[0]))
        for frame in table["frames"]:
            if own := {key: frame[key] for key in _OF_LENS if key in frame}:
                focal = bool({"camera_angle_x", "fl_x"} & set(own))
                common = {key: table[key] for key in _OF_LENS[2 if focal else 0 :] if key in table}
                where = f"{file}, frame {frame['file_path']!r}"
                _same(lens_of(common | own, width, height, where), first, where, str(files[0]))
    return first


def _same(lens: Lens, first: Lens, where: str, other: str) -> None:
    if np.allclose((lens.focal, *lens.center), (first.focal, *first.center), rtol=1e-3):
        return
    own, others = (f"{one.focal:.1f} pixels and a center at {one.center[0]:.1f}, {one.center[1]:.1f}"
                   for one in (lens, first))  # fmt: skip
    raise UserError(
        f"{where} has a focal length of {own}, and {other} one of {others}.",
        why="all views have one lens",
        do='the same "camera_angle_x" (or "fl_x", "cx" and "cy") in all files, and none in frames',
    )


def _distortion(tables: Sequence[Mapping[str, Any]]) -> list[str]:
    """What tables and frames say of a lens that is no pinhole with square pixels."""
    every = [one for table in tables for one in (table, *({**table, **frame} for frame in table["frames"]))]
    found = [key for key in _DISTORTION if any(one.get(key) for one in every)]
    found += ["fl_y"] if any(one.get("fl_y") not in (None, one.get("fl_x")) for one in every) else []
    models = {str(one.get("camera_model") or "PINHOLE") for one in every}
    return found + [f"camera_model {one}" for one in sorted(models) if one.upper() not in _PERSPECTIVE]


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
    images, first = torch.empty(0), torch.Size()
    for done, path in enumerate(paths):
        image = _image(path)
        if done == 0:
            first = image.shape
            images = torch.empty(len(paths), *first[:2], 3, dtype=torch.uint8)
        if image.shape[:2] != first[:2]:
            one, other = (f"{shape[1]} × {shape[0]}" for shape in (first, image.shape))
            raise UserError(
                f"{path} is {other}, and {paths[0]} is {one}.", why="all views have one lens", do="images of one size"
            )
        if image.shape[2] != first[2]:
            lacks, has = (paths[0], path) if image.shape[2] == 4 else (path, paths[0])
            raise UserError(
                f"{has} has an alpha channel, and {lacks} has none.",
                why="nobody knows what of the second is background",
                do="alpha in all images, or in none",
            )
        images[done] = on_white(image) if image.shape[2] == 4 else image
        progress(done + 1, len(paths))
    if first[2] == 4:
        return images, (1.0, 1.0, 1.0), []
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
    except (OSError, UnidentifiedImageError, SyntaxError, ValueError) as error:  # damaged chunks are the last two
        raise UserError(f"{path} is no image that can be read: {error}.", do="a PNG or JPEG") from None


# --- LLFF --------------------------------------------------------------------------------------------------------


def _llff(place: Path, progress: Progress) -> Scene:
    file = place / "poses_bounds.npy"
    table = _table(file)
    ends = (".png", ".jpg", ".jpeg")
    paths = sorted(one for one in (place / "images").glob("*") if one.suffix.lower() in ends)
    if len(paths) != len(table):
        raise UserError(f"{place} has {len(paths)} images and {len(table)} poses.", do="one image for each pose")
    parts = _split(len(table))
    _enough(parts["train"], str(place))
    images, background, notes = read_images(paths, progress)
    matrices = table[:, :15].reshape(-1, 3, 5).astype(np.float32)
    axes = np.stack([matrices[:, :, 1], -matrices[:, :, 0], matrices[:, :, 2]], 2)  # LLFF: down, right, back
    poses = [np.concatenate([axes[one], matrices[one, :, 3:4]], 1) for one in range(len(table))]
    rows = [_checked(torch.from_numpy(np.concatenate([pose, np.eye(4, dtype=np.float32)[3:]])), f"{file}, row {k}")
            for k, pose in enumerate(poses)]  # fmt: skip
    near = float(table[:, 15].min())
    if not (math.isfinite(near) and near > 0):
        raise UserError(f"{file} has a nearest depth of {near}.", do="depths above 0 in column 16")
    _, width, focal = _size_and_focal(matrices[:, :, 4], str(file))
    lens = Lens.of_angle(images.shape[2], images.shape[1], 2 * math.atan(0.5 * width / focal))
    every = torch.stack(rows).numpy()
    placement = _centred(every, 1 / (0.75 * near), str(file))
    placed = placement.of(every)
    box = _device_box(lens, placed, str(file))
    files = tuple(map(str, [file, *paths]))
    return Scene(lens, images, placed, parts, box, background, True, tuple(notes), files, placement)


def _table(file: Path) -> NDArray[np.float64]:
    """[views, 17]: a pose, with the size and focal length, and two depths a row."""
    do = "an array of 17 columns, as LLFF writes it"
    try:
        with file.open("rb") as opened:
            table = np.load(opened, allow_pickle=False)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"{file} cannot be read: {error}.", do=do) from None
    if not isinstance(table, np.ndarray) or table.dtype.kind not in "fiu":
        raise UserError(f"{file} is no array of numbers.", do=do)
    if table.ndim != 2 or table.shape[1] != 17:
        raise UserError(f"{file} has the shape {list(table.shape)}.", do="17 columns, as LLFF writes it")
    return table.astype(np.float64)


def _size_and_focal(rows: Array, where: str) -> tuple[float, float, float]:
    """Height, width and focal length that all rows [views, 3] have. Raises UserError."""
    words = [f"{width:g} × {height:g} pixels and a focal length of {focal:.1f}" for height, width, focal in rows]
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
    height, width, focal = map(float, rows[0])
    return height, width, focal


def _centred(poses: Array, scale: float, where: str) -> Placement:
    """Of poses as seen from their mean, which looks along -z, and times `scale`. Raises UserError without a mean."""
    back = _unit(poses[:, :3, 2].mean(0), where)
    right = _unit(np.cross(poses[:, :3, 1].mean(0), back), where)
    mean = np.eye(4, dtype=np.float32)
    mean[:3, :3] = np.stack([right, np.cross(back, right), back], 1)
    mean[:3, 3] = poses[:, :3, 3].mean(0)
    return Placement(np.linalg.inv(mean), scale)


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
