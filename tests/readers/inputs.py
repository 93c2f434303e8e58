"""Small good inputs of every format that is read, and what reading them gives."""

from __future__ import annotations

import gzip
import hashlib
import json
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import mutations as change
import networkx
import numpy as np
import torch
from scipy.sparse import csr_matrix

from espalier import recipe as config
from espalier.machine import cluster as clusters
from espalier.recipe import Data, defaults, recipe_file
from espalier.recipe.foreign_files import FieldUse


class Reading(NamedTuple):
    """What a reader made of an input. `content`: a digest of what training sees; `notes`: what it said."""

    content: str
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Reader:
    """One reader: a good input, how it is read, and which of its files are changed how.

    Attributes:
        modules: of the package, that read such files.
        write: makes the input below a folder; what the recipe would name.
        changed: pattern of the file that changes, its syntax, and a field that holds text (None: no rows).
        field_count: how many rows `write` makes.
    """

    name: str
    modules: tuple[str, ...]
    write: Callable[[Path], Path]
    read: Callable[[Path], Reading]
    changed: tuple[str, change.Syntax | None, str] | None = None


def digest(*parts: Any) -> str:
    """Of bytes, text and arrays."""
    found = hashlib.sha256()
    for part in parts:
        found.update(part if isinstance(part, bytes) else repr(part).encode("utf-8", "surrogatepass"))
        found.update(b"|")
    return found.hexdigest()


# --- text --------------------------------------------------------------------------------------------------------

TEXTS = [f"Row {number} of a text, naïve and plain." for number in range(6)]


def written(name: str, content: bytes) -> Callable[[Path], Path]:
    """A writer of one file."""

    def write(folder: Path) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    return write


def parquet(name: str, rows: list[dict[str, Any]]) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        import pyarrow as pa
        from pyarrow import parquet as files

        files.write_table(pa.Table.from_pylist(rows), folder / name)
        return folder / name

    return write


def text(path: Path) -> Reading:
    from espalier.language import text_sources

    data, skipped, notes = Data(path=str(path)), list[tuple[str, str]](), list[str]()
    documents = [document.data for document in text_sources.documents(data, None, skipped, notes)]
    return Reading(digest(*documents), (*notes, *(f"{name}: {why}" for name, why in skipped)))


def chats(path: Path) -> Reading:
    from espalier.language.tune import conversations

    skipped, report = list[tuple[str, str]](), conversations.ChatReport()
    rows = list(conversations.conversations(Data(path=str(path)), skipped, report=report))
    content = [(row.turns, row.rejected, row.shared) for row in rows]
    return Reading(digest(content), (*report.notes(), *(f"{name}: {why}" for name, why in skipped)))


TEXT_ROWS = [{"text": row} for row in TEXTS]
COMPLETIONS = [{"prompt": f"ask {n}", "completion": f"answer {n}"} for n in range(6)]
ALPACA = [{"instruction": f"ask {n}", "input": "", "output": f"answer {n}"} for n in range(6)]
MESSAGES = [
    {"messages": [{"role": "user", "content": f"ask {n}"}, {"role": "assistant", "content": f"answer {n}"}]}
    for n in range(6)
]
SHAREGPT = [
    {"conversations": [{"from": "human", "value": f"ask {n}"}, {"from": "gpt", "value": f"answer {n}"}]}
    for n in range(6)
]
PAIRS = [{"prompt": f"ask {n}", "chosen": f"good {n}", "rejected": f"bad {n}"} for n in range(6)]


# --- graphs ------------------------------------------------------------------------------------------------------

EDGES = [(n, (n + 1) % 8) for n in range(8)] + [(0, 4), (2, 6)]
LABELS = [n % 2 for n in range(8)]


def graph(path: Path) -> Reading:
    from espalier.graph.data import sources

    made = sources.load(Data(path=str(path)), config.GraphOptions())
    arrays = (made.indptr, made.indices, made.features, made.labels, made.weights, made.edge_features)
    content = [None if array is None else np.asarray(array).tobytes() for array in arrays]
    return Reading(digest(*content), tuple(made.notes))


