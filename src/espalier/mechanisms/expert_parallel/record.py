"""Record of FlashMoE, as `espalier explain` prints it."""

from espalier.recipe.records import Record

RECORD = Record(
    name="flashmoe",
    title="FlashMoE: dispatch, experts and combine as one asynchronous graph of tile tasks",
    aliases=("flash-moe", "flashdmoe"),
    paper="NeurIPS 2025, arXiv 2506.04667",
    files=("mechanisms/expert_parallel/", "plan/axes/experts.py"),
    chosen=(
        "on several machines or GPUs, where a step with experts over ranks is faster than "
        "with every expert on each rank, or all do not fit; plan.pin.ep says over how many"
    ),
    cost=(
        "per layer and micro-batch: counts, fresh rows and answers forward, weights, "
        "gradients of fresh rows and of inputs backward; only real rows, a token for two "
        "experts of one rank once"
    ),
    law=(
        "outputs and gradients equal those of the experts run on one rank, for every map of "
        "experts, with the same bits in whatever order messages come"
    ),
    law_test="tests/mechanisms/expert_parallel/test_flashmoe.py::test_ranks_equal_all_experts_on_one",
    bench="bench/flashmoe.py",
    headline=(
        "a layer of 16 experts over 200 Mbit/s is 1.54 times as fast as a plain all-to-all "
        "and 4.85 times as a padded one (n=7)"
    ),
    state="works",
    limits="no persistent GPU kernel",
    runs_on="November 2026: 4 ranks on AMD EPYC; two ranks on one NVIDIA H100",
)
