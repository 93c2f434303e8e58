"""Checkpoint reader: the skeletons, room for each tensor, the tensors; then each part takes its own.

Nothing in the files is run: skeletons are plain values, torch's metadata goes through an allow-list, tensors through
torch's weights-only loader.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.tensor import DTensor

from espalier.checkpoint import dcp_metadata, state_tree
from espalier.checkpoint.base import Stateful, StatefulParts
from espalier.checkpoint.dcp_planners import LoadPlanner
from espalier.checkpoint.manifest import FileHash
from espalier.checkpoint.storage import Storage
from espalier.checkpoint.tensor_slice import Slice
from espalier.recipe import serialization
from espalier.recipe.errors import EspalierError, UserError

PICKLED = b"PK\x03\x04"
"""How torch's archive of a pickled skeleton begins (format 1)."""


def restore(place: Storage, name: str, files: Mapping[str, FileHash], parts: StatefulParts) -> list[str]:
    """Reads checkpoint `name`, which has these `files`, into `parts`; names of the parts it does not have. This rank's
    share only, no waiting.

    Raises UserError when a file holds what this program does not write, or a part refuses what it is given.
    """
    path = place.path(name)
    with place.open(name, dcp_metadata.NAME) as file:
        sizes = {name: entry.bytes for name, entry in files.items()}
        metadata = dcp_metadata.read(file.read(), sizes, f"{path}/{dcp_metadata.NAME}")
    reader = place.reader(name)
    reader.set_up_storage_reader(metadata, True)
    present = [part for part in parts if state_tree.SKELETON + part in metadata.state_dict_metadata]
    skeletons = _skeletons(reader, metadata, present, path)
    flat, _ = state_tree.flatten({part: parts[part] for part in present})
    tensors: dict[str, Any] = {}
    for skeleton in skeletons.values():
        for hole in state_tree.holes(skeleton):
            tensors[hole] = _room(metadata, hole, flat.get(hole))
    _read(reader, metadata, tensors, path)
    for part in present:
        _give(parts[part], part, state_tree.join(skeletons[part], tensors.__getitem__), name)
    return [part for part in parts if part not in present]


def _skeletons(reader: StorageReader, metadata: Metadata, present: list[str], path: str) -> dict[str, Any]:
    blobs: dict[str, Any] = {}
    for part in present:
        name = state_tree.SKELETON + part
        if not isinstance(metadata.state_dict_metadata[name], BytesStorageMetadata):
            raise UserError(f"{name!r} in {path} is no skeleton.", do="use another checkpoint")
        blobs[name] = None
    _read(reader, metadata, blobs, path)
    return {part: _skeleton(blobs[state_tree.SKELETON + part], part, path) for part in present}


def _skeleton(blob: bytes, part: str, path: str) -> Any:
    if not blob.startswith(PICKLED):
        return serialization.loads(blob, f"The state of {part!r} in {path}")
    raise UserError(
        f"The checkpoint {path} has the old format, which is not loaded.",
        why=f"the state of {part!r} in it is pickled, and unpickling can execute arbitrary code",
        do="a checkpoint that this version of espalier wrote",
    )


def _read(reader: StorageReader, metadata: Metadata, state: dict[str, Any], path: str) -> None:
    planner = LoadPlanner()
    planner.set_up_planner(state, metadata, True)
    try:
        reader.read_data(planner.finish_plan(planner.create_local_plan()), planner).wait()
    except (EspalierError, OSError, MemoryError):
        raise
    except Exception as error:  # torch's, pickle's and zip's errors have no common base
        named = re.search(r"GLOBAL (\S+)", str(error))  # what torch's loader refused
        why = f"it names {named[1]}" if named else f"{type(error).__name__}: {error}"
        raise UserError(f"A file of {path} does not hold the tensors it should.", why=why) from error


def _room(metadata: Metadata, name: str, value: state_tree.Kept | None) -> state_tree.Kept:
    """What to read `name` into: the part's own where it fits, else a new one on the CPU."""
    saved = metadata.state_dict_metadata.get(name)
    if not isinstance(saved, TensorStorageMetadata):
        raise UserError(f"The checkpoint has no tensor {name}, and its skeleton names it.", do="use another checkpoint")
    if isinstance(value, Slice) and value.shape != saved.size:
        value = value.saved_as(saved.size) or value
    if isinstance(value, DTensor | Slice) and value.shape != saved.size:
        raise UserError(
            f"The checkpoint's {name} has shape {tuple(saved.size)}, the run's has {tuple(value.shape)}.",
            do="resume with the recipe the run began with, or start a new run with --run FOLDER",
        )
    if value is not None and value.shape == saved.size and value.dtype == saved.properties.dtype:
        return value
    if isinstance(value, Slice):  # another precision
        return value.of(torch.empty(value.local.shape, dtype=saved.properties.dtype))
    return torch.empty(saved.size, dtype=saved.properties.dtype)


def _give(part: Stateful, name: str, state: dict[str, Any], checkpoint: str) -> None:
    try:
        part.load_state_dict(state)
    except EspalierError:
        raise
    except Exception as error:
        raise UserError(
            f"The run's {name} does not take its state from {checkpoint}.",
            why=f"{type(error).__name__}: {error}",
            do="resume with the recipe the run began with, or start a new run with --run FOLDER",
        ) from error
