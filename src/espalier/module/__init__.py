"""How is anybody's own module trained?"""

from espalier.module.parts import Later as Later
from espalier.module.parts import Parts as Parts
from espalier.module.parts import Task as Task
from espalier.module.workload import ROW as ROW
from espalier.module.workload import ModuleWorkload as ModuleWorkload
from espalier.module.workload import open_module as open_module
