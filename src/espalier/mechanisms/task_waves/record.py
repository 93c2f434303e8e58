"""Record of Spindle, as `espalier explain` prints it."""

from espalier.recipe.records import Record

RECORD = Record(
    name="spindle",
    title="Spindle: several tasks and towers trained in waves on changing groups of devices",
    aliases=("multi-task waves",),
    paper="ASPLOS 2025, arXiv 2409.03365",
    files=("mechanisms/task_waves/",),
    chosen="a recipe with several tasks or towers whose sizes differ, on more devices than the small ones can use",
    cost=(
        "T_m(n) = a + b/n per tower and group size, fitted to measurements; per level the "
        "towers end together at C* with sum of n = N; step = a timetable of forward and "
        "backward passes and of what crosses links, then the sums of gradients"
    ),
    law="any plan of waves gives the loss and gradients of running the tasks one after the other",
    law_test="tests/mechanisms/task_waves/test_spindle.py::test_waves_give_the_loss_and_gradients_of_one_task_after_the_other",
    bench="bench/spindle.py",
    headline=(
        "three tasks on three towers, 2 ranks at 200 Mbit/s: 1.34 times as fast as fixed "
        "groups, 2.18 times as one task after the other (n=15)"
    ),
    state="works",
    limits="steps of real towers are predicted within about 10 %",
    runs_on="November 2026: 2 to 4 ranks on AMD EPYC; no GPU",
)
