"""A node's memory is its rings of buffers, for a model of any size; and what it says when its disk has no room."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from nodes import TOKEN, MemoryState, client, gradient, job, node, pulled, push_all

from espalier.mechanisms.optimizer_node.client import Client
from espalier.mechanisms.optimizer_node.state_file import open_state, open_sums
from espalier.plan.axes.node_layout import FlatLayer
from espalier.recipe.errors import UserError
from espalier.store import direct_io
from espalier.store.direct_io import DiskFull
from espalier.store.extents import DamagedExtent

NODE = """
import json, socket, sys, threading, time
from dataclasses import replace
from pathlib import Path
import torch
from nodes import TOKEN, buffer_bytes, client, filler, gradient, job, node, on_disk, pulled, push_all
from espalier.plan.axes.node_layout import FlatLayer
from espalier.mechanisms.optimizer_node.node import OptimizerNode

torch.set_num_threads(1)

def anonymous():
    return 1024 * int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("RssAnon")))

warm, folder = job(push="int16"), Path(sys.argv[1])
with node(warm, folder / "warm") as (_, address):  # loads all code
    worker = client(address, warm)
    for step in range(2):
        pulled(worker, step)
        push_all(worker, step, [gradient(warm, layer, step) for layer in range(3)])
        worker.totals(step, torch.zeros(1))
        worker.move(step, 0.5, 1.0)
    pulled(worker, 2)
    worker.close()

layers = tuple(FlatLayer(f"layer {place}", (("weight", (2048, 2048)),)) for place in range(int(sys.argv[2])))
one = replace(warm, layers=layers, chunk=1 << 20, push="int16", workers=1)
kept = on_disk(one, folder / "large")
before, peak = anonymous(), 0
made = OptimizerNode(one, kept, socket.create_server(("127.0.0.1", 0)), TOKEN).start()
print(json.dumps({"address": made.door.getsockname(), "buffers": buffer_bytes(made, 1)}), flush=True)

def watch():
    global peak
    while True:
        peak = max(peak, anonymous() - before)
        time.sleep(0.005)

threading.Thread(target=watch, daemon=True).start()
sys.stdin.readline()
print(json.dumps({"peak": peak, "step": kept[0].step}), flush=True)
"""


@pytest.mark.slow
def test_a_node_of_a_model_eight_times_its_buffers_holds_its_buffers(tmp_path: Path) -> None:
    count = 16
    process = subprocess.Popen(
        [sys.executable, "-c", NODE, str(tmp_path), str(count)],
        cwd=Path(__file__).parent,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    told = json.loads(process.stdout.readline())
    layers = tuple(FlatLayer(f"layer {place}", (("weight", (2048, 2048)),)) for place in range(count))
    one = replace(job(), layers=layers, chunk=1 << 20, push="int16", workers=1)
    elements = sum(layer.numel for layer in layers)
    assert 12 * elements >= 8 * told["buffers"]
    worker = Client([[tuple(told["address"])]], 0, one, TOKEN)
    out, values = torch.empty(layers[0].numel), torch.randn(layers[0].numel)
    for step in range(2):
        for number in range(count):
            worker.wait(worker.pull(number, step, out))
        for number in reversed(range(count)):
            worker.wait(worker.push(number, step, values))
        worker.totals(step, torch.zeros(1))
        worker.move(step, 0.5 if step else 1.0, 1.0, following=1.0)
    worker.wait(worker.pull(0, 2, out))
    last, _ = process.communicate("\n", timeout=60)
    found = json.loads(last)
    assert found["step"] == 2
    assert found["peak"] <= 1.15 * told["buffers"], (found["peak"] / 2**20, told["buffers"] / 2**20)


def test_a_disk_without_room_for_the_state_is_told_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = job()
    monkeypatch.setattr(direct_io, "free_bytes", lambda path: 1000)
    with pytest.raises(DiskFull, match=r"(?s)bytes more.*state of an optimizer node"):
        open_state(tmp_path / "node", one, lambda number, out: out.zero_())
    assert not (tmp_path / "node" / "state").exists()


def test_a_disk_that_fails_ends_the_step_with_its_own_words_and_the_files_hold_the_step_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = job()
    with node(one, tmp_path) as (made, address):
        worker = client(address, one)
        full = DiskFull("The disk of /state is full: 4,096 bytes more (4 KiB) are needed.")
        monkeypatch.setattr(made.state, "write", lambda name, buffer: (_ for _ in ()).throw(full))
        gradients = [gradient(one, layer, 0) for layer in range(3)]
        push_all(worker, 0, gradients)
        worker.move(0, 1.0, 1.0)
        with pytest.raises(UserError, match="4,096 bytes more"):
            pulled(worker, 1)
        with pytest.raises(UserError, match="4,096 bytes more"):
            made.wait()
    monkeypatch.undo()
    with node(one, tmp_path) as (made, address):
        assert made.state.step == 0
        worker = client(address, one)
        push_all(worker, 0, gradients)
        worker.move(0, 1.0, 1.0)
        pulled(worker, 1)
        worker.close()


def test_files_of_another_model_are_refused(tmp_path: Path) -> None:
    one = job()
    open_state(tmp_path, one, lambda number, out: out.zero_()).close()
    with pytest.raises(UserError, match="holds the state of another model"):
        open_state(tmp_path, job(layers=one.layers[:2]), lambda number, out: out.zero_())


def test_a_start_that_was_killed_while_filling_leaves_no_state(tmp_path: Path) -> None:
    one = job()

    def killed(number: int, out: torch.Tensor) -> None:
        if number == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        open_state(tmp_path, one, killed)
    with open_state(tmp_path, one, lambda number, out: out.zero_()) as state:
        assert state.step == 0


def test_sums_on_disk_come_back(tmp_path: Path) -> None:
    one = job(chunk=128)
    chunks = one.all_chunks
    sums = open_sums(tmp_path, one)
    kept = {chunk.name: torch.randn(chunk.elements) for chunk in chunks}
    for chunk in chunks:
        sums.write(chunk.name, kept[chunk.name])
    for chunk in reversed(chunks):
        found = torch.empty(chunk.elements)
        sums.read(chunk.name, found, pending=True)
        assert found.equal(kept[chunk.name])


def test_a_flipped_bit_in_sums_is_named(tmp_path: Path) -> None:
    one = job(chunk=128)
    chunk = one.chunks[0][0]
    sums = open_sums(tmp_path, one)
    sums.write(chunk.name, torch.randn(chunk.elements))
    at = sums._layout.at(chunk.name, 0)
    with (tmp_path / "sums").open("r+b", buffering=0) as file:
        byte = os.pread(file.fileno(), 1, at)
        os.pwrite(file.fileno(), bytes([byte[0] ^ 4]), at)
    with pytest.raises(DamagedExtent, match=r"(?s)'0/0' of .*sums is damaged"):
        sums.read(chunk.name, torch.empty(chunk.elements), pending=True)


def test_memory_state_forgets_what_was_not_committed_and_goes_back_one_step() -> None:
    state = MemoryState({"a": 3})
    for step, value in enumerate((1, 2)):
        state.write("a", torch.full((3,), value, dtype=torch.uint8))
        state.commit(step)
    state.write("a", torch.full((3,), 9, dtype=torch.uint8))
    state.rollback()
    found = torch.empty(3, dtype=torch.uint8)
    state.read("a", found)
    assert found.tolist() == [2, 2, 2]
    state.revert()
    state.read("a", found)
    assert (state.step, found.tolist()) == (0, [1, 1, 1])
