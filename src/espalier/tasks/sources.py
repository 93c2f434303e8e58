"""Data of tasks: glyph pictures with their names, windows of text, nodes of a graph with neighbours, rays of a scene,
or anybody's."""

from __future__ import annotations

import importlib.util
import re
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, Subset

from espalier.graph.data import sources as graphs
from espalier.graph.data.text_columns import with_text
from espalier.language import text_sources
from espalier.radiance import scenes
from espalier.radiance.scenes import Scene
from espalier.recipe import Data, GraphOptions, Recipe, TaskOptions
from espalier.recipe.cache_dir import CACHE, cache_folder, writing
from espalier.recipe.errors import UserError
from espalier.recipe.import_function import function

Sample = dict[str, Tensor]

SIDE = 28
"""Pixels of the side of a glyph's picture."""
LAST = 0x2FFF
"""The last character that is drawn; beyond are ideographs, whose names are numbers."""
MOST = 1 << 22
"""Bytes of text that are kept."""
FANOUT = 8
"""Neighbours of a node that its sample has."""
HELD_OUT = 20
"""One of so many samples is held out, and at most `VALIDATED` of them."""
VALIDATED = 256

RAYS = 4096
"""Rays of held-out views that validations look at, at most."""

_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


class ArrayDataset(Dataset[Sample]):
    """Samples that are rows of arrays of equal length."""

    def __init__(self, **fields: NDArray[Any]) -> None:
        self.fields = fields
        self.notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(next(iter(self.fields.values())))

    def __getitem__(self, index: int) -> Sample:
        fields = {name: torch.from_numpy(np.array(rows[index])) for name, rows in self.fields.items()}
        if "image" in fields:
            fields["image"] = fields["image"].float() / 255
        return {name: value.long() if name in ("text", "label") else value for name, value in fields.items()}


class Nodes(Dataset[Sample]):
    """Nodes with a label, each with some of its neighbours: the same ones whenever it is asked."""

    def __init__(self, graph: Any) -> None:
        self.graph = graph
        self.notes = tuple(graph.notes)
        self.labelled = np.flatnonzero(np.asarray(graph.labels) >= 0)

    def __len__(self) -> int:
        return len(self.labelled)

    def __getitem__(self, index: int) -> Sample:
        node = int(self.labelled[index])
        near = self.graph.indices[self.graph.indptr[node] : self.graph.indptr[node + 1]]
        drawn = np.random.default_rng(node).choice(near, FANOUT) if len(near) else np.full(FANOUT, node)
        rows = np.asarray(self.graph.features[np.concatenate([[node], drawn])], np.float32)
        return {"nodes": torch.from_numpy(rows), "label": torch.tensor(int(self.graph.labels[node]))}


