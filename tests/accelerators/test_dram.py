"""DRAM against DRAMsim3, trace by trace; devices, of the table and of parameter files."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.accelerators import dram_traces
from tests.accelerators.dram_traces import TOLD

from espalier.recipe.errors import UserError
from espalier_accelerators import dram
from espalier_accelerators.dram import Trace


def compared(name: str, trace: Trace, told: dict[str, float]) -> None:
    """Row hits, activations, refreshes and latencies are the same, energy but for rounding.

    At the end of a trace DRAMsim3 leaves up to 8 writes of a channel in its window, we write them: so many more row
    hits and activations, the cycles that takes, a tenth at most, and their energy."""
    device = dram.device(name)
    found = trace.served(device)
    assert found.latency == pytest.approx(told["latency"], abs=1e-3)
    assert found.latency_99 == pytest.approx(told["latency_99"], abs=0.01)
    left = 8 * device.channels if trace.writes.any() else 0
    assert 0 <= found.hits - told["hits"] <= left
    assert 0 <= found.activations - told["activations"] <= left
    assert 0 <= found.cycles - told["cycles"] <= (0.1 * told["cycles"] if left else 0)
    assert 0 <= found.refreshes - told["refreshes"] <= (device.channels if left else 0)
    if not name.startswith("ST-"):  # its currents are not its own
        assert found.picojoules == pytest.approx(told["picojoules"], rel=0.1 if left else 1e-3)


@pytest.mark.parametrize(
    "name",  # the eight channels of HBM2 take four times as long as all others; held-back traces are of them too
    [pytest.param(name, marks=pytest.mark.slow if "HBM2" in name else ()) for name in dram_traces.DEVELOPED],
)
def test_row_hits_and_latencies_are_those_of_dramsim3(name):
    for kind, trace in dram_traces.developed(dram.device(name)).items():
        compared(name, trace, TOLD[name][kind])


@pytest.mark.parametrize("name", [*dram_traces.DEVELOPED, *dram_traces.HELD_BACK])
def test_so_they_are_on_traces_and_devices_not_used_before(name):
    for kind, trace in dram_traces.held_back(dram.device(name)).items():
        compared(name, trace, TOLD[name][kind])


def test_a_write_whose_block_is_still_to_be_read_waits_for_that_read_and_no_longer():
    """With its window of writes full and their queue empty: DRAMsim3 hangs."""
    device = replace(dram.device("DDR3_4Gb_x4_1600"), queue=1, window=4)
    random = np.random.default_rng(3)
    trace = Trace(random.integers(0, 6, 400) * 4096, random.random(400) < 0.6, np.zeros(400, np.int64))
    assert 0 < trace.served(device).cycles < 100_000


def test_each_timing_that_grows_makes_some_trace_longer():
    """None is without effect: three traces of reads and writes, all as soon as there is room."""
    device = dram.device("GDDR5_8Gb_x32")
    device = replace(device, groups=4, banks=device.groups * device.banks // 4, ranks=2, ccd_long=4)
    traces = list(dram_traces.developed(device).values())
    names = "cl cwl rcd rcdwr rp ras rrd rrd_long ccd ccd_long faw aw32 wr wtr wtr_long rtp rtrs ppd rfc"
    before = [trace.served(device) for trace in traces]
    for name in names.split():
        slower = replace(device, **{name: getattr(device, name) * 4 + 40})
        assert [trace.served(slower) for trace in traces] != before, name


INI = """
[dram_structure]
protocol = DDR3 ; a comment
bankgroups = 1
banks_per_group = 8
rows = 32768
columns = 1024
device_width = 4
BL = 8

[timing]
tCK = 1.25 (ns)
CL = 11
tRCD = 11
tRRD_S = 5
tRRD_L = 7

[power]
VDD = 1.35

[system]
channel_size = 8192
bus_width = 64
address_mapping = rochrababgco
"""


def test_a_parameter_file_is_a_device(tmp_path):
    """4-bit chips of 128 MiB, 16 of them a rank: four ranks of 2 GiB. What is left out is what DRAMsim3 takes."""
    (tmp_path / "mine.ini").write_text(INI)
    found = dram.device(str(tmp_path / "mine.ini"))
    assert (found.protocol, found.chips, found.ranks, found.block, found.transfer) == ("DDR3", 16, 4, 64, 4)
    assert (found.tck, found.cl, found.cwl, found.rcdwr, found.refi) == (1.25, 11, 12, 11, 7800)
    assert found.rrd_long == 5, "one bank group"
    assert dram.serve(found, np.arange(10)).hits == 9


@pytest.mark.parametrize(
    ("line", "instead", "why"),
    [
        ("protocol = DDR3", "protocol = HMC", "its protocol is HMC"),
        ("protocol = DDR3", "", "its protocol is not told"),
        ("CL = 11", "CL = fast", "CL = fast is no number"),
        ("BL = 8", "BL = 0", "burst is 0"),
        ("tCK = 1.25 (ns)", "tCK = 0", "tck is 0"),
        ("rochrababgco", "rochbabgco", "address_mapping = rochbabgco"),
        ("[system]", "[system]\nrow_buf_policy = CLOSE_PAGE", "row_buf_policy = CLOSE_PAGE"),
        ("[system]", "[system]\nunified_queue = True", "unified_queue = True"),
        ("[dram_structure]", "dram_structure", "no section headers"),
    ],
)
def test_a_file_that_is_no_modelled_device_is_refused(tmp_path, line, instead, why):
    (tmp_path / "mine.ini").write_text(INI.replace(line, instead, 1))
    with pytest.raises(UserError, match=rf"(?s)mine\.ini.*{why}"):
        dram.device(str(tmp_path / "mine.ini"))


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UserError, match=r"none\.ini cannot be read"):
        dram.device(str(tmp_path / "none.ini"))


def test_devices_of_all_kinds_serve_a_stream():
    """DDR3 to HBM2, 4 to 128 bits wide; none exceeds its bandwidth, and all come close to it."""
    found = dram.devices()
    assert {one.protocol for one in found.values()} == set(dram.PROTOCOLS) - {"HBM2"}
    assert {4, 8, 16, 32, 128} <= {one.device for one in found.values()}
    for name, one in found.items():
        served = dram.serve(one, np.arange(600 * one.channels))
        least = served.requests * one.block / one.peak
        assert least <= served.cycles < 2.5 * least, name
        assert served.hits > 0.9 * served.requests, name
        assert served.picojoules > 0 or (name.startswith("ST-") and np.isnan(served.picojoules)), name


def test_the_table_is_what_the_parameter_files_say(data_folder):
    """All 86 but HMC's, which is another memory: packets over links; and two for debugging."""
    paths = sorted((data_folder / "dram").glob("*.ini"))
    if not paths:
        pytest.skip(f"{data_folder} has no dram/*.ini")
    refused = []
    for path in paths:
        if path.stem.startswith("HMC"):
            refused.append(path.stem)
            with pytest.raises(UserError, match="its protocol is HMC"):
                dram.device(str(path))
        elif not path.stem.endswith("_debug"):
            assert dram.device(path.stem) == dram.device(str(path)), path.stem
        else:
            dram.device(str(path))
    assert len(refused) == 4
