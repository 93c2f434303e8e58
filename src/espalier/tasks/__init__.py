"""How are several tasks trained on several towers?"""

from espalier.tasks.towers import Multitask as Multitask
from espalier.tasks.workload import ROW as ROW