class SceneRays(Dataset[Sample]):
    """Rays of a scene's views, by number among all their pixels: `rays` float32 [9], origin, direction and what colours
    see of it; `colour` float32 [3]. `most`: so many at most, spread evenly."""

    def __init__(self, scene: Scene, views: Sequence[int], most: int | None = None) -> None:
        self.scene = scene
        self.views = torch.tensor(list(views), dtype=torch.int64)
        self.notes = tuple(scene.notes)
        self.every = len(self.views) * scene.lens.width * scene.lens.height
        self.size = min(self.every, most or self.every)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Sample:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        rays = self.fields(torch.tensor(list(indices), dtype=torch.int64) * self.every // self.size)
        return [{name: value[row] for name, value in rays.items()} for row in range(len(indices))]

    def view(self, number: int) -> Sample:
        """All rays of a view, row after row."""
        pixels = self.scene.lens.width * self.scene.lens.height
        return self.fields(torch.arange(number * pixels, (number + 1) * pixels))

    def fields(self, pixels: Tensor) -> Sample:
        """Of pixels, numbered over all views."""
        which = self.views[pixels // (each := self.every // len(self.views))]
        place = pixels % each
        return {"rays": torch.cat(self.scene.rays(which, place), 1), "colour": self.scene.colours(which, place)}


def load(task: TaskOptions, recipe: Recipe, folder: Path | None) -> tuple[Dataset[Sample], Dataset[Sample]]:
    """(training, held-out) samples of a task. Raises UserError where it has none, or they are of the wrong kind."""
    if task.loss == "colours":
        scene = scenes.load(task.data, folder, lambda done, total: None)
        return SceneRays(scene, scene.parts["train"]), SceneRays(scene, scene.parts["val"], RAYS)
    length = getattr(recipe.model, "length", 64)
    if task.data == "python:glyphs":
        whole: Dataset[Sample] = glyphs(length)
    elif _FUNCTION.fullmatch(task.data) and task.data.partition(":")[0] not in (
        "python",
        "pyg",
        "hf",
        "rmat",
        "planted",
    ):
        whole = _own(task, folder)
    elif task.loss == "classes":
        whole = _nodes(task)
    else:
        whole = windows(task.data, length)
    size = len(whole)  # type: ignore[arg-type]
    if size < max(HELD_OUT, task.batch):
        raise UserError(
            f"The task {task.name!r} has {size} samples.",
            why=f"one in {HELD_OUT} is held out, and a batch has {task.batch}",
            do="more data, or a smaller batch",
        )
    validation = range(HELD_OUT - 1, size, HELD_OUT)
    return Subset(whole, [k for k in range(size) if k not in validation]), Subset(whole, list(validation)[:VALIDATED])


def notes(dataset: object) -> tuple[str, ...]:
    """What the readers of the data behind `dataset` did not use."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return tuple(getattr(dataset, "notes", ()))


def check_fields(task: TaskOptions, kinds: Sequence[str], sample: Sample) -> None:
    """Raises UserError where a sample lacks what the task's towers or its loss read."""
    fields = {"text": "text", "image": "image", "graph": "nodes", "voxels": "rays"}
    wanted = [fields[kind] for kind in kinds] + ["label"] * (task.loss == "classes")
    missing = [name for name in wanted if name not in sample]
    if missing:
        raise UserError(
            f"The samples of the task {task.name!r} have {', '.join(sample)}, and no {missing[0]!r}.",
            why=f"data = {task.data!r} is read by towers of the kinds {', '.join(kinds)}",
            do="other data, or another tower",
        )


def _own(task: TaskOptions, folder: Path | None) -> Dataset[Sample]:
    made, author = function(task.data, folder)
    with author.answers(f"when it was called for the task {task.name!r}"):
        data = made()
        if not (hasattr(data, "__len__") and hasattr(data, "__getitem__") and isinstance(data[0], dict)):
            raise TypeError("it returns no dataset of dictionaries")
    return data


def _nodes(task: TaskOptions) -> Nodes:
    graph = with_text(graphs.load(Data(path=task.data), GraphOptions()), 0)
    if graph.labels is None or np.asarray(graph.labels).ndim != 1:
        raise UserError(f"The graph of the task {task.name!r} has no class for its nodes.", do="a graph with labels")
    return Nodes(graph)


def windows(path: str, length: int) -> ArrayDataset:
    """Windows of `length` bytes of the texts of `path`, one after the other."""
    pieces = []
    size = 0
    notes = list[str]()
    for document in text_sources.documents(Data(path=path), notes=notes):
        pieces.append(document.data[: MOST - size])
        size += len(pieces[-1])
        if size >= MOST:
            break
    joined = np.frombuffer(b"".join(pieces), np.uint8)
    rows = ArrayDataset(text=joined[: len(joined) // length * length].reshape(-1, length))
    rows.notes = tuple(notes)
    return rows


# --- glyphs --------------------------------------------------------------------------------------------------------


def fonts() -> list[Path]:
    """The DejaVu fonts of this machine: the system's, or those inside matplotlib."""
    places = [Path("/usr/share/fonts"), Path("/usr/local/share/fonts"), Path.home() / ".fonts"]
    module = importlib.util.find_spec("matplotlib")
    if module is not None and module.origin is not None:
        places.append(Path(module.origin).parent / "mpl-data" / "fonts" / "ttf")
    files = {file.name: file for place in reversed(places) if place.is_dir() for file in place.rglob("DejaVu*.ttf")}
    return [files[name] for name in sorted(files) if "Math" not in name and "Display" not in name]


def glyphs(length: int, faces: int = 8) -> ArrayDataset:
    """Pictures of the characters that have a name, in up to `faces` DejaVu fonts, and these names as bytes.

    `image` uint8 [1, 28, 28], `text` uint8 [length], padded with 0. Kept in the cache folder.
    """
    files = fonts()[:faces]
    if not files:
        raise UserError(
            "data = 'python:glyphs' finds no DejaVu fonts.",
            why="looked in /usr/share/fonts, ~/.fonts and matplotlib",
            do="apt-get install fonts-dejavu-core, or pip install matplotlib",
        )
    file = (
        cache_folder() / "glyphs" / f"{unicodedata.unidata_version}-{'-'.join(file.stem for file in files)}.npz"[-200:]
    )
    if not file.exists():
        drawn = list(_drawn(files))
        fresh = file.with_name(f"{file.stem}.{np.random.default_rng().integers(1 << 32)}.tmp.npz")
        pictures, characters = zip(*drawn, strict=True)
        with writing(file, CACHE):
            file.parent.mkdir(parents=True, exist_ok=True)
            np.savez(fresh, images=np.stack(pictures), characters=np.array(characters))
            fresh.replace(file)
    with np.load(file) as stored:
        images = stored["images"]
        characters = stored["characters"]
    names = [unicodedata.name(chr(character)).encode()[:length].ljust(length, b"\0") for character in characters]
    return ArrayDataset(image=images, text=np.frombuffer(b"".join(names), np.uint8).reshape(-1, length))


def _drawn(files: Sequence[Path]) -> Iterator[tuple[NDArray[Any], int]]:
    """(picture, character) of each character that has a name and a glyph of its own, character by character."""
    from PIL import Image, ImageDraw, ImageFont

    faces = [ImageFont.truetype(str(file), SIDE - 8) for file in files]
    absent = [bytes(face.getmask("\uffff")) for face in faces]
    for code in range(0x21, LAST + 1):
        if not unicodedata.name(chr(code), "") or unicodedata.category(chr(code))[0] not in "LNPS":
            continue
        for face, nothing in zip(faces, absent, strict=True):
            mask = bytes(face.getmask(chr(code)))
            if not any(mask) or mask == nothing:
                continue
            image = Image.new("L", (SIDE, SIDE))
            ImageDraw.Draw(image).text((SIDE // 2, SIDE // 2), chr(code), fill=255, font=face, anchor="mm")
            yield np.asarray(image, np.uint8)[None], code
