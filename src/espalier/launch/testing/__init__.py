"""Tools for tests, ours and users': many ranks on one CPU, comparison, scripted failures."""

from espalier.launch.testing.faults import Fault as Fault
from espalier.launch.testing.faults import strike as strike
from espalier.launch.testing.forks import Died as Died
from espalier.launch.testing.forks import forks as forks
from espalier.launch.testing.forks import outcomes as outcomes
from espalier.launch.testing.ranks import ranks as ranks
from espalier.launch.testing.same import same as same
