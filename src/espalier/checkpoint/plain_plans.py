"""What ranks tell one another about a save, as plain values: torch's plans of what to write, and what was written."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult


def plan(items: list[Any]) -> SavePlan:
    """The plan that `items` came from."""
    return SavePlan([WriteItem(_index(index), WriteItemType(kind), None, _data(data)) for index, kind, data in items])


def plan_items(plan: SavePlan) -> list[Any]:
    """`plan` as plain values."""
    return [(_index_of(item.index), item.type.value, _data_of(item.tensor_data)) for item in plan.items]


def results(rows: list[Any]) -> list[WriteResult]:
    """The results that `rows` came from."""
    return [WriteResult(_index(index), size, _StorageInfo(*where)) for index, size, where in rows]


def result_rows(results: list[WriteResult]) -> list[Any]:
    """`results` as plain values."""
    return [(_index_of(one.index), one.size_in_bytes, _where(one.storage_data)) for one in results]


def _where(stored: _StorageInfo) -> tuple[str, int, int]:
    return stored.relative_path, stored.offset, stored.length


def _index_of(index: MetadataIndex) -> tuple[Any, ...]:
    return index.fqn, None if index.offset is None else tuple(index.offset), index.index


def _index(told: tuple[Any, ...]) -> MetadataIndex:
    return MetadataIndex(*told)


def _data_of(data: TensorWriteData | None) -> tuple[Any, ...] | None:
    if data is None:
        return None
    return tuple(data.chunk.offsets), tuple(data.chunk.sizes), data.properties.dtype, tuple(data.size)


def _data(told: tuple[Any, ...] | None) -> TensorWriteData | None:
    if told is None:
        return None
    offsets, sizes, dtype, size = told
    chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    return TensorWriteData(chunk, TensorProperties(dtype=dtype), torch.Size(size))
