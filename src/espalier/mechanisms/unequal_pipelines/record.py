"""Record of FlashFlex (HexiScale), as `espalier explain` prints it."""

from espalier.recipe.records import Record

RECORD = Record(
    name="flashflex",
    title="FlashFlex (HexiScale): unequal pipelines and stages for unequal devices",
    aliases=("hexiscale", "flash-flex"),
    paper="arXiv 2409.01143",
    files=("mechanisms/unequal_pipelines/", "mechanisms/sharding/layer_holders.py"),
    chosen="devices or links of a job differ enough that equal shares leave the fast ones waiting",
    cost=(
        "pipeline of S stages and n micro-batches: sum of stage times and of transfers both "
        "ways + (n-1)*slowest stage or transfer; step = slowest pipeline + gradient exchange "
        "per layer between its holders"
    ),
    law="layers and shares are those of brute force; gradients weighted by samples equal those of one device",
    law_test="tests/mechanisms/unequal_pipelines/test_flashflex.py::test_unequal_pipelines_train_as_one_rank_does",
    bench="bench/flashflex.py",
    headline=(
        "on four hosts of speeds 1/4 to 1, 1,000 Mbit/s, 1.62 times as fast as an equal split and 1.66 times DDP (n=5)"
    ),
    state="works",
    limits="no figures of GPUs",
    runs_on="November 2026: 4 hosts simulated on AMD EPYC; no GPU",
)
