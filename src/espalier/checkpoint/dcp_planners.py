"""Planners of torch.distributed.checkpoint that save and load slices (`tensor_slice`), and bytes as they are."""

from __future__ import annotations

import io
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import ReadItem, WriteItem, WriteItemType

from espalier.checkpoint.stored_slice import StoredSlice
from espalier.checkpoint.tensor_slice import Slice


class SavePlanner(DefaultSavePlanner):
    """torch's planner, which also finds the boxes of a Slice, and writes bytes as they are."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._room = bytearray()

    def lookup_object(self, index: MetadataIndex) -> Any:
        """What a write item stands for. What is not in memory is read into one buffer: torch's writer refers to all
        that it has written until the end."""
        value = self.state_dict[index.fqn]
        if isinstance(value, StoredSlice):
            return value.read(index, self._buffer)
        return value.__get_tensor_shard__(index) if isinstance(value, Slice) else super().lookup_object(index)

    def _buffer(self, size: int) -> Tensor:
        if len(self._room) < size:
            self._room = bytearray(size)
        return torch.frombuffer(self._room, dtype=torch.uint8, count=size)

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """Bytes are written as they are; torch's own would pickle them."""
        return io.BytesIO(object) if write_item.type is WriteItemType.BYTE_IO else object


class LoadPlanner(DefaultLoadPlanner):
    """torch's planner, which also finds the boxes of a Slice, and gives bytes as they are."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(self, state_dict: dict[str, Any], metadata: Any = None, is_coordinator: bool = False) -> None:
        """Begins to plan. torch's own would put None for every value it does not know."""
        super().set_up_planner({}, metadata, is_coordinator)
        self.state_dict = self.original_state_dict = state_dict

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """What a read item is read into."""
        value = self.state_dict[index.fqn]
        return value.__get_tensor_shard__(index) if isinstance(value, Slice) else super().lookup_tensor(index)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """What a read item is read into; room of its own for what is not in memory."""
        value = self.state_dict[read_item.dest_index.fqn]
        if isinstance(value, StoredSlice):
            return torch.empty(read_item.lengths, dtype=value.dtype)
        return super().resolve_tensor(read_item)

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        value = self.state_dict[read_item.dest_index.fqn]
        if isinstance(value, StoredSlice):
            value.put(read_item, tensor)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Keeps them; torch's own would unpickle them."""
        self.state_dict[read_item.dest_index.fqn] = value.getvalue()
