"""Synthetic graphs, seeded and streamed to disk: R-MAT, and planted partitions with uneven degrees.

After R-MAT (Chakrabarti et al., SDM 2004, with Graph500's quadrants) and the degree-corrected block model (Karrer and
Newman, arXiv 1008.3926). Edges are drawn in chunks, each a pure function of (seed, chunk) (Philox, Salmon et al., SC
2011), so that passing over them twice (count, then place) needs no memory for them: only 16 bytes per node are held.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from espalier.errors import UserError, nearest
from espalier.graph.data import Array, DataSplit, Graph

Progress = Callable[[int, int], None]
Edges = tuple[Array, Array]

CHUNK = 1 << 20
"""Edges drawn at once, and rows of features: tens of MiB."""

_ROWS = 1 << 22  # edges put in order at once


@dataclass(frozen=True)
class Rmat:
    """2^scale nodes with `degree` edges each on average, before duplicates are dropped; `features` columns.

    The label is the quadrant of three levels, one of eight, in which R-MAT's recursion puts a node.
    """

    scale: int = 16
    degree: int = 16
    features: int = 64
    seed: int = 1

    nodes = property(lambda self: 1 << self.scale)
    classes = property(lambda self: 8)

    def labels(self, ids: Array) -> Array:
        """Of nodes: the three highest bits of their place before it is scrambled."""
        return _unscrambled(ids, self.scale) >> max(0, self.scale - 3)

    def edges(self, chunk: int, count: int) -> Edges:
        """`count` edges: at each of `scale` levels a quadrant, by 0.57, 0.19, 0.19, 0.05 (Graph500)."""
        random = _random(self.seed, 1, chunk)
        ends = np.zeros((2, count), np.int64)
        for _ in range(self.scale):
            draw = random.random(count, np.float32)
            ends[0] = ends[0] * 2 + (draw >= 0.76)
            ends[1] = ends[1] * 2 + (((draw >= 0.57) & (draw < 0.76)) | (draw >= 0.95))
        return _scrambled(ends[0], self.scale), _scrambled(ends[1], self.scale)


@dataclass(frozen=True)
class Planted:
    """`classes` groups whose members meet their own with probability `homophily`, else anybody.

    Within a group the node of rank r is met as often as r^(1/skew - 1): 1 is even, 2 has hubs. Features are the mean of
    the group, of length `signal`, and noise of variance one.
    """

    nodes: int = 10_000
    degree: int = 16
    classes: int = 10
    features: int = 64
    homophily: float = 0.6
    skew: float = 1.5
    signal: float = 1.0
    seed: int = 1

    def labels(self, ids: Array) -> Array:
        """Of nodes: their number modulo the classes."""
        return ids % self.classes

    def edges(self, chunk: int, count: int) -> Edges:
        """`count` edges between ranks drawn by their weight."""
        random = _random(self.seed, 1, chunk)
        groups = random.integers(self.classes, size=(2, count))
        same = random.random(count) < self.homophily
        groups[1, same] = groups[0, same]
        ranks = random.random((2, count)) ** self.skew
        sizes = (self.nodes - groups + self.classes - 1) // self.classes
        ids = groups + self.classes * (ranks * sizes).astype(np.int64)
        return ids[0], ids[1]


KINDS: dict[str, Any] = {"rmat": Rmat, "planted": Planted}

Made = Rmat | Planted


def parse(text: str) -> Made:
    """`rmat:scale=20,degree=16` or `planted:nodes=1000000,classes=20`. Raises UserError."""
    kind, _, rest = text.partition(":")
    known = {field.name: field.type for field in fields(KINDS[kind])}
    given: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        name, equals, value = part.partition("=")
        if name not in known or not equals:
            near = nearest(name, known)
            raise UserError(
                f"data.path = {text!r}: {part!r} is not known.",
                do=f"{near or next(iter(known))}=…, of {', '.join(known)}",
            )
        try:
            given[name] = float(value) if known[name] == "float" else int(value)
        except ValueError:
            raise UserError(f"data.path = {text!r}: {name} = {value!r} is not a number.", do=f"{name}=16") from None
    made: Made = KINDS[kind](**given)
    _check(made, text)
    return made


def _check(made: Made, text: str) -> None:
    for name, value in asdict(made).items():
        if value < 0 or (value == 0 and name not in ("seed", "homophily", "signal")):
            raise UserError(f"data.path = {text!r}: {name} = {value} is not possible.", do=f"{name} above 0")
    if isinstance(made, Rmat) and made.scale > 40:
        raise UserError(f"data.path = {text!r}: scale = {made.scale} is more than 2^40 nodes.", do="scale=20")
    if isinstance(made, Planted) and (made.homophily > 1 or made.classes > made.nodes):
        raise UserError(f"data.path = {text!r} is not possible.", do="homophily up to 1, classes up to the nodes")


def load(text: str, cache: Path, progress: Progress | None = None) -> Graph:
    """The graph that `text` describes, made in `cache` on first use and then opened from there."""
    made = parse(text)
    key = xxhash.xxh3_64_hexdigest(repr(made).encode())
    folder = cache / f"{text.partition(':')[0]}-{key}"
    if not is_store(folder):
        write(made, folder, progress)
    return opened(folder)


def is_store(folder: Path) -> bool:
    """Whether a generated graph lies in `folder`, complete."""
    return (folder / "graph.json").exists()


def opened(folder: Path) -> Graph:
    """The graph in `folder`; its arrays stay on disk and are read where they are touched."""
    about = json.loads((folder / "graph.json").read_text())

    def array(name: str) -> Array:
        return np.asarray(np.load(folder / f"{name}.npy", mmap_mode="c"))

    return Graph(
        array("indptr"),
        array("indices"),
        array("features"),
        labels=array("labels"),
        parts=DataSplit(array("train"), array("validation"), array("test")),
        classes=tuple(str(at) for at in range(about["classes"])),
        origin=about["made"],
        identity=about["identity"],
    )


def write(made: Made, folder: Path, progress: Progress | None = None) -> None:
    """Makes the graph in `folder`: undirected, duplicates and loops dropped, a tenth of the nodes for validation and
    test each. Interrupted, it leaves nothing that could be taken for a graph."""
    fresh = folder.with_name(f"{folder.name}.{os.getpid()}.part")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    try:
        _write_edges(made, fresh, progress)
        _write_nodes(made, fresh)
        about = {"made": repr(made), "classes": made.classes, "identity": xxhash.xxh3_64_hexdigest(repr(made).encode())}
        (fresh / "graph.json").write_text(json.dumps(about))
        shutil.rmtree(folder, ignore_errors=True)
        fresh.rename(folder)
    except OSError as error:
        raise UserError(
            f"{made} cannot be written to {folder.parent}: {error.strerror}.", do="data.cache = a disk with room"
        ) from None
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _write_edges(made: Made, folder: Path, progress: Progress | None) -> None:
    total = made.nodes * made.degree // 2
    kind = np.int32 if made.nodes < 2**31 else np.int64
    counts = np.zeros(made.nodes, np.int64)
    for done, (sources, targets) in enumerate(_chunks(made, total)):
        counts += np.bincount(targets, minlength=made.nodes)
        counts += np.bincount(sources, minlength=made.nodes)
        if progress is not None:
            progress(done * CHUNK, 2 * total)
    cursor = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    bounds = cursor.copy()
    placed = np.lib.format.open_memmap(folder / "placed.npy", "w+", kind, (max(1, int(cursor[-1])),))
    for done, pair in enumerate(_chunks(made, total)):
        for sources, targets in (pair, pair[::-1]):
            _place(placed, cursor, sources, targets)
        if progress is not None:
            progress(total + done * CHUNK, 2 * total)
    _compact(placed, bounds, folder)
    del placed
    (folder / "placed.npy").unlink()


def _chunks(made: Made, total: int) -> Iterator[Edges]:
    for chunk in range(-(-total // CHUNK)):
        sources, targets = made.edges(chunk, min(CHUNK, total - chunk * CHUNK))
        apart = sources != targets
        yield sources[apart], targets[apart]


def _place(placed: Array, cursor: Array, sources: Array, targets: Array) -> None:
    """Writes each source into the next free place of its target's row."""
    order = np.argsort(targets, kind="stable")
    rows = targets[order]
    first = np.flatnonzero(np.concatenate([[True], rows[1:] != rows[:-1]])) if len(rows) else np.zeros(0, np.int64)
    sizes = np.diff(np.concatenate([first, [len(rows)]]))
    within = np.arange(len(rows)) - np.repeat(first, sizes)
    placed[cursor[rows] + within] = sources[order]
    cursor[rows[first]] += sizes


