"""Opening is not running: pickles in checkpoints, copies in memory and messages are refused by name and do nothing."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from parts import Box

from espalier.checkpoint import dcp_metadata, in_memory, manifest, reader, shared_memory, state_tree, tensor_slice
from espalier.checkpoint.coordination import Coordinator
from espalier.checkpoint.in_memory import CopySlot, Memory
from espalier.checkpoint.save_and_restore import Checkpoints
from espalier.checkpoint.storage import open_place
from espalier.checkpoint.writer import Write, WriteJob
from espalier.comm import plain_collectives
from espalier.launch.ranks.rank_process import Child
from espalier.recipe import serialization
from espalier.recipe.errors import UserError
from espalier.train.rank_spec import RankSpec
from many_ranks import forks


class Evil:
    """Unpickled, it makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """What a pickle makes that is run; checked to be made when one is."""
    made = tmp_path / "ran"
    pickle.loads(pickle.dumps(Evil(made)))
    assert made.exists()
    made.unlink()
    return made


STATE = {"weights": torch.arange(6.0), "steps": {0: (1, "a")}}


def saved(folder: Path, step: int = 1) -> Path:
    """A checkpoint's folder."""
    checkpoints = Checkpoints(folder)
    checkpoints.save(step, {"box": Box(**STATE)}, {}, wait=True)
    checkpoints.abandon()
    return folder / f"step-{step:08d}"


def resealed(checkpoint: Path) -> None:
    """Makes the manifest that of the files as they are now: hashes are no secret."""
    kept = manifest.loads((checkpoint / manifest.NAME).read_bytes())
    files = {name: manifest.digest_path(checkpoint / name) for name in kept.files}
    content = manifest.Manifest(
        version=kept.version, step=kept.step, loss=None, ranks=1, time=kept.time, meta=kept.meta, files=files
    )
    (checkpoint / manifest.NAME).write_bytes(manifest.dumps(content))


def refused(folder: Path, words: str) -> None:
    box = Box()
    with pytest.raises(UserError, match=words):
        Checkpoints(folder).load({"box": box})
    assert box.state == {}


# --- the older format ------------------------------------------------------------------------------------------------


def test_a_pickled_skeleton_is_refused_by_name_and_does_not_run(tmp_path: Path, mark: Path) -> None:
    """As format 1 had it: a pickled skeleton, itself pickled by torch."""
    state = {"box/weights": torch.arange(6.0), "skeleton:box": torched(pickle.dumps({"weights": Evil(mark)}))}
    Write(open_place(tmp_path / "run"), Coordinator(None), WriteJob(4, state, {"step": 4}, None)).run()
    refused(tmp_path / "run", r"step-00000004 has the old format.*\n.*'box'.*pickled")
    assert not mark.exists()


# --- checkpoints -----------------------------------------------------------------------------------------------------


