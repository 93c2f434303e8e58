"""Record of DiskGNN, as `espalier explain` prints it."""

from espalier.recipe.records import Record

RECORD = Record(
    name="diskgnn",
    title="DiskGNN: batches sampled ahead, their rows packed on disk, and read in order",
    aliases=("disk-gnn", "packed batches", "out of core"),
    paper="SIGMOD 2025, arXiv 2405.05231",
    files=("mechanisms/disk_batches/",),
    chosen="a recipe with a [store]: node features larger than the memory they may take, on a machine with a disk",
    cost=(
        "per batch packed rows * row bytes / sequential bandwidth + shared pages / random "
        "bandwidth, behind the compute of the batch before; one sequential pass over the "
        "features to pack"
    ),
    law="rows from every tier are the graph's, and losses those of training in memory with the same pool, to the bit",
    law_test="tests/mechanisms/disk_batches/test_mini_batches.py::test_training_from_disk_is_training_in_memory_with_the_same_pool_bitwise",
    bench="bench/diskgnn.py",
    headline="an epoch of a graph of 5,000,000 nodes is 31.00 times as fast as DGL's reader of disks (n=3)",
    state="works",
    limits="packing reaches 0.66 of the disk's sequential write, with its planning 0.48",
    runs_on="November 2026: AMD EPYC; one NVIDIA H100",
)
