"""The scan keeps what matters of any file, in bounded memory, at the right numbers, and refuses what is no log."""

from __future__ import annotations

import gzip
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier.ops.log_scan import scan
from espalier.recipe.errors import UserError

STEP = "step %d loss %.3f lr 1e-4 tok/s 18000\n"


def routine(count, start=0):
    return "".join(STEP % (start + at, 2 + (at * 7 % 11) / 100) for at in range(count)).encode()


def written(tmp_path, content, name="a.log"):
    path = tmp_path / name
    path.write_bytes(content)
    return path


def test_the_line_that_matters_is_kept_under_its_number_among_many(tmp_path):
    path = written(tmp_path, routine(30_000) + b"KeyError: 'k'\n" + routine(30_000))
    found = scan.scan(path)
    assert found.lines[30_001] == "KeyError: 'k'"
    assert found.total == 60_001
    assert found.size == path.stat().st_size
    assert found.total > 20 * len(found.lines)


@settings(max_examples=30)
@given(
    block=st.integers(64, 5000),
    lines=st.lists(st.sampled_from(["ok fine", "ValueError: x", "", "loss 2.5", "a" * 90]), max_size=80),
    last=st.booleans(),
)
def test_the_size_of_a_block_changes_nothing_that_matters(tmp_path_factory, block, lines, last):
    path = tmp_path_factory.mktemp("scan") / "a.log"
    path.write_text("\n".join(lines) + ("\n" if last else ""))
    before = scan.BLOCK
    try:
        scan.BLOCK = block
        found = scan.scan(path)
    finally:
        scan.BLOCK = before
    text = path.read_text().split("\n")
    assert all(text[number - 1] == line for number, line in found.lines.items())
    wanted = {number for number, line in enumerate(lines, 1) if line.startswith("ValueError")}
    assert wanted <= found.lines.keys()
    assert [loss.number for loss in found.losses] == [
        number for number, line in enumerate(lines, 1) if line.startswith("loss")
    ]


def test_the_tail_is_kept_whatever_it_says(tmp_path):
    found = scan.scan(written(tmp_path, routine(5000)))
    assert list(found.lines)[-scan.TAIL :] == list(range(5001 - scan.TAIL, 5001))


def test_a_traceback_is_kept_whole_though_nothing_in_it_is_alarming(tmp_path):
    stack = b"Traceback (most recent call last):\n" + b"  quiet line\n" * 20 + b"Weird: thing\n"
    found = scan.scan(written(tmp_path, routine(500) + stack + routine(500)))
    assert found.lines[522] == "Weird: thing"


def test_a_million_alarms_of_one_form_cost_bounded_memory_and_the_last_burst_is_kept(tmp_path):
    alarm = b"".join(b"ERROR timer %d failed after %d ms\n" % (at, at * 3) for at in range(20_000))
    found = scan.scan(written(tmp_path, alarm + routine(1000) + b"ERROR timer 9 failed after 3 ms\n" + routine(500)))
    assert len(found.lines) < 500
    assert 21_001 in found.lines
    assert found.mattered == 20_001


def test_memory_is_bounded_by_dropping_the_oldest(tmp_path, monkeypatch):
    monkeypatch.setattr(scan, "MEMORY", 20_000)
    lines = [f"error {chr(97 + at % 26) * 5}{chr(97 + at // 26) * 5} in part {'x' * 100}" for at in range(600)]
    found = scan.scan(written(tmp_path, "\n".join(lines).encode()))
    assert sum(len(text) for text in found.lines.values()) < 40_000
    assert 600 in found.lines


def test_a_line_without_end_is_cut(tmp_path):
    found = scan.scan(written(tmp_path, b"x" * (3 * scan.BLOCK) + b" KeyError: 'k'\nend\n"))
    assert found.total == 2
    assert "KeyError: 'k'" in found.lines[1]
    assert len(found.lines[1]) <= scan.WIDEST + 5


def test_of_a_progress_bar_the_last_words_are_kept(tmp_path):
    bar = "\r".join(f"{at}%|#| loss=2.0" for at in range(100)) + "\rRuntimeError: x\n"
    assert "RuntimeError: x" in scan.scan(written(tmp_path, bar.encode())).lines[1]


def test_text_that_is_not_utf8_is_read(tmp_path):
    found = scan.scan(written(tmp_path, b"caf\xe9\nValueError: \xff\xfe\n"))
    assert found.lines[2].startswith("ValueError: ")


def test_gzip_is_read_as_it_is(tmp_path):
    found = scan.scan(written(tmp_path, gzip.compress(routine(100) + b"KeyError: 1\n"), "a.log.gz"))
    assert found.lines[101] == "KeyError: 1"


def test_an_empty_log_is_empty(tmp_path):
    found = scan.scan(written(tmp_path, b""))
    assert (found.total, found.lines, found.losses) == (0, {}, ())


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (bytes(range(8)) * 500, "not a text file"),
        (b"\x7fELF" + b"a" * 100, "not a text file"),
        ("step 1".encode("utf-16"), "UTF-16"),
        (b"PK\x03\x04abc", "compressed with zip"),
        (b"\x28\xb5\x2f\xfdabc", "compressed with zstd"),
        (b"\x1f\x8b\x08 broken", "cannot be read"),
    ],
)
def test_what_is_no_log_is_refused_with_what_it_is(tmp_path, content, says):
    with pytest.raises(UserError, match=says) as error:
        scan.scan(written(tmp_path, content))
    assert error.value.do


def test_a_missing_file_and_a_folder_are_named(tmp_path):
    with pytest.raises(UserError, match="it is not there"):
        scan.scan(tmp_path / "no.log")
    with pytest.raises(UserError, match="folder"):
        scan.scan(tmp_path)


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("iteration 3/ 9 | lm loss: 2.236350E+00 | grad norm: 0.3", 2.23635),
        ("{'loss': 1.91, 'grad_norm': 0.8}", 1.91),
        ("rank0 | step=89545 loss=2.1970 grad_norm=0.427", 2.197),
        ("step 4 train_loss 2.5", 2.5),
        ("Epoch 1: 3%|#| 1/2 [00:01, v_num=1, train_loss=0.5]", 0.5),
        ("loss: nan", math.nan),
        ("reduced_train_loss=inf", math.inf),
        ("loss scale: 65536.0 | loss: 3.5", 3.5),
        ('{"event":"step","step":3,"loss":2.25}', 2.25),
    ],
)
def test_losses_are_read_as_trainers_write_them(tmp_path, line, value):
    (loss,) = scan.scan(written(tmp_path, line.encode())).losses
    assert loss.value == pytest.approx(value, nan_ok=True)
    assert loss.text == line


@pytest.mark.parametrize(
    "line", ["val_loss 2.0", "eval loss: 2.0", "loss scale: 65536.0", "aux_loss=0.1", "across 3 nodes", "test loss 1"]
)
def test_other_losses_are_not_the_training_loss(tmp_path, line):
    assert scan.scan(written(tmp_path, line.encode())).losses == ()


def test_where_losses_stopped_being_numbers_is_known_even_long_before_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(scan, "BLOCK", 2000)
    text = routine(300) + b"".join(b"step %d loss nan\n" % at for at in range(4000))
    found = scan.scan(written(tmp_path, text))
    assert found.not_finite is not None
    assert found.not_finite.number == 301
    assert scan.scan(written(tmp_path, text + routine(1))).not_finite is None
