"""Safetensors files of somebody else: tensors, with every error named."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from espalier.recipe.errors import UserError
from espalier.recipe.foreign_files import parsing, printable

AGAIN = "download it again"


class StoredTensor(NamedTuple):
    """Where a tensor lies, and what it is: its shape and its type by the format's name (`F32`, `BF16`, …)."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


@contextmanager
def opened(file: Path) -> Iterator[Any]:
    """The safetensors `file`, for torch. Raises UserError for whatever is wrong with it."""
    from safetensors import safe_open

    with parsing(file, AGAIN), safe_open(file, "pt") as content:
        yield content


def stored(files: Sequence[Path]) -> dict[str, StoredTensor]:
    """The tensors of `files` by name, by their headers alone. Raises UserError for one that two files have."""
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        with opened(file) as content:
            for name in content.keys():  # noqa: SIM118 - not a dict
                part = content.get_slice(name)
                if name in tensors:
                    both = f"{tensors[name].file.name} and {file.name}"
                    raise UserError(f"{printable(name)} is in {both}.", why="they may differ", do=AGAIN)
                tensors[name] = StoredTensor(file, tuple(part.get_shape()), str(part.get_dtype()))
    return tensors


def value(name: str, place: StoredTensor) -> Any:
    """The tensor `name`, which lies at `place`. Raises UserError."""
    with opened(place.file) as content:
        return content.get_tensor(name)


def refuse_changed(files: Sequence[Path], written: Mapping[str, Any]) -> None:
    """Reads files back. Raises OSError naming a tensor that is not as it was `written`: that is the disk's fault."""
    import torch

    again = stored(files)
    if again.keys() != written.keys():
        raise OSError(f"not read back: {', '.join(sorted(again.keys() ^ written.keys()))}")
    for name, place in again.items():
        both = (value(name, place), written[name].cpu())
        if not torch.equal(*(tensor.contiguous().unsqueeze(-1).view(torch.uint8) for tensor in both)):
            raise OSError(f"{name} was read back changed")
