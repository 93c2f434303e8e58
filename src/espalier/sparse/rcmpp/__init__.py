"""RCM++: nodes ordered so that neighbours stand near each other. Its plain form is its test's reference."""

from espalier.sparse.rcmpp.ordering import FINDERS as FINDERS
from espalier.sparse.rcmpp.ordering import RECORD as RECORD
from espalier.sparse.rcmpp.ordering import bandwidth as bandwidth
from espalier.sparse.rcmpp.ordering import profile as profile
from espalier.sparse.rcmpp.ordering import rcmpp as rcmpp
