"""No file in a folder of somebody else does more than be refused: deep nesting, endless numbers, lengths that lie."""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import struct
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from espalier.checkpoint import manifest
from espalier.checkpoint.save_and_restore import Checkpoints
from espalier.evaluate.eval_history import EvalHistory
from espalier.graph.data import array_file, numpy_pickle, sources
from espalier.language import hf
from espalier.machine import cluster as clusters
from espalier.plan import base as plans
from espalier.recipe import Data, GraphOptions, foreign_files, recipe_file, serialization
from espalier.recipe.errors import EspalierError, UserError
from espalier.track import events
from espalier.track.run_tables import RunTables
from espalier.train import skip_list

READERS: dict[str, Callable[[Path], Any]] = {
    "manifest.json": lambda path: manifest.loads(path.read_bytes()),
    "plan.json": plans.read,
    "cluster.toml": clusters.read,
    "run.toml": recipe_file.load,
    "events.jsonl": lambda path: (list(events.read(path)), RunTables.read(path.parent), EvalHistory(path)),
    "skips.json": lambda path: skip_list.read(path.parent),
    "config.json": foreign_files.read_table,
}
DEEP, LONG = "[" * 100_000 + "]" * 100_000, "9" * 5000
TEXTS = [
    "",
    "null",
    "\0" * 10,
    DEEP,
    '{"a":' * 100_000,
    f"a={DEEP}",
    "a={b=" * 3000,
    f"[[nodes]]\ncores={LONG}",
    f'[model]\nkind="gpt"\nwidth={LONG}',
    f'{{"event":"step","step":{LONG}}}\n',
    f'{{"event":"step","a":{DEEP}}}\n',
    f'{{"version":2,"step":1,"loss":null,"ranks":1,"time":0,"files":{{}},"meta":{{"a":{DEEP}}}}}',
    f'{{"ranks":[{{"share":[0,1]}}],"a":{DEEP}}}',
    '{"event":1}\n{"event":"eval","figures":"x"}\n{"event":"checkpoint","step":"x"}\n{"event":"validation","step":{}}\n',
]


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_no_text_does_more_than_be_refused(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with contextlib.suppress(EspalierError, manifest.Bad):
        READERS[name](path)


@pytest.mark.parametrize("file", ["../../secret", "/dev/zero", "part/../../secret"])
def test_a_checkpoint_has_no_files_elsewhere(tmp_path: Path, file: str) -> None:
    """Reading /dev/zero to its end would never end."""
    known = {file: manifest.FileHash(4, "0" * 32)}
    made = manifest.Manifest(step=4, loss=None, ranks=1, time=0.0, meta={}, files=known)
    (tmp_path / "step-00000004").mkdir()
    (tmp_path / "step-00000004" / manifest.NAME).write_bytes(manifest.dumps(made))
    (entry,) = Checkpoints(tmp_path).entries()
    assert "which is no file of the checkpoint" in entry.why


@pytest.mark.parametrize("name", ["../secret.safetensors", "/tmp/secret.safetensors", "..", ""])
def test_an_index_of_weights_names_files_of_its_folder_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / hf.INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(UserError, match="is no file of the folder"):
        list(hf._stored(tmp_path))


def test_weights_whose_header_lies_are_refused(tmp_path: Path) -> None:
    for data in (b"\xff" * 8, (2**40).to_bytes(8, "little") + b"{}", b"\x02\0\0\0\0\0\0\0{}"[:9]):
        (tmp_path / "model.safetensors").write_bytes(data)
        with pytest.raises(UserError, match="cannot be read"):
            list(hf._stored(tmp_path))


@pytest.mark.parametrize("size", [2**61 - 1, 2**45])
def test_an_array_that_says_it_is_larger_than_memory_is_refused(tmp_path: Path, size: int) -> None:
    header = f"{{'descr': '<f8', 'fortran_order': False, 'shape': ({size},), }}".encode()
    body = io.BytesIO()
    with zipfile.ZipFile(body, "w") as made:
        made.writestr("edge_index.npy", b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)
    (tmp_path / "graph.npz").write_bytes(body.getvalue())
    with pytest.raises(UserError, match=r"cannot be read|does not fit into memory"):
        array_file.load(tmp_path / "graph.npz", undirected=True)


@pytest.mark.parametrize(
    "data", [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc9\xff\xff\xff\xff\x01", b"\x91" * 100_000]
)
def test_lengths_of_msgpack_that_lie_are_refused(data: bytes) -> None:
    with pytest.raises(UserError, match="cannot be decoded"):
        serialization.loads(data)


def test_a_place_in_a_pickles_memo_takes_no_room(tmp_path: Path) -> None:
    """The unpickler in C makes a table of as many entries as a file says: here of 2**31, which is 16 GiB."""
    (tmp_path / "ind.a.graph").write_bytes(b"\x80\x02]r" + struct.pack("<I", 2**31) + b".")
    tracemalloc.start()
    assert numpy_pickle.read(tmp_path / "ind.a.graph", "another file") == []
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
    assert issubclass(numpy_pickle._Careful, pickle._Unpickler)


def test_a_tensor_that_repeats_one_number_is_compared_with_memory(tmp_path: Path) -> None:
    torch.save({"edge_index": torch.zeros(1, dtype=torch.int64).expand(2, 1 << 42)}, tmp_path / "graph.pt")
    with pytest.raises(UserError, match=r"graph\.pt does not fit into memory"):
        sources.load(Data(path=str(tmp_path / "graph.pt")), GraphOptions())
