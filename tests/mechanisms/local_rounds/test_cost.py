"""What an outer engine holds, measured: resident memory of two replicas in one process, by the size of their model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from espalier.mechanisms.local_rounds.cost import copies
from espalier.optim.diloco_slowmo import METHODS

RUN = """
import json, os, sys, threading
import torch
from crews import Replica, together
from espalier.optim.diloco_slowmo import METHODS
from espalier.mechanisms.local_rounds.round_length import Rounds
from dataclasses import replace

def status(key):
    with open("/proc/self/status") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith(key))

def measured(name, codec, size):
    choices, met, before = replace(METHODS[name], codec=codec), threading.Barrier(2), []

    def run(member, make):
        replica = Replica(member, torch.float32)
        replica.live = [torch.randn(size // 8) for _ in range(8)]
        met.wait()
        before.append(status("VmRSS"))
        engine = make(replica, choices, Rounds(4, adapt=False))
        for _ in range(12):
            for tensor in replica.live:
                tensor.add_(0.01)
            engine.after_step(0.1)
        return status("VmHWM")

    return max(together(2, run)) - min(before)

torch.set_num_threads(1)
for case in json.loads(sys.argv[1]):
    if os.fork() == 0:
        print(measured(*case), flush=True)
        os._exit(0)  # threads of Gloo may outlive the interpreter
    assert os.wait()[1] == 0
"""
ENGINES = [("local_sgd", "exact"), ("co2", "int4"), ("streaming_diloco", "int4")]
FEW, MANY = 1_000_000, 4_000_000


@pytest.fixture(scope="module")
def held() -> dict[tuple[str, str, int], int]:
    """Bytes that two engines of models of so many float32 hold at most, above what was there.

    glibc gives every tensor back as it is released: it would keep holes between them, up to a copy or not, as it comes.
    """
    cases = [(*one, size) for one in ENGINES for size in (FEW, MANY)]
    run, here = [sys.executable, "-c", RUN, json.dumps(cases)], Path(__file__).parent
    exact = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(run, env=exact, capture_output=True, text=True, timeout=120, check=True, cwd=here)
    return dict(zip(cases, map(int, done.stdout.split()), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "codec"), ENGINES)
def test_an_engine_holds_as_many_copies_as_its_cost_says(
    held: dict[tuple[str, str, int], int], name: str, codec: str
) -> None:
    found = (held[name, codec, MANY] - held[name, codec, FEW]) / (MANY - FEW) / 4 / 2
    assert found == pytest.approx(copies(replace(METHODS[name], codec=codec)), rel=0.15)


def test_more_is_kept_by_those_that_keep_more() -> None:
    plain = METHODS["local_sgd"]
    assert copies(replace(plain, momentum=0.9)) == copies(plain) + 1
    assert copies(replace(plain, delay=1.0, eager=True)) == copies(replace(plain, delay=1.0)) + 2
    late = replace(plain, delay=1.0)
    assert copies(replace(late, penalty="gap")) == copies(late) + 1
    assert copies(replace(plain, delay=1.0, fragments=4)) < copies(replace(plain, delay=1.0))
    assert copies(plain, on_host=False) == pytest.approx(copies(plain) - 2, rel=1e-3)