def _compact(placed: Array, bounds: Array, folder: Path) -> None:
    """Sorts each row, drops duplicates, and writes `indptr` and `indices`."""
    nodes = len(bounds) - 1
    indptr = np.zeros(nodes + 1, np.int64)
    written, start = 0, 0
    while start < nodes:  # in place: what is written never overtakes what is read
        stop = max(start + 1, int(np.searchsorted(bounds, bounds[start] + _ROWS, side="right")) - 1)
        rows = np.repeat(np.arange(start, stop), np.diff(bounds[start : stop + 1]))
        keys = np.unique(rows * np.int64(nodes) + placed[bounds[start] : bounds[stop]])
        owners = keys // nodes
        placed[written : written + len(keys)] = keys - owners * nodes
        indptr[start + 1 : stop + 1] = written + np.cumsum(np.bincount(owners - start, minlength=stop - start))
        written += len(keys)
        start = stop
    np.save(folder / "indptr.npy", indptr)
    indices = np.lib.format.open_memmap(folder / "indices.npy", "w+", placed.dtype, (written,))
    for at in range(0, written, _ROWS):
        indices[at : at + _ROWS] = placed[at : min(at + _ROWS, written)]
    indices.flush()


def _write_nodes(made: Made, folder: Path) -> None:
    nodes = made.nodes
    features = np.lib.format.open_memmap(folder / "features.npy", "w+", np.float32, (nodes, made.features))
    labels = np.lib.format.open_memmap(folder / "labels.npy", "w+", np.int64, (nodes,))
    means = _random(made.seed, 2, 0).normal(size=(made.classes, made.features))
    means *= getattr(made, "signal", 1.0) / np.linalg.norm(means, axis=1, keepdims=True)
    parts: list[list[Array]] = [[], [], []]
    for chunk, at in enumerate(range(0, nodes, CHUNK)):
        ids = np.arange(at, min(at + CHUNK, nodes))
        labels[ids] = made.labels(ids)
        noise = _random(made.seed, 3, chunk).standard_normal((len(ids), made.features), np.float32)
        features[at : at + len(ids)] = means[labels[ids]].astype(np.float32) + noise
        drawn = _random(made.seed, 4, chunk).random(len(ids))
        for part, (low, high) in zip(parts, ((0.0, 0.8), (0.8, 0.9), (0.9, 1.0)), strict=True):
            part.append(ids[(drawn >= low) & (drawn < high)])
    for name, part in zip(("train", "validation", "test"), parts, strict=True):
        np.save(folder / f"{name}.npy", np.concatenate(part))
    features.flush()
    labels.flush()


def _random(seed: int, purpose: int, chunk: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=seed * 8 + purpose, counter=[0, 0, 0, chunk]))


def _scrambled(ids: Array, scale: int) -> Array:
    """A permutation of [0, 2^scale): neighbours in number are no neighbours in the graph (an odd factor, arithmetic
    modulo 2^scale; 0x9E3779B1 is Knuth's, 2^32 over the golden ratio)."""
    return (ids * 0x9E3779B1) & ((1 << scale) - 1)


def _unscrambled(ids: Array, scale: int) -> Array:
    inverse = pow(0x9E3779B1, -1, 1 << scale) if scale else 0
    # Products of two numbers of up to 40 bits wrap around 2^64, which leaves the low bits right.
    return (ids * np.int64(inverse)) & ((1 << scale) - 1)