def tables(separator: str, ending: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        edges = [separator.join(("source", "target")), *(separator.join(map(str, ends)) for ends in EDGES)]
        nodes = [separator.join(("id", "label", "size"))]
        nodes += [separator.join((str(n), "even" if n % 2 == 0 else "odd", str(n / 2))) for n in range(8)]
        (folder / f"edges{ending}").write_text("\n".join(edges) + "\n")
        (folder / f"nodes{ending}").write_text("\n".join(nodes) + "\n")
        return folder / f"edges{ending}"

    return write


def arrays() -> dict[str, np.ndarray]:
    features = np.arange(16, dtype=np.float32).reshape(8, 2)
    return {"edge_index": np.array(EDGES).T, "x": features, "y": np.array(LABELS)}


def npz(folder: Path, **more: Any) -> Path:
    np.savez(folder / "graph.npz", **arrays(), **more)
    return folder / "graph.npz"


def saved(folder: Path, **more: Any) -> Path:
    tensors = {name: torch.from_numpy(array) for name, array in arrays().items()}
    torch.save(tensors | {name: torch.as_tensor(value) for name, value in more.items()}, folder / "graph.pt")
    return folder / "graph.pt"


def market(folder: Path) -> Path:
    lines = ["%%MatrixMarket matrix coordinate pattern general", "% a comment", f"8 8 {len(EDGES)}"]
    lines += [f"{source + 1} {target + 1}" for source, target in EDGES]
    (folder / "graph.mtx").write_text("\n".join(lines) + "\n")
    return folder / "graph.mtx"


def metis(folder: Path) -> Path:
    both = [*EDGES, *((target, source) for source, target in EDGES)]
    lines = [f"8 {len(EDGES)}"]
    lines += [" ".join(str(target + 1) for source, target in both if source == node) for node in range(8)]
    (folder / "graph.metis").write_text("\n".join(lines) + "\n")
    return folder / "graph.metis"


def node_link(ending: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        made = networkx.Graph(EDGES)
        for node in range(8):
            made.add_node(node, label="odd" if node % 2 else "even", size=node / 2)
        path = folder / f"graph{ending}"
        if ending == ".graphml":
            networkx.write_graphml(made, path)
        else:
            path.write_text(json.dumps(networkx.node_link_data(made)))
        return path

    return write


def snap(folder: Path) -> Path:
    lines = ["# Directed graph", "# FromNodeId\tToNodeId", *(f"{source}\t{target}" for source, target in EDGES)]
    (folder / "graph.txt").write_text("\n".join(lines) + "\n")
    return folder / "graph.txt"


def ogb(folder: Path) -> Path:
    raw, split = folder / "raw", folder / "split" / "time"
    raw.mkdir(parents=True)
    split.mkdir(parents=True)
    table = {
        "edge": EDGES,
        "num-node-list": [[8]],
        "num-edge-list": [[len(EDGES)]],
        "node-feat": arrays()["x"].tolist(),
        "node-label": [[label] for label in LABELS],
    }
    for name, rows in table.items():
        with gzip.open(raw / f"{name}.csv.gz", "wt") as file:
            file.writelines(",".join(map(str, row)) + "\n" for row in rows)
    for name, ids in {"train": range(4), "valid": range(4, 6), "test": range(6, 8)}.items():
        with gzip.open(split / f"{name}.csv.gz", "wt") as file:
            file.writelines(f"{node}\n" for node in ids)
    return folder


def planetoid(folder: Path) -> Path:
    features, onehot = csr_matrix(arrays()["x"]), np.eye(2, dtype=np.int32)[LABELS]
    neighbours = {node: [] for node in range(8)}
    for source, target in EDGES:
        neighbours[source].append(target)
        neighbours[target].append(source)
    parts = {
        "x": features[:4], "tx": features[6:], "allx": features[:6],
        "y": onehot[:4], "ty": onehot[6:], "ally": onehot[:6], "graph": neighbours,
    }  # fmt: skip
    for name, value in parts.items():
        (folder / f"ind.small.{name}").write_bytes(pickle.dumps(value, protocol=2))
    (folder / "ind.small.test.index").write_text("6\n7\n")
    return folder


# --- scenes ------------------------------------------------------------------------------------------------------


def scene(path: Path) -> Reading:
    from espalier.radiance import scenes

    made = scenes.load(str(path), None, lambda done, total: None)
    content = (made.images.numpy().tobytes(), made.poses.numpy().tobytes(), made.parts, made.lens, made.box.tolist())
    return Reading(digest(*content), tuple(made.notes))


def blender(folder: Path) -> Path:
    from PIL import Image

    from espalier.radiance import rendered_scenes

    frames = []
    for part, (images, poses) in rendered_scenes.render(rendered_scenes.parse("knot:views=8,size=16")).items():
        for number, (image, pose) in enumerate(zip(images, poses, strict=True)):
            name = f"{part}_{number}.png"
            Image.fromarray(image.numpy()).save(folder / name)
            frames.append({"file_path": name, "transform_matrix": pose.tolist()})
    table = {"camera_angle_x": rendered_scenes.ANGLE, "frames": frames}
    (folder / "transforms.json").write_text(json.dumps(table))
    return folder


# --- models ------------------------------------------------------------------------------------------------------


class _Words:
    boundary = 0

    def save(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text("{}")


def _small() -> Any:
    from espalier.language import gpt

    size = {"depth": 1, "width": 16, "heads": 2, "feed_forward": 24, "vocabulary": 31, "context": 8}
    options = defaults.resolve(config.Recipe(model=config.Gpt(**size)))[0].model  # type: ignore[arg-type]
    model = gpt.GPT(options)  # type: ignore[arg-type]
    gpt.initialise(model, 1)
    return model


def hugging_face(folder: Path) -> Path:
    from espalier.language import hf

    hf.export(_small(), _Words(), folder / "weights")
    return folder / "weights"


def weights(path: Path) -> Reading:
    from espalier.language import hf

    options, state = hf.load(path, torch.float32)
    content = [(name, state[name].numpy().tobytes()) for name in sorted(state)]
    return Reading(digest(options, *content), tuple(hf.notes(path)))


def adapters(folder: Path) -> Path:
    from safetensors.torch import save_file

    from espalier.language.tune import lora, peft

    model = lora.adapt(_small(), config.Lora(rank=2), 0)
    save_file(peft.tensors_of(model), folder / peft.WEIGHTS)
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    table = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": names}
    (folder / peft.CONFIG).write_text(json.dumps(table))
    return folder


def low_rank(path: Path) -> Reading:
    from espalier.language.tune import lora, peft

    tune = peft.with_options(config.Lora(), path)
    model = lora.adapt(_small(), tune, 1)
    peft.load(model, path)
    tensors = peft.tensors_of(model)
    content = [(name, tensors[name].detach().numpy().tobytes()) for name in sorted(tensors)]
    return Reading(digest(tune, *content), tuple(peft.notes(path)))


# --- tables of ours that people write ------------------------------------------------------------------------------

CLUSTER = '[[nodes]]\ncount = 2\ndevice = "A100-80GB"\ndevices = 8\n\n[links]\nbetween = "100Gbit/s"\n'
RECIPE = '[model]\nkind = "gpt"\nwidth = 32\n\n[data]\npath = "python:stdlib"\n'
QUESTIONS = [{"question": f"{n} + 1 =", "choices": [str(n), str(n + 1)], "answer": 1} for n in range(4)]


def cluster(path: Path) -> Reading:
    return Reading(digest(clusters.read(path)), ())


def recipe(path: Path) -> Reading:
    return Reading(digest(recipe_file.load(path)), ())


def questions(path: Path) -> Reading:
    from espalier.evaluate import multiple_choice

    use = FieldUse(multiple_choice.COLUMNS)
    return Reading(digest(multiple_choice.read(path, "task", use)), use.notes())
