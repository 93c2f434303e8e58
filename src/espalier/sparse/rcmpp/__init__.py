"""RCM++: nodes ordered so that neighbours stand near each other. The plain form is in plain.py."""

from espalier.sparse.rcmpp.ordering import FINDERS as FINDERS
from espalier.sparse.rcmpp.ordering import RECORD as RECORD
from espalier.sparse.rcmpp.ordering import bandwidth as bandwidth
from espalier.sparse.rcmpp.ordering import cost as cost
from espalier.sparse.rcmpp.ordering import profile as profile
from espalier.sparse.rcmpp.ordering import rcmpp as rcmpp
