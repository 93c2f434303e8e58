"""Record of Sylvie, as `espalier explain` prints it."""

from espalier.recipe.records import Record

RECORD = Record(
    name="sylvie",
    title="Sylvie: low-bit exchange of halo nodes, one epoch stale within a bound",
    aliases=("halo exchange", "3d-adaptive"),
    paper="ICDE 2024, arXiv 2303.01277",
    files=(
        "mechanisms/halo_exchange/",
        "graph/tasks/loss_speed.py",
        "graph/parts/coded_rows.py",
        "kernels/quantize_rows.py",
        "kernels/row_widths.py",
    ),
    chosen="a full graph split over ranks, when the halo exchange of each layer takes longer than its compute",
    cost=(
        "per layer, direction and boundary row of width d: d*bits/8 + 4 bytes (rows of up to "
        "32 values share the 4), and 8 bytes for each message; hidden behind an epoch when "
        "pipelined"
    ),
    law=(
        "the exact codec without staleness equals the single-process run; stale halos equal a"
        " simulator of them bit for bit"
    ),
    law_test="tests/mechanisms/halo_exchange/test_sylvie.py::test_late_rows_give_the_bits_of_a_simulator_of_stale_halos",
    bench="bench/sylvie.py",
    headline=(
        "10,000 nodes over four links of 100 Mbit/s: an epoch with late 1-bit rows is 12.06 "
        "times as fast as fp32's (n=5)"
    ),
    state="works",
    limits=(
        "late rows cost accuracy (82.7 % after 61 epochs of 200,000 nodes, fresh ones 97.4 "
        "%); each machine opens the whole graph, unless data.path is a folder of parts"
    ),
    runs_on="November 2026: 4 hosts simulated on AMD EPYC and Intel Xeon; two ranks on one NVIDIA H100",
)
