"""Record of LuWu, as `espalier explain` prints it."""

from espalier.recipe.records import Record

RECORD = Record(
    name="luwu",
    title="LuWu: the optimizer and all model state on nodes of their own, out of core",
    aliases=("disdp", "optimizer node"),
    paper="arXiv 2409.00918 (later versions: DisDP, ISCA 2026)",
    files=("mechanisms/optimizer_node/", "mechanisms/pipeline/layerwise_schedule.py", "kernels/fixed_point.py"),
    chosen=(
        "model states larger than the memory of all ranks together, with a node that has "
        "disks, or links on which sharded data parallel waits"
    ),
    cost=(
        "per worker and layer of S bytes: S sent, 2*S received, whatever the number of "
        "workers and micro-batches; the node reads and writes 12 bytes of state per parameter"
        " and step; a step takes max(compute, 2*S/bandwidth, the node's disks)"
    ),
    law=(
        "parameters after n steps equal those of an optimizer in memory to the bit; a run "
        "goes on from the node's files to the bit; several workers end with the same bits"
    ),
    law_test="tests/mechanisms/optimizer_node/test_run.py::test_one_worker_and_its_nodes_train_to_the_last_bit_as_plain_adamw",
    bench="bench/luwu.py",
    headline=(
        "a node's AdamW is 11.13 times as fast as torch's default one on a core; fed by 4 "
        "workers at 200 Mbit/s it reaches 0.87 of what link, disk and AdamW allow"
    ),
    state="works",
    limits="a model must come in pieces (layers); the goal, 0.9 of what link, disk and AdamW allow, is missed",
    runs_on="November 2026: workers and node on AMD EPYC; a worker on one NVIDIA H100, its node on the processor",
)
