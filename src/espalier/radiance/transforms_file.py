"""transforms.json, as Blender's scenes, nerfstudio, instant-ngp and Metashape have it: frames with a picture, a pose
and maybe a lens of their own.

Blender's layout has a file for each part; in one file nerfstudio's `train_filenames`, `val_filenames` and
`test_filenames` name the parts, and without them every eighth picture is held out.
"""

from __future__ import annotations

from collections.abc import Sequence
from os.path import splitext
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from espalier.radiance import camera_poses, lens_keys, pictures
from espalier.radiance.camera_poses import rows_of
from espalier.radiance.capture import Capture, check_enough, held_out_split
from espalier.radiance.rays import Lens
from espalier.recipe.data_table import data_table
from espalier.recipe.errors import UserError
from espalier.recipe.foreign_files import Fields, FieldUse, JsonObject, printable, read_table
from espalier.recipe.units import plural

PARTS = ("train", "val", "test")
_FRAMES = '"frames": [{"file_path": …, "transform_matrix": …}, …]'
_DO = "a file as Blender's scenes or nerfstudio have it, an object with frames"
_LISTS = {part: f"{part}_filenames" for part in PARTS}
_ENDINGS = ("", ".png", ".jpg", ".jpeg", ".PNG", ".JPG", ".JPEG", ".webp")
"""What Blender's file_path may lack."""
REFUSED = data_table(__file__)
"""Keys that change what others mean, and what to do about each."""
FRAME_KEYS = Fields("key", frozenset({"file_path", "transform_matrix", *lens_keys.KEYS}), REFUSED, "frame")
FILE_KEYS = Fields("key", frozenset({"frames", "box", *_LISTS.values(), *lens_keys.KEYS}), REFUSED, "file")


class FrameView(NamedTuple):
    """A frame of a file: what it is called in messages, its entry, the keys of its lens, its picture and its part."""

    where: str
    frame: JsonObject
    lens: JsonObject
    picture: Path
    part: str


def read(files: Sequence[Path]) -> Capture:
    """The capture that one file describes, or one file for each part. Raises UserError."""
    tables = [read_table(file, _DO) for file in files]
    every = [view for file, table in zip(files, tables, strict=True) for view in _views(file, table)]
    views = list({(view.picture, str(view.frame.get("transform_matrix")), view.part): view for view in every}.values())
    notes = [f"{plural(len(every) - len(views), 'frame')} listed twice"] if len(views) < len(every) else []
    notes += _unused(files, tables, views)
    where = str(files[0])
    paths = [view.picture for view in views]
    poses = torch.stack([camera_poses.pose_of(view.frame, view.where) for view in views])
    kind, turned = pictures.headers(paths)
    lens = lens_keys.common_lens(
        [(view.where, lens_keys.lens_of(view.lens, kind.width, kind.height, view.where)) for view in views]
    )
    wide = views[0].lens.get("w", lens.width)
    if wide != lens.width:
        notes.append(f"the lens is scaled from pictures {wide} pixels wide to {lens.width}")
    parts = _parts(files, tables[0], views)
    left_out = len(views) - len({view for numbers in parts.values() for view in numbers})
    notes += [f"{plural(left_out, 'frame')} in none of {', '.join(_LISTS.values())}: not used"] if left_out else []
    check_enough(parts["train"], where)
    box = _box(tables[0], lens, poses, where)
    return Capture(lens, paths, poses, parts, box, files, (*notes, *pictures.repeated(paths), *turned))


def _views(file: Path, table: JsonObject) -> list[FrameView]:
    frames = table.get("frames")
    if not isinstance(frames, list) or not frames:
        raise UserError(f"{file} has no frames.", do=_FRAMES)
    for number, frame in enumerate(frames):
        if not isinstance(frame, dict) or not isinstance(frame.get("file_path"), str):
            keys = printable(", ".join(frame)) if isinstance(frame, dict) else type(frame).__name__
            raise UserError(f"{file}, frame {number} has no file_path.", why=f"it has {keys}", do=_FRAMES)
    places = [_picture(file, frame["file_path"]) for frame in frames]
    missing = [frame["file_path"] for frame, place in zip(frames, places, strict=True) if place is None]
    if missing:
        raise UserError(
            f"{file} names an image {_several(missing)} that is not there.",
            do="check the path, which is relative to that file; leave out frames without a picture",
        )
    part = file.stem.removeprefix("transforms_")
    return [
        FrameView(
            f"{file}, frame {printable(frame['file_path'])!r}", frame, lens_keys.of_frame(table, frame), place, part
        )
        for frame, place in zip(frames, places, strict=True)
        if place is not None
    ]


