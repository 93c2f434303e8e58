"""Whatever happens to a file of others, its reader gives what it holds or one error: the file's name, and what to try.

Each row of the registry is read with mutations that keep the file's form (a number, a text, a line replaced; members of
archives changed before they are packed again) and with some that do not.
"""

from __future__ import annotations

import gzip
import io
import random
import re
import shutil
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from inputs import Reader
from registry import READERS

from espalier.recipe.errors import UserError

SECONDS = 5.0
"""Of processor time, for one small input."""
MEMORY = 1 << 30
"""Bytes that no small input may take."""
_VALUE = re.compile(rb'"(?:[^"\\\n]|\\.)*"|-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?|\b(?:true|false|null|nan)\b|[A-Za-z_]+')
ODD = [
    *(b"", b" ", b"\0", b"\n", b"\r\n", b",", b";", b'"', b"{", b"}", b"[", b"]", b"[]", b"{}", b"#", b"%", b"\x1b[2J"),
    *(b"0", b"-1", b"1.5", b"1e400", b"-0.0", b"NaN", b"nan", b"Infinity", b"null", b"true", b'""', b'"a"', b"a"),
    *(b"255", b"65536", b"2147483648", b"9007199254740993", b"9223372036854775807", b"9223372036854775808"),
    *(b"9" * 400, b"9" * 5000, b"[" * 2000, b'{"a":' * 2000, b"1000000000", b"999999999999"),
    *(b'"\\ud83d"', b"\xff", b"\xef\xbb\xbf", "\u202e\u2028".encode(), b"../../../etc/passwd", b'"/dev/zero"'),
    *(b"[1, 2]", b'{"a": 1}', b'[["a"]]', b"a" * 5000, b"\xff" * 8, b"\0" * 8, b"{{ 1/0 }}", b"(((((("),
]
"""What is put in the place of a value."""
KINDS = ("value", "value", "value", "insert", "byte", "cut", "double", "end")
CHANGES = st.lists(
    st.tuples(
        st.sampled_from(KINDS),
        st.integers(0, 1 << 20),
        st.integers(0, len(ODD) - 1),
    ),
    min_size=1,
    max_size=3,
)
Changes = list[tuple[str, int, int]]


def mutated(content: bytes, changes: Changes) -> bytes:
    """`content`, or what the archive `content` holds, after `changes`."""
    if content[:2] == b"\x1f\x8b":
        return gzip.compress(mutated(gzip.decompress(content), changes), 1)
    if content[:2] == b"PK" and changes[0][1] % 4:
        return repacked(content, changes)
    for kind, at, number in changes:
        content = changed(content, kind, at, ODD[number])
    return content


def repacked(content: bytes, changes: Changes) -> bytes:
    """A zip archive whose member was changed, with a sum that fits."""
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(made, "w") as new:
        chosen = old.namelist()[changes[0][1] % len(old.namelist())]
        for name in old.namelist():
            member = old.read(name)
            new.writestr(name, mutated(member, changes) if name == chosen else member)
    return made.getvalue()


def changed(content: bytes, kind: str, at: int, odd: bytes) -> bytes:
    if kind == "value" and (values := list(_VALUE.finditer(content))):
        place = values[at % len(values)]
        return content[: place.start()] + odd + content[place.end() :]
    at %= len(content) + 1
    if kind == "insert":
        return content[:at] + odd + content[at:]
    if kind == "cut":
        return content[:at] + content[at + len(odd) :]
    if kind == "double":
        return content[:at] + content[max(0, at - 40) :]
    if kind == "end":
        return content[:at]
    return content[:at] + bytes([len(odd) % 256]) + content[at + 1 :]


def check(reader: Reader, path: Path, place: Path) -> None:
    start = time.thread_time()
    refusal = None
    try:
        reader.read(path)
    except UserError as error:
        refusal = error
    if refusal is not None:
        assert place.name in str(refusal) or path.name in str(refusal), f"names no file: {refusal}"
        assert refusal.do, f"says nothing to try: {refusal}"
    assert time.thread_time() - start < SECONDS


def peak() -> int:
    """Bytes of memory that this process had at most since `Path("/proc/self/clear_refs")` was written."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


def fuzz(reader: Reader, folder: Path, draw: Callable[[Callable[[int, Changes], None]], None]) -> None:
    """Reads inputs with the changes that `draw` gives."""
    (folder / "good").mkdir()
    given_path = reader.write(folder / "good")
    reader.read(given_path)
    known = set((folder / "good").rglob("*"))
    files = sorted(file for file in known if file.is_file())
    contents = {file: file.read_bytes() for file in files}

    def read(number: int, changes: Changes) -> None:
        file = files[number % len(files)]
        try:
            file.write_bytes(mutated(contents[file], changes))
            check(reader, given_path, file)
        finally:
            file.write_bytes(contents[file])
            for new in set((folder / "good").rglob("*")) - known:
                shutil.rmtree(new) if new.is_dir() else new.unlink(missing_ok=True)

    Path("/proc/self/clear_refs").write_text("5")
    before = peak()
    draw(read)
    assert peak() - before < MEMORY


@pytest.mark.parametrize("reader", READERS, ids=[reader.name for reader in READERS])
def test_200_changed_inputs_are_read_or_refused(reader: Reader, tmp_path: Path) -> None:
    """Rows that the same modules read share the 200."""
    cases = -(-200 // sum(other.modules == reader.modules for other in READERS))

    def draw(read: Callable[[int, Changes], None]) -> None:
        drawn = given(st.integers(0, 1 << 16), CHANGES)(read)
        settings(max_examples=cases, deadline=None, database=None, suppress_health_check=list(HealthCheck))(drawn)()

    fuzz(reader, tmp_path, draw)


@pytest.mark.slow
@pytest.mark.timeout(1400)  # 40 to 280 s of a processor of its own
@pytest.mark.parametrize("reader", READERS, ids=[reader.name for reader in READERS])
def test_20000_changed_inputs_are_read_or_refused(reader: Reader, tmp_path: Path) -> None:
    """As those of the 200, drawn without shrinking: the note of a failure has the changes."""
    numbers = random.Random(reader.name)

    def draw(read: Callable[[int, Changes], None]) -> None:
        for _ in range(20_000):
            number = numbers.randrange(1 << 16)
            changes = [
                (numbers.choice(KINDS), numbers.randrange(1 << 20), numbers.randrange(len(ODD)))
                for _ in range(numbers.randint(1, 3))
            ]
            try:
                read(number, changes)
            except BaseException as error:
                error.add_note(f"with the changes {changes} of file {number}")
                raise

    fuzz(reader, tmp_path, draw)
