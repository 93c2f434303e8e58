"""How is a matrix stored and ordered? As differences between similar rows."""

from espalier.sparse.cbm.matrix import CBM as CBM
from espalier.sparse.cbm.matrix import Stats as Stats