def _several(names: Sequence[str]) -> str:
    """The first of names, and how many more there are."""
    more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    return f"{printable(names[0])!r}{more}"


def _picture(file: Path, name: str) -> Path | None:
    """The picture that a frame names, with Windows' separators and with its ending in another case too; None where it
    is not there."""
    stem, suffix = splitext(name.replace("\\", "/"))
    spelled = (name, stem + suffix, stem + suffix.lower(), stem + suffix.upper())
    for candidate in (other + ending for ending in _ENDINGS for other in spelled):
        try:
            place = file.parent / candidate
            if place.is_file():
                return place
        except (OSError, ValueError):  # names that are too long, or hold what no name can
            return None
    return None


def _unused(files: Sequence[Path], tables: Sequence[JsonObject], views: Sequence[FrameView]) -> list[str]:
    """Names the keys that are not used. Raises UserError for those that change what others mean."""
    whole = FieldUse(FILE_KEYS, str(files[0]))
    single = FieldUse(FRAME_KEYS, str(files[0]))
    for file, table in zip(files, tables, strict=True):
        whole.origin = str(file)
        whole.count(_telling(table))
    for view in views:
        single.origin = view.where
        single.count(_telling(view.frame))
    return [*single.notes(), *whole.notes()]


def _telling(table: JsonObject) -> list[str]:
    """The keys of a table, without those that are refused and whose value changes nothing."""
    return [
        key
        for key, value in table.items()
        if key not in REFUSED
        or not all(
            cell in (None, "", 1 if key == "scale" else 0) for cell in (value if isinstance(value, list) else [value])
        )
    ]


# --- parts -------------------------------------------------------------------------------------------------------


def _parts(files: Sequence[Path], table: JsonObject, views: Sequence[FrameView]) -> dict[str, list[int]]:
    """Numbers of the views of each part. Raises UserError for a picture that is trained on and held out."""
    if len(files) > 1:
        parts = {part: [number for number, view in enumerate(views) if view.part == part] for part in PARTS}
    elif any(table.get(key) is not None for key in _LISTS.values()):
        parts = {part: _listed(files[0], table, part, views) for part in PARTS}
    else:
        return held_out_split([view.picture for view in views])
    parts["val"] = parts["val"] or parts["test"]
    trained = {views[number].picture.resolve() for number in parts["train"]}
    held_out = [views[number] for number in sorted({*parts["val"], *parts["test"]})]
    both = [view for view in held_out if view.picture.resolve() in trained]
    if both:
        names = [str(view.frame["file_path"]) for view in both]
        raise UserError(
            f"{files[-1].parent}: {_several(names)} is in the training views and in those held out.",
            why="figures of held-out views would be of pictures that were trained on",
            do="each picture in one part",
        )
    return parts


def _listed(file: Path, table: JsonObject, part: str, views: Sequence[FrameView]) -> list[int]:
    """Numbers of the views whose pictures nerfstudio's list of a part names. Raises UserError for another name."""
    key = _LISTS[part]
    given = table.get(key) or []
    names = map(str, given if isinstance(given, list) else [given])
    wanted = {name: place and place.resolve() for name, place in ((name, _picture(file, name)) for name in names)}
    there = [view.picture.resolve() for view in views]
    known = set(there)
    chosen = set(wanted.values())
    strange = [name for name, place in wanted.items() if place not in known]
    if strange:
        raise UserError(
            f"{file} names {_several(strange)} in {key}, and no frame has that picture.",
            do="the names that frames have as file_path",
        )
    return [number for number, place in enumerate(there) if place in chosen]


# --- what is looked at -------------------------------------------------------------------------------------------


def _box(table: JsonObject, lens: Lens, poses: Tensor, where: str) -> Tensor:
    """The box of a table, else the cube that cameras see. Raises UserError."""
    if "box" not in table:
        return camera_poses.seen_box(lens, poses, where)
    box = rows_of(table["box"], (2,), 3)
    if box is None or not bool((box[0] < box[1]).all() and box.isfinite().all()):
        raise UserError(
            f"{where} has a box {printable(table['box'])}.",
            do='"box": [[x, y, z], [x, y, z]], the lower corner first',
        )
    camera_poses.check_facing(poses, box, where)
    return box
