"""How are several tasks trained on several towers?"""

from espalier.tasks.towers import MultitaskModel as MultitaskModel
from espalier.tasks.workload import ROW as ROW