def test_a_pickle_for_a_skeleton_does_not_run(tmp_path: Path, mark: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = pickle.dumps(Evil(mark))
    monkeypatch.setattr(serialization, "dumps", lambda *_: bare)
    saved(tmp_path / "run")
    refused(tmp_path / "run", "state of 'box' in .* cannot be decoded")
    assert not mark.exists()


@pytest.mark.parametrize("field", ["planner_data", "storage_meta", "version"])
def test_a_pickle_in_torchs_metadata_does_not_run(tmp_path: Path, mark: Path, field: str) -> None:
    checkpoint = saved(tmp_path / "run")
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    setattr(metadata, field, Evil(mark))
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    resealed(checkpoint)
    refused(tmp_path / "run", r"\.metadata is not read.\n.*posix.system")
    assert not mark.exists()


def test_a_pickle_for_a_tensor_does_not_run(tmp_path: Path, mark: Path) -> None:
    checkpoint = saved(tmp_path / "run")
    buffer = io.BytesIO()
    torch.save({"weights": Evil(mark)}, buffer)
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    stored = next(info for index, info in metadata.storage_data.items() if index.fqn == "box/weights")
    file = checkpoint / stored.relative_path
    stored.offset, stored.length = file.stat().st_size, len(buffer.getvalue())
    with file.open("ab") as opened:
        opened.write(buffer.getvalue())
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    resealed(checkpoint)
    refused(tmp_path / "run", "does not hold the tensors it should.\n.*it names posix.system")
    assert not mark.exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"relative_path": "../../../etc/passwd"}, "'../../../etc/passwd' is no file of the checkpoint"),
        ({"length": 1 << 40}, "is shorter than it says"),
        ({"transform_descriptors": ["gzip"]}, "is transformed"),
    ],
)
def test_metadata_names_no_file_but_the_checkpoints(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    checkpoint = saved(tmp_path)
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    for stored in metadata.storage_data.values():
        for name, value in change.items():
            setattr(stored, name, value)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    resealed(checkpoint)
    refused(tmp_path, words)


def test_metadata_asks_for_no_more_memory_than_there_are_files(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path)
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    metadata.state_dict_metadata["box/weights"].size = torch.Size([1 << 50])
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    resealed(checkpoint)
    refused(tmp_path, "is larger than all files together")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("writer", ["torch", "espalier"])
def test_what_one_program_writes_the_other_reads(tmp_path: Path, writer: str) -> None:
    state = {"a": torch.randn(3, 4), "b": torch.randn(5, 6)[:, :2], "c": torch.tensor(7, dtype=torch.int64)}
    checkpoint = tmp_path / "torch"
    if writer == "torch":
        dcp.save(state, checkpoint_id=checkpoint, no_dist=True)
    else:
        checkpoint = tmp_path / "step-00000001"
        Write(open_place(tmp_path), Coordinator(None), WriteJob(1, state, {}, None)).run()
    data = (checkpoint / ".metadata").read_bytes()
    files = {file.name: file.stat().st_size for file in checkpoint.iterdir()}
    theirs, ours = pickle.loads(data), dcp_metadata.read(data, files, ".metadata")
    assert ours.keys() == theirs.state_dict_metadata.keys() == state.keys()
    for index, info in theirs.storage_data.items():
        (box,) = theirs.state_dict_metadata[index.fqn].chunks
        place = dcp_metadata.FileRange(info.relative_path, info.offset, info.length)
        assert ours[index.fqn].ranges == {tensor_slice.Box(tuple(box.offsets), tuple(box.sizes)): place}
    by_torch, by_us = ({name: torch.zeros_like(tensor) for name, tensor in state.items()} for _ in range(2))
    dcp.load(by_torch, checkpoint_id=checkpoint, no_dist=True)
    reader.fill(open_place(tmp_path), checkpoint.name, ours, by_us)
    for name, tensor in state.items():
        assert torch.equal(by_torch[name], tensor)
        assert torch.equal(by_us[name], tensor)


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_no_bytes_for_metadata_do_more_than_be_refused(data: st.DataObject) -> None:
    good = bytearray(pickle.dumps({"a": [1, 2, ("b", torch.float32)], "c": torch.Size([3])}))
    if data.draw(st.booleans()):
        good = bytearray(data.draw(st.binary(max_size=100)))
    for _ in range(data.draw(st.integers(0, 4))):
        if good:
            good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    with pytest.raises(UserError):
        dcp_metadata.read(bytes(good), {}, ".metadata")


def test_what_cannot_be_encoded_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    with pytest.raises(UserError, match=r"box/extra/1 is of type .*Evil and cannot be encoded"):
        checkpoints.save(1, {"box": Box(extra=[0, Evil(tmp_path)])}, {})
    assert checkpoints.load({"box": Box()}) is None


# --- copies in memory ------------------------------------------------------------------------------------------------


@pytest.fixture
def slot() -> Any:
    own = shared_memory.build(1, 1 << 20)
    yield CopySlot(own[0].files[0])
    shared_memory.release(own)


def test_a_pickle_in_a_copy_in_memory_does_not_run(slot: CopySlot, mark: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_memory.serialization, "dumps", lambda *_: pickle.dumps(Evil(mark)))
    slot.write(3, {"a": torch.ones(3)}, None)
    assert slot.good()  # its hash is right
    with pytest.raises(UserError, match="A copy in memory cannot be decoded"):
        slot.read()
    assert not mark.exists()


@pytest.mark.parametrize(
    "rows",
    [5, [("a", torch.float32, (1 << 40,), 4096, False)], [("a", torch.float32, (-1,), 0, False)], [("a", 3, (), 0)]],
)
def test_a_copy_in_memory_with_rows_that_lie_is_refused(
    slot: CopySlot, rows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = serialization.dumps
    monkeypatch.setattr(in_memory.serialization, "dumps", lambda *_: plain((rows, None)))
    slot.write(3, {"a": torch.ones(3)}, None)
    with pytest.raises(UserError, match="A copy in memory cannot be read"):
        slot.read()


def test_a_pickled_state_in_a_copy_in_memory_does_not_run(mark: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (own,) = shared_memory.build(1, 1 << 20)
    kept = Memory(own, Coordinator(None), lambda every, why: None)
    monkeypatch.setattr(state_tree, "flatten", lambda parts: ({}, {name: pickle.dumps(Evil(mark)) for name in parts}))
    kept.after(1, lambda: {"box": Box()}, {}, lambda values: None)
    with pytest.raises(UserError, match="The state of 'box' in memory cannot be decoded"):
        kept.take(1, {"box": Box()})
    shared_memory.release([own])
    assert not mark.exists()


# --- what comes from other ranks -------------------------------------------------------------------------------------


class Sender:
    """A peer that sends these tensors."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self.tensors = list(tensors)

    def recv(self, rooms: list[torch.Tensor], *_: int) -> Any:
        rooms[0].copy_(self.tensors.pop(0))

        class Work:
            def wait(self, *_: Any) -> None:
                """It is there."""

        return Work()


def torched(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _gathering(channel: dist.ProcessGroup, mark: Path, call: str) -> str:
    """What rank 0 says of the pickle that rank 1 sends where values are gathered."""
    lead = channel.rank() == 0
    if lead:
        try:
            getattr(plain_collectives, call)("fine", channel)
        except UserError as error:
            return error.what
        return "nothing"
    body = torch.frombuffer(bytearray(pickle.dumps(Evil(mark))), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
    dist.all_gather(sizes, torch.tensor([len(body)]), group=channel)
    longest = max(int(size) for size in sizes)
    if call == "gather":
        dist.gather(body, None, group=channel, group_dst=0)
    else:
        dist.all_gather([torch.empty(longest, dtype=torch.uint8) for _ in range(2)], body, group=channel)
    return ""


@pytest.mark.parametrize("call", ["all_gather", "gather"])
def test_a_pickle_from_another_rank_does_not_run(mark: Path, call: str) -> None:
    said = forks(2, lambda channel: _gathering(channel, mark, call))
    assert said[0] == "what rank 1 sent cannot be decoded."
    assert not mark.exists()


def _exchanged(channel: dist.ProcessGroup) -> list[Any]:
    rank = channel.rank()
    value = {"rank": rank, "text": "x" * rank, "t": (rank, torch.float32)}
    return [
        plain_collectives.all_gather(value, channel),
        plain_collectives.gather(value, channel),
        plain_collectives.scatter([("to", to, "y" * to) for to in range(3)] if rank == 0 else None, channel),
        plain_collectives.broadcast(value, channel),
    ]


def test_values_of_all_ranks_reach_those_they_are_for() -> None:
    each = [{"rank": rank, "text": "x" * rank, "t": (rank, torch.float32)} for rank in range(3)]
    for rank, found in enumerate(forks(3, _exchanged)):
        assert found == [each, each if rank == 0 else None, ("to", rank, "y" * rank), each[0]]


def test_a_pickle_for_what_a_rank_returned_does_not_run(mark: Path) -> None:
    for told in (("returned", Evil(mark)), ("raised", Evil(mark))):
        child = Child(RankSpec(rank=1), -1, -1, -1, pickle.dumps(told), 0)
        assert (child.returned, child.error, child.raised) == (None, None, "")
    assert not mark.exists()
