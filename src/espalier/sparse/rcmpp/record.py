"""Record of RCM++, as `espalier explain` prints it."""

from espalier.recipe.records import Record

RECORD = Record(
    name="rcmpp",
    title="RCM++: reverse Cuthill-McKee started from the node with the narrowest levels",
    aliases=("rcm++", "rcm-plus-plus", "rcm", "reverse cuthill-mckee"),
    paper="Hou, Liu and Zhu, 2024, arXiv 2409.04171",
    files=("sparse/rcmpp/", "sparse/order_choice.py"),
    chosen="a graph whose order is not already local, before it is partitioned, packed or multiplied often",
    cost="one pass over the entries, then a traversal of them for each node tried: 2 to 5 on large graphs",
    law="the order equals the plain form's; its bandwidth is below twice the width of its root's levels",
    law_test="tests/sparse/test_rcmpp.py::test_the_order_equals_the_plain_forms",
    bench="bench/rcmpp.py",
    headline="on a shuffled 2-D grid of 250,000 nodes 3.43 times as fast as scipy's reverse_cuthill_mckee (n=15)",
    state="works",
    limits="the order is computed on processors",
    runs_on="November 2026: Intel Xeon; no GPU",
)
