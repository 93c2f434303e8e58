"""Support for tests and benchmarks: many ranks on one CPU, comparison, scripted failures."""

from many_ranks.faults import Fault as Fault
from many_ranks.faults import strike as strike
from many_ranks.forks import Died as Died
from many_ranks.forks import forks as forks
from many_ranks.forks import outcomes as outcomes
from many_ranks.ranks import ranks as ranks
from many_ranks.same import same as same
