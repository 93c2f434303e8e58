"""How is a matrix stored and ordered?"""

from espalier.sparse.attention import attention_aggregate as attention_aggregate
from espalier.sparse.cbm import CBM as CBM
from espalier.sparse.cbsr import cbsr_aggregate as cbsr_aggregate
from espalier.sparse.csr import CSR as CSR
from espalier.sparse.csr import DiagonalScale as DiagonalScale
from espalier.sparse.csr import matmul as matmul
from espalier.sparse.order_choice import order as order
from espalier.sparse.rcmpp import bandwidth as bandwidth
from espalier.sparse.rcmpp import profile as profile
from espalier.sparse.rcmpp import rcmpp as rcmpp
