"""Record of Acme, as `espalier explain` prints it."""

from espalier.recipe.records import Record

RECORD = Record(
    name="acme",
    title="Acme: diagnosis of failures, recovery without people, and evaluation beside training",
    aliases=("resilience", "decoupled evaluation"),
    paper="Hu et al., NSDI 2024, arXiv 2403.07648",
    files=(
        "launch/resilience/",
        "ops/",
        "evaluate/",
        "launch/ranks/supervisor.py",
        "launch/ranks/agent.py",
        "train/rejoin_signal.py",
        "comm/abort.py",
    ),
    chosen=(
        "every run that is started by our supervisor; evaluation apart from training when a "
        "validation takes longer than the time between checkpoints allows"
    ),
    cost=(
        "waste = stall / T + (T/2 + restart) / time between failures, least at T = sqrt(2 * "
        "stall * time between failures)"
    ),
    law=(
        "a run that is killed at any moment and recovers has the parameters and losses of the"
        " unbroken run; replicas that agree by rounds excepted, which go on without the lost "
        "one's part of a round"
    ),
    law_test="tests/launch/test_supervisor.py::test_whatever_happens_to_one_of_two_ranks_changes_no_bit",
    bench="bench/acme.py",
    headline=(
        "the next step after SIGKILL comes 9.08 times as soon as with torchrun (0.6 s, n=2); "
        "in 30 minutes with a fault every 20 s goodput is 1.33 times its goal of 0.7"
    ),
    state="works",
    limits="ranks stay while another is replaced on processors only; fewer ranks or another plan on one machine only",
    runs_on="November 2026: Intel Xeon, AMD EPYC, Slurm with two node daemons; no GPU",
)
