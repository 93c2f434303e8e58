"""Record of CO2, as `espalier explain` prints it."""

from espalier.recipe.records import Record

RECORD = Record(
    name="co2",
    title="CO2: local steps, and an outer step whose exchange is hidden behind the next round",
    aliases=("outer sync", "local sgd", "slowmo", "diloco", "streaming diloco"),
    paper="arXiv 2401.16265",
    files=("mechanisms/local_rounds/", "optim/outer_optimizer.py"),
    chosen="machines between which an exchange of gradients takes several times as long as a step",
    cost=(
        "per round 2(G-1)/G of the parameters from each replica, divided by the codec's "
        "ratio, behind steps >= 1.1 * exchange / step; held: outer parameters, momentum and "
        "two copies in flight, of this rank's shard"
    ),
    law=(
        "bit for bit the recurrence of the paper in one process; one step without delay is "
        "data parallel; a checkpoint in flight resumes to the bit; what is dead is dropped "
        "from the mean, and may come back at a round"
    ),
    law_test="tests/mechanisms/local_rounds/test_outer_loop.py::test_twenty_rounds_are_those_of_the_recurrence_to_the_bit",
    bench="bench/co2.py",
    headline=(
        "at 50 Mbit/s rounds of 4 steps train 3.30 times as many tokens a second as DDP and "
        "reach its loss 3.36 times as soon (n=7)"
    ),
    state="works",
    limits="in `espalier train` a lost replica is dropped, and another let in, only for replicas of one rank each",
    runs_on="November 2026: 4 ranks on Intel Xeon; two ranks on one NVIDIA H100",
)
