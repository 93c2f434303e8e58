"""The scan of blocks gives what the plain form gives line by line, of any bytes and wherever the blocks end."""

from __future__ import annotations

import gzip
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_scan import scan_plain

from espalier.ops.log_scan import keywords, scan

SMALL = {"WIDEST": 24, "TAIL": 2, "FIRST": 2, "BURST": 4, "LAST": 3, "MINED": 6, "KEY": 10, "STACK": 3}
"""Limits that a few lines reach."""
SAID = """ok fine;Value-Error: x;T r a c e back;FAIL;time out 3;loss nan;loss 2.5;val_loss 1;failed across 3 nodes
step 4 | lm loss: 2.0 | aux loss: 1;loss inf after failure;caf\xe9 na\xc3n;[rank3]: KeyError: 'k';3: killed;error\r
1%\r2% loss=2\rOOM;nul\0l err\0or;a line that is longer than all the limits and longer still, to its end;"""
WORDS = st.sampled_from(
    [*keywords.WORDS[::7], *(said.encode("latin-1") for said in SAID.replace("\n", ";").split(";"))]
)
LINE = st.lists(WORDS | st.binary(max_size=9), min_size=1, max_size=4).map(b" ".join)
TEXT = st.lists(LINE, max_size=40).map(b"\n".join)
LIMITS = st.fixed_dictionaries(
    {"BLOCK": st.integers(1, 64), "MEMORY": st.integers(300, 4000), "MOST": st.integers(1, 30)}
    | {"LOSSES": st.integers(1, 600)}
)


def same(fast, plain):
    assert (fast.total, fast.size, fast.mattered) == (plain.total, plain.size, plain.mattered)
    assert fast.lines == plain.lines
    assert [(str(one), one.last) for one in fast.templates] == [(str(one), one.last) for one in plain.templates]
    assert [(one.number, one.line) for one in fast.losses] == [(one.number, one.line) for one in plain.losses]
    assert [one.value for one in fast.losses] == pytest.approx([one.value for one in plain.losses], nan_ok=True)
    odd = [one and (one.number, one.line) for one in (fast.not_finite, plain.not_finite)]
    assert odd[0] == odd[1]


@settings(max_examples=120)
@given(text=TEXT, limits=LIMITS, forms=st.integers(1, 8), slice_=st.sampled_from([1, 5, 64, 1 << 18]))
def test_the_scan_keeps_what_the_plain_form_keeps(text, limits, forms, slice_):
    with pytest.MonkeyPatch.context() as changed:
        for name, value in {**SMALL, "LONGEST": 64, **limits}.items():
            changed.setattr(scan, name, value)
        changed.setattr(scan, "TEMPLATES", forms)
        changed.setattr(keywords, "SLICE", slice_)
        same(scan.scan_text(text), scan_plain(text))


@settings(max_examples=50)
@given(text=st.binary(max_size=3000), block=st.integers(1, 200))
def test_of_any_bytes_at_all(text, block):
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(scan, "BLOCK", block)
        same(scan.scan_text(text), scan_plain(text))


def test_of_a_log_of_many_blocks_as_it_is_read_from_a_file(tmp_path):
    routine = b"".join(
        b"[default%d]: step %d loss %.3f tok/s 18000\r\n" % (at % 8, at, 2 + at % 7) for at in range(600)
    )
    alarms = b"".join(b"rank %d: worker %s failed\n" % (at % 4, chr(97 + at % 26).encode() * 3) for at in range(300))
    text = routine + alarms + b"Traceback (most recent call last):\n" + routine + alarms + b"loss nan\nKeyError: 'k'"
    path = tmp_path / "a.log.gz"
    path.write_bytes(gzip.compress(text))
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(scan, "BLOCK", 4000)
        fast = scan.scan(path)
    same(fast, scan_plain(text))
    assert fast.not_finite is not None
    assert math.isnan(fast.not_finite.value)
    assert fast.lines[fast.total] == "KeyError: 'k'"


def random_line(draw, extra=""):
    letters = "abcdefghijklmnoprstuvw"
    return " ".join("".join(draw.choices(letters, k=draw.randint(3, 9))) for _ in range(6)) + extra + "\n"


def test_in_random_text_a_failure_at_the_end_is_kept_though_many_alarms_of_other_words_came_before(monkeypatch):
    draw = random.Random(0)
    monkeypatch.setattr(scan, "TEMPLATES", 60)
    monkeypatch.setattr(scan, "LAST", 100)
    noise = [random_line(draw, " error") for _ in range(700)]
    text = "".join([*noise, "KeyError: 'k'\n", *noise[:90]]).encode()
    found = scan.scan_text(text)
    same(found, scan_plain(text))
    assert found.lines[701] == "KeyError: 'k'"
