"""A capture: pictures of a scene, not decoded yet, with their cameras, as a folder of another program gives them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from espalier.radiance.camera_poses import PosePlacement
from espalier.radiance.rays import Lens
from espalier.recipe.errors import UserError

HELD_OUT = 8
"""One of so many pictures is held out where a folder names none."""
FEWEST = 3


@dataclass(frozen=True)
class Capture:
    """Views of one scene, their pictures not decoded yet.

    Attributes:
        lens: what all views are seen through, for the size of the pictures.
        pictures: one file for each view; views may share one.
        poses: float32 [views, 4, 4] in the coordinates of the scene.
        parts: `train`, `val` and `test`: numbers of views.
        box: float32 [2, 3], the corners of what is looked at, in the coordinates of rays.
        files: what describes the cameras.
        notes: what the user should know.
        forward, placement: as in `Scene`.
    """

    lens: Lens
    pictures: Sequence[Path]
    poses: Tensor
    parts: Mapping[str, Sequence[int]]
    box: Tensor
    files: Sequence[Path]
    notes: tuple[str, ...] = ()
    forward: bool = False
    placement: PosePlacement | None = None


def held_out_split(pictures: Sequence[Path]) -> dict[str, list[int]]:
    """Every eighth picture for validation and test alike; views of one picture stay together."""
    distinct = list(dict.fromkeys(pictures))
    apart = set(distinct[::HELD_OUT]) if len(distinct) > FEWEST else set()
    held_out = [view for view, picture in enumerate(pictures) if picture in apart]
    train = [view for view, picture in enumerate(pictures) if picture not in apart]
    return {"train": train, "val": held_out, "test": held_out}


def check_enough(train: Sequence[int], where: str) -> None:
    """Raises UserError for fewer training views than determine a scene."""
    if len(train) < FEWEST:
        raise UserError(
            f"{where} has {len(train)} views to train on.",
            why=f"a scene is not determined by fewer than {FEWEST}",
            do="add views",
        )
