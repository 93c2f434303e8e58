"""Record of AMSP, as `espalier explain` prints it."""

from espalier.recipe.records import Record

RECORD = Record(
    name="amsp",
    title="AMSP: parameters, gradients and optimizer states sharded independently",
    aliases=("advanced model states partitioning",),
    paper="arXiv 2311.00257",
    files=(
        "mechanisms/sharding/",
        "plan/axes/placement.py",
        "plan/axes/placement_plan.py",
        "plan/axes/sharding.py",
    ),
    chosen=(
        "several ranks and model states that do not fit replicated, or whose full sharding "
        "would cross slow links every step"
    ),
    cost=(
        "bytes held = bP*N/sP + bG*N/sG + bOS*N/sOS; per micro-batch all-gathers over sP and "
        "reduce-scatters over sG; per step reduce-scatter over sOS/sG, all-reduce over D/sOS,"
        " all-gather over sOS/sP; factors nest sP | sG | sOS | D"
    ),
    law=(
        "every nested triple gives plain data parallel's parameters and gradient norms, and "
        "the ledger's bytes are the formula's; the search over all triples finds what trying "
        "each of them finds"
    ),
    law_test="tests/mechanisms/sharding/test_amsp.py::test_every_triple_on_four_gloo_ranks_trains_as_one_rank_does",
    bench="bench/amsp.py",
    headline=(
        "over 200 Mbit/s the planned layout is 1.46 times as fast as DDP, 2.95 times FSDP2 "
        "and 1.25 times the best fixed layout, HSDP (n=7)"
    ),
    state="works",
    limits="level with DDP on loopback, 0.86 times FSDP2's speed there where all states are sharded",
    runs_on="November 2026: 4 ranks on AMD EPYC; two ranks on one NVIDIA H100",
)
