"""The table of the page on codecs names every codec."""

from __future__ import annotations

import re

from doc_pages import PAGES

from espalier.comm.codecs import FAMILIES

PAGE = PAGES["codecs.md"]


def test_the_table_names_every_codec() -> None:
    named = set(re.findall(r"`([a-z0-9]+)[:\w.]*`", PAGE.read_text(encoding="utf-8").split("Lossy codecs")[0]))
    assert set(FAMILIES) <= named
