"""Record of Buff (InternEvo), as `espalier explain` prints it."""

from espalier.recipe.records import Record

RECORD = Record(
    name="buff",
    title=(
        "Buff (InternEvo): sequence, weights, pipeline and optimizer sharded on separate axes, with selective overlap"
    ),
    aliases=("internevo", "isp"),
    paper="arXiv 2401.09149",
    files=(
        "plan/search.py",
        "plan/step_time.py",
        "plan/memory_model.py",
        "mechanisms/tensor_parallel/",
        "mechanisms/pipeline/",
    ),
    chosen="long sequences on many ranks, when gathering weights hides behind compute better than moving activations",
    cost=(
        "per layer max(compute, weight gathers) + 0.2*min of the two + all-to-alls of the "
        "sequence + attention; step = micro-batches*layers + pipeline bubble + gradient and "
        "parameter exchange"
    ),
    law="the search over the grid finds the same plan as trying every point of it",
    law_test="tests/plan/test_search.py::test_the_search_equals_brute_force",
    bench="bench/buff.py",
    headline=(
        "cut layouts on two hosts at 100 Mbit/s are 1.30 to 2.18 times as fast as DTensor, "
        "FSDP2 and PyTorch's 1F1B (n=5)"
    ),
    state="works",
    limits=(
        "gathers begin at the same place in all blocks; at 1,000 Mbit/s and on loopback the "
        "first choice takes 31 and 11 % longer than the fastest layout"
    ),
    runs_on="November 2026: 4 ranks on AMD EPYC; two ranks on one NVIDIA H100 (matrices, heads, stages)",
)
