"""RCM++: nodes ordered so that neighbours stand near each other. Its plain form is its test's reference."""

from espalier.sparse.rcmpp.cuthill_mckee import FINDERS as FINDERS
from espalier.sparse.rcmpp.cuthill_mckee import bandwidth as bandwidth
from espalier.sparse.rcmpp.cuthill_mckee import profile as profile
from espalier.sparse.rcmpp.cuthill_mckee import rcmpp as rcmpp
