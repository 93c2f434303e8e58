"""Tools for tests, ours and users': many ranks on one CPU, comparison, scripted failures."""

from espalier.testing.faults import Fault as Fault
from espalier.testing.faults import strike as strike
from espalier.testing.forks import Died as Died
from espalier.testing.forks import forks as forks
from espalier.testing.forks import outcomes as outcomes
from espalier.testing.ranks import ranks as ranks
from espalier.testing.same import same as same
