"""Lines taken apart: each launcher's labels give rank and node, and the message keeps its indentation."""

from __future__ import annotations

import pytest

from espalier.ops.log_scan import line_labels


def one(text, *more):
    return line_labels.parse(dict(enumerate((text, *more), 1)))[0]


@pytest.mark.parametrize(
    ("raw", "rank", "node", "text"),
    [
        ("[rank3]: KeyError: 'x'", 3, None, "KeyError: 'x'"),
        ('[rank3]:   File "a.py", line 3', 3, None, '  File "a.py", line 3'),
        ("[default1]:[rank9]: hello", 9, None, "hello"),
        ("[default1]:hello", 1, None, "hello"),
        ("[rank7]:[E503 03:10:11.000 ProcessGroupNCCL.cpp:1515] died", 7, None, "died"),
        ("[1,12]<stderr>:boom", 12, None, "boom"),
        ("2026-03-03 09:51:27,965 | INFO | rank0 | step=1", 0, None, "step=1"),
        ("Mar  3 02:13:57 hgx-14 kernel: NVRM: Xid", None, "hgx-14", "NVRM: Xid"),
        ("[Sun Mar  2 04:10:58 2026] NVRM: Xid", None, None, "NVRM: Xid"),
        ("[  5511.330123] dgx5 kernel: NVRM: Xid", None, "dgx5", "NVRM: Xid"),
        ("2025-01-20T04:00:31Z node042 trainer[2711]: hello", None, "node042", "hello"),
        ("(TrainWorker pid=22, ip=10.0.0.3) hello", None, "10.0.0.3", "hello"),
        ("llm-worker-0 | hello", None, "llm-worker-0", "hello"),
        ("I0301 09:12:01.000011 1 train.py:88] step 30", None, None, "step 30"),
        ("KeyError: 'x'", None, None, "KeyError: 'x'"),
        ("", None, None, ""),
    ],
)
def test_labels(raw, rank, node, text):
    found = one(raw)
    assert (found.rank, found.node, found.text) == (rank, node, text)


def test_a_bare_number_is_a_rank_only_where_many_lines_have_one():
    assert one("3: boom", "4: boom", "3: boom").rank == 3
    assert one("3: boom", "a", "b", "c", "d").rank is None


def test_a_bare_host_is_a_node_only_where_many_lines_have_one():
    assert one("w2: boom", "w1: boom", "w2: boom").node == "w2"
    assert one("w2: boom", "a", "b", "c", "d").node is None


def test_nccls_device_is_a_rank_where_its_first_line_said_which():
    told = one("n5:70:71 [3] NCCL WARN x", "n5:70:70 [3] NCCL INFO comm 0x1 rank 11 nranks 16 cudaDev 3")
    assert (told.rank, told.node) == (11, "n5")
    assert one("n5:70:71 [3] NCCL WARN x").rank is None


@pytest.mark.parametrize(
    ("raw", "level"),
    [
        ("ERROR x", "ERROR"),
        ("[WARNING] x", "WARNING"),
        ("[rank0]:[W socket.cpp:436] [c10d] x", "WARNING"),
        ("E0301 09:12:01.0 1 a.cc:8] x", "ERROR"),
        ("x", ""),
    ],
)
def test_levels(raw, level):
    assert one(raw).level == level


def test_times_are_seconds_and_may_be_missing():
    early, late = one("2025-01-01 00:00:00,250 x").time, one("[2025-01-01T00:00:01.250Z] x").time
    assert early is not None
    assert late is not None
    assert late - early == pytest.approx(1.0)
    assert one("12:00:00 x").time is None


@pytest.mark.parametrize(
    ("text", "rank"),
    [("[Rank 5] x", 5), ("on rank 3: x", 3), ("global rank 12", 12), ("rank 0/8", None), ("franks 3", None)],
)
def test_ranks_that_messages_speak_of(text, rank):
    assert line_labels.rank_within(text) == rank


def test_code_shown_in_a_traceback_is_no_message():
    texts = [
        "Traceback (most recent call last):",
        '  File "a.py", line 3, in f',
        '    raise ValueError("no")',
        "ValueError: no",
    ]
    told = [line.text for line in line_labels.without_code(line_labels.parse(dict(enumerate(texts, 1))))]
    assert told == [texts[0], texts[3]]
