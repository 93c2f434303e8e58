"""Memory: what is resident stays within the buffers, also where the address space is limited to them."""

import json
import os
import subprocess
import sys
import textwrap

import pytest

PROGRAM = """
import json, os, resource, sys
import torch
from torch import nn
from espalier.recipe import Adamw
from espalier.checkpoint.save_and_restore import Checkpoints
from espalier.machine.peak_memory import peak_memory
from espalier.optim import adamw
from espalier.optim.base import OptimizerGroup, Owned
from espalier.plan.axes.node_layout import FlatLayer
from espalier.mechanisms.offload.optimizer import StateFolder
from espalier.mechanisms.offload.parameters import OffloadNode
from pathlib import Path

MIB = 2**20
torch.set_num_threads(1)
for what in sys.argv[2:]:  # each in a process of its own
    if os.fork() == 0:
        break
    assert os.wait()[1] == 0
else:
    sys.exit()
folder = Path(sys.argv[1]) / what
folder.mkdir()
options = Adamw(learning_rate=1e-3)


def vm():
    return int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()


def limit(more):
    resource.setrlimit(resource.RLIMIT_AS, (vm() + more, vm() + more))


def sizes():
    # of this process: anonymous memory now
    return int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("RssAnon"))) * 1024


states = StateFolder(folder, "rank0", 2 * MIB)
if what == "layers":
    layers = [FlatLayer(f"l{n}", ((f"l{n}.w", (1024, 1024)),)) for n in range(16)]  # 64 MiB of values, 256 MiB in all
    fill = lambda index, flat: flat.fill_(index)

    def train(layers, step):
        node = OffloadNode(layers, options, fill, states)
        for index, layer in enumerate(layers):
            out = torch.empty(layer.numel)
            node.wait(node.pull(index, step, out))
            node.wait(node.push(index, step, out.add_(1.0)))
            told.append(sizes())
            del out
        node.totals(step, torch.zeros(1))
        node.move(step, 0.5, 1.0)
        told.append(sizes())

    told = []
    train(layers[:1], 0)  # loads what is loaded once
    first, _ = sizes(), limit(200 * MIB)  # with eight threads' stacks
    told.clear()
    train(layers, 0)
    most = max(told)
else:
    owned = [Owned(f"p{n}", nn.Parameter(torch.zeros(1024, 1024)), torch.Size((1024, 1024))) for n in range(8)]
    for one in owned:
        one.tensor.grad = torch.ones_like(one.tensor)
    if what == "disk":
        optimizer = adamw.build(options, owned, states.group)
        optimizer.step(1.0)
        first = sizes()
        limit(48 * MIB)
    else:
        first = sizes()
        optimizer = adamw.build(options, owned, OptimizerGroup)
    most = 0
    for _ in range(3):
        optimizer.step(1.0)
        most = max(most, sizes())
    if what == "disk":
        saved = Checkpoints(folder / "checkpoints")
        saved.save(1, {"optimizer": optimizer}, {})
        most = max(most, sizes())
        saved.load({"optimizer": optimizer})
        most = max(most, sizes())
print(json.dumps({what: most - first}))
"""


CASES = [("memory", 60, 90), ("disk", -10, 24), ("layers", -10, 40)]


@pytest.fixture(scope="module")
def grown(tmp_path_factory) -> dict[str, int]:
    """Bytes by which each process grew as it trained. Tensors are mapped one by one, so that freed ones do not count:
    otherwise malloc keeps holes that are a header too short for the next tensor of the same size."""
    folder = tmp_path_factory.mktemp("limits")
    (folder / "program.py").write_text(textwrap.dedent(PROGRAM))
    done = subprocess.run(
        [sys.executable, folder / "program.py", folder, *(what for what, _, _ in CASES)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "1048576"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return {what: size for line in done.stdout.splitlines() for what, size in json.loads(line).items()}


@pytest.mark.slow
@pytest.mark.parametrize(("what", "least", "most"), CASES)
def test_states_on_disk_take_the_memory_of_buffers(grown, what, least, most):
    """Of 64 MiB of states, or 256 MiB of layers; extents have 2 MiB. The first line is the plain form, which takes them
    all."""
    assert least * 2**20 <= grown[what] <= most * 2**20
