"""Scenes in the table of kinds: opened, planned, frozen into the run folder, and rendered by `espalier predict`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from espalier.radiance import energy, scenes
from espalier.radiance.camera_poses import pose_of
from espalier.radiance.lens_keys import lens_of
from espalier.radiance.rays import Lens, turntable_poses
from espalier.radiance.workload import RadianceWorkload
from espalier.recipe import Recipe, data_hash
from espalier.recipe.cache_dir import writing
from espalier.recipe.cost import Profile
from espalier.recipe.errors import UserError
from espalier.recipe.foreign_files import read_table
from espalier.recipe.units import show_count
from espalier.store import artifacts
from espalier.train.workload_row import (
    Answer,
    CountsEnergy,
    EnergyTables,
    Freezes,
    Opening,
    Predicts,
    Renders,
    Row,
    Sampling,
)
from espalier.train.wrap_policy import profile

CAMERAS = "scene.json"
TURNS = 36
"""Pictures of a turntable."""
_MOST = 4096


def views_of(workload: RadianceWorkload, text: str | None) -> list[tuple[str, Lens, Tensor]]:
    """(file to write, lens, pose) of what is asked for. Raises UserError."""
    scene = workload.scene
    if text is None or text.isdecimal():
        test = list(scene.parts["test"]) or list(scene.parts["val"]) or list(scene.parts["train"])
        if text is not None and int(text) >= len(test):
            raise UserError(f"There is no test view {text}.", do=f"a number up to {len(test) - 1}, or a JSON file")
        return [
            (f"view-{k}.png", scene.lens, scene.poses[test[k]]) for k in ([int(text)] if text else range(len(test)))
        ]
    if text.lstrip().startswith("{"):
        raise UserError("The input is JSON itself.", do="the name of the file, without @")
    file = Path(text).expanduser()
    table = read_table(file, "a JSON file with frames")
    frames = table.get("frames", [table])
    if not isinstance(frames, list) or not frames or not all(isinstance(frame, dict) for frame in frames):
        raise UserError(f"{file} has no frames.", do='"frames": [{"transform_matrix": …}, …], or one transform_matrix')
    lens = _lens(scene.lens, table, str(file))
    names = [file.stem + (f"-{k}" if len(frames) > 1 else "") + ".png" for k in range(len(frames))]
    poses = [pose_of(frame, f"{file}, frame {k}") for k, frame in enumerate(frames)]
    if scene.placement is not None:
        poses = [scene.placement.of(pose.numpy()) for pose in poses]
    return [(name, lens, pose) for name, pose in zip(names, poses, strict=True)]


def _lens(lens: Lens, table: Mapping[str, Any], where: str) -> Lens:
    """The scene's lens in the file's size, or the file's own."""
    width = table.get("w", lens.width)
    height = table.get("h", lens.height)
    if not all(isinstance(length, int) and 1 <= length <= _MOST for length in (width, height)):
        raise UserError(f"{where} asks for {width} × {height} pixels.", do=f"w and h from 1 to {_MOST}")
    if {"camera_angle_x", "fl_x"} & set(table):
        return lens_of(table, width, height, where)
    return lens.resized(width, height)


class SceneRow(Row, Freezes, Predicts, Renders, CountsEnergy):
    """Radiance fields of scenes."""

    reading = "Reading the scene"

    def open(self, recipe: Recipe, opening: Opening) -> RadianceWorkload:
        """Reads the pictures, or the cameras that the run has frozen."""
        cameras = None if opening.frozen is None else opening.frozen / CAMERAS
        if cameras is not None and cameras.exists() and not opening.reads:
            return RadianceWorkload(recipe, scenes.of_cameras(json.loads(cameras.read_text(encoding="utf-8"))))
        return RadianceWorkload(recipe, scenes.load(recipe.data[0].path, opening.folder, opening.progress))

    def profile(self, recipe: Recipe, opened: Callable[[], RadianceWorkload]) -> Profile:
        """Of the field in the scene."""
        workload = opened()
        return replace(profile(workload), sparse=workload.sparse_gradients())

    def contents(self, recipe: Recipe, workload: RadianceWorkload) -> Mapping[str, str]:
        """Of each picture."""
        files = workload.scene.files
        hashes = data_hash.hashes({file: file for file in files})
        return hashes or {recipe.data[0].path: workload.fingerprint()}

    def freeze(self, workload: RadianceWorkload, folder: Path) -> None:
        """The cameras."""
        (folder / CAMERAS).write_text(json.dumps(workload.scene.cameras()), encoding="utf-8")

    def suffices(self, frozen: Path, evaluation: bool) -> bool:
        """Views are rendered from cameras alone; a validation compares them with pictures."""
        return not evaluation

    def answer(self, workload: RadianceWorkload, model: nn.Module, text: str | None, sampling: Sampling) -> Answer:
        """Renders the views of a JSON file, or test views by number, into PNG files in the working directory."""
        views = views_of(workload, text)

        def write() -> Iterator[str]:
            for name, lens, pose in views:
                rendered = workload.render(model, lens, pose)
                with writing(name, "go to another working directory"):
                    Path(name).write_bytes(artifacts.encode(rendered.image.numpy()))
                yield f"{name}\n"

        return Answer(write(), lambda: {"images": [line.strip() for line in write()]})

    def usage(self, recipe: Mapping[str, Any]) -> tuple[str, str]:
        """The first test view."""
        return "views", " 0"

    def turntable(self, workload: RadianceWorkload, model: nn.Module, file: Path) -> str:
        """An animation of a way round the scene."""
        from PIL import Image

        if file.suffix.lower() != ".gif":
            raise UserError(f"--turntable {file} is no GIF.", do=f"--turntable {file.with_suffix('.gif')}")
        scene = workload.scene
        poses = torch.from_numpy(turntable_poses(scene.poses.numpy(), TURNS, scene.forward))
        pictures = [Image.fromarray(workload.render(model, scene.lens, pose).image.numpy()) for pose in poses]
        with writing(file, "name another file"):
            pictures[0].save(file, save_all=True, append_images=pictures[1:], duration=80, loop=0)
        return f"{file}: {TURNS} views of {scene.lens.width} × {scene.lens.height}"

    def energy(self, workload: RadianceWorkload, model: nn.Module) -> EnergyTables:
        """Of the first test view."""
        ((_, lens, pose),) = views_of(workload, "0")
        view_energy = energy.of_view(model, workload.rendered(model, lens, pose))
        rows = [
            (name, where, show_count(macs), show_count(acs), f"{1e6 * joules:.3g} µJ", f"{share:.1%}")
            for name, where, macs, acs, joules, share in energy.colour_rows(workload.options, view_energy)
        ]
        columns = ("colour network", "directions", "MACs", "accumulations", "energy", "of the plain network's")
        title = (
            f"The colour network alone, without memory, on {view_energy.samples:,} samples of {view_energy.rays:,} rays"
        )
        if bool(view_energy.spikes.any()):
            rates = [
                f"{int(count) / max(1, view_energy.samples * workload.options.width):.3f}"
                for count in view_energy.spikes
            ]
            title += f"; spikes of a neuron and sample: {rates[0]} and {rates[1]}"
        what = f"an image of {lens.width} × {lens.height} pixels (the first test view)"
        return EnergyTables(what, view_energy.parts, [(title, columns, rows)])


ROW = SceneRow()
