"""Traces of requests for test_dram.py, and what DRAMsim3 makes of them (dramsim3.json).

The figures are of DRAMsim3 (github.com/umd-memsys/DRAMsim3, commit 29817593), built with its CMakeLists, with its own
`configs/DEVICE.ini`. To make them anew, write each trace with `dram.write_trace` and run

    dramsim3main configs/DEVICE.ini -c CYCLES -t TRACE

with CYCLES 2,000 more than the fixture's `cycles`: row hits and activations are those of its JSON, summed over channels
(`num_read_row_hits` + `num_write_row_hits`, `num_act_cmds`); latencies are of its histogram of reads. Refreshes,
energy (`total_energy` times tCK) and `cycles`, at which that program does not stop, are of its library
(`MemorySystem`), ticked until the last request has been answered.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from espalier_accelerators.dram import Device, Trace

COUNT = 2000
TOLD: dict[str, dict[str, Any]] = {}
if (FILE := Path(__file__).with_name("dramsim3.json")).exists():
    TOLD = json.loads(FILE.read_text(encoding="utf-8"))

DEVELOPED = ("HBM2_8Gb_x128", "DDR4_8Gb_x8_2400", "DDR3_4Gb_x4_1600", "LPDDR4_8Gb_x16_2400", "GDDR5X_8Gb_x32")
HELD_BACK = ("HBM1_4Gb_x128", "DDR4_8Gb_x4_2933", "DDR4_4Gb_x16_2666", "DDR3_8Gb_x16_1866", "LPDDR3_8Gb_x32_1600")
HELD_BACK += ("GDDR6_8Gb_x16", "GDDR5_8Gb_x32", "ST-2.0x", "lpddr_2Gb_x16")


def developed(device: Device) -> dict[str, Trace]:
    """The traces with which the model was developed."""
    random, at, none = np.random.default_rng(0), np.arange(COUNT), np.zeros(COUNT, bool)
    row, bank = device.columns // device.burst, device.channels * device.groups * device.banks * device.ranks
    begins = random.integers(0, 1 << 20, COUNT // 50 + 1)[at // 64] * 8
    return {
        "sequential": Trace(at, none, 3 * at),
        "random": Trace(random.integers(0, 1 << 22, COUNT), none, 5 * at),
        "strided": Trace(7 * at, none, 4 * at),
        "half writes": Trace(random.integers(0, 1 << 22, COUNT), random.random(COUNT) < 0.5, 6 * at),
        "two rows of a bank in turn": Trace(at % 2 * row * bank + at // 2 % row, none, 12 * at),
        "bursts": Trace(begins + at % 64, random.random(COUNT) < 0.25, at // 64 * 600),
        "more than it can take": Trace(random.integers(0, 1 << 12, COUNT), random.random(COUNT) < 0.3, at // 8),
        "sequential writes": Trace(at, ~none, 4 * at),
    }


def held_back(device: Device) -> dict[str, Trace]:
    """Traces that were not run before the model was finished."""
    random, at = np.random.default_rng(7), np.arange(COUNT)
    hubs = np.minimum(random.zipf(1.4, COUNT), 1 << 18) * 37 % (1 << 18)
    streams = random.integers(0, 3, COUNT)
    return {
        "rows of a graph": Trace(hubs, np.zeros(COUNT, bool), np.cumsum(random.poisson(3, COUNT))),
        "copy": Trace(at // 2 + at % 2 * (1 << 20), at % 2 > 0, 3 * at),
        "three streams": Trace((streams << 19) + at * 3, streams == 2, np.cumsum(random.geometric(0.3, COUNT))),
        "all at once": Trace(random.integers(0, 1 << 16, COUNT), random.random(COUNT) < 0.1, np.zeros(COUNT, np.int64)),
        "seldom": Trace(random.integers(0, 1 << 21, COUNT), random.random(COUNT) < 0.5, 97 * at),
    }
