"""How are several tasks trained on several towers?"""

from espalier.multitask.towers import Multitask as Multitask
from espalier.multitask.workload import ROW as ROW
