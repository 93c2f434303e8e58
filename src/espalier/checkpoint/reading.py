"""One checkpoint being read: the skeletons, room for each tensor, the tensors; then each part takes its own."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.tensor import DTensor

from espalier.checkpoint import tree
from espalier.checkpoint.base import Stateful
from espalier.checkpoint.place import Place
from espalier.checkpoint.slices import LoadPlanner, Slice
from espalier.errors import EspalierError, UserError


def restore(place: Place, name: str, parts: Mapping[str, Stateful]) -> list[str]:
    """Reads checkpoint `name` into `parts`; names of the parts it does not have. This rank's share only, no waiting.

    Raises UserError when a part refuses what it is given.
    """
    reader = place.reader(name)
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, True)
    present = [part for part in parts if tree.SKELETON + part in metadata.state_dict_metadata]
    blobs: dict[str, Any] = {tree.SKELETON + part: None for part in present}
    _read(reader, metadata, blobs)
    skeletons = {part: pickle.loads(blobs[tree.SKELETON + part]) for part in present}
    own, _ = tree.flatten({part: parts[part] for part in present})
    tensors: dict[str, Any] = {}
    for skeleton in skeletons.values():
        for hole in tree.holes(skeleton):
            tensors[hole] = _room(metadata, hole, own.get(hole))
    _read(reader, metadata, tensors)
    for part in present:
        _give(parts[part], part, tree.join(skeletons[part], tensors.__getitem__), name)
    return [part for part in parts if part not in present]


def _read(reader: StorageReader, metadata: Metadata, state: dict[str, Any]) -> None:
    planner = LoadPlanner()
    planner.set_up_planner(state, metadata, True)
    reader.read_data(planner.finish_plan(planner.create_local_plan()), planner).wait()


def _room(metadata: Metadata, name: str, own: tree.Kept | None) -> tree.Kept:
    """What to read `name` into: the part's own where it fits, else a new one on the CPU."""
    saved = metadata.state_dict_metadata[name]
    assert isinstance(saved, TensorStorageMetadata), f"{name} was not saved as a tensor"
    if isinstance(own, Slice) and own.shape != saved.size:
        own = own.saved_as(saved.size) or own
    if isinstance(own, DTensor | Slice) and own.shape != saved.size:
        raise UserError(
            f"The checkpoint's {name} has shape {tuple(saved.size)}, the run's has {tuple(own.shape)}.",
            do="resume with the recipe the run began with, or start anew with --run FOLDER",
        )
    if own is not None and own.shape == saved.size and own.dtype == saved.properties.dtype:
        return own
    if isinstance(own, Slice):  # another precision
        return own.of(torch.empty(own.local.shape, dtype=saved.properties.dtype))
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
            do="resume with the recipe the run began with, or start anew with --run FOLDER",
        ) from error
