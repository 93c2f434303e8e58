"""What a model shows: texts, images and tables go through the run log into the report and onto the terminal."""

from __future__ import annotations

import base64
import re
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from espalier.cli import printing
from espalier.store.artifacts import Artifact, Image, Table, Text
from espalier.track import report
from espalier.track.events import Log
from espalier.track.run_tables import RunTables


def decoded(uri: str) -> np.ndarray:
    """The pixels of a PNG, by its chunks (no filter), each with a right checksum."""
    data = base64.b64decode(uri.removeprefix("data:image/png;base64,"))
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    at, chunks = 8, {}
    while at < len(data):
        (size,) = struct.unpack(">I", data[at : at + 4])
        name, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + size]
        assert struct.unpack(">I", data[at + 8 + size : at + 12 + size]) == (zlib.crc32(name + body),)
        chunks[name], at = body, at + 12 + size
    width, height, bits, colour = struct.unpack(">IIBB", chunks[b"IHDR"][:10])
    assert bits == 8
    rows = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, -1)
    assert not rows[:, 0].any()
    return rows[:, 1:].reshape((height, width, 3) if colour == 2 else (height, width))


@given(st.integers(1, 9), st.integers(1, 9), st.booleans(), st.integers(0, 99))
def test_an_image_is_its_pixels_again(height: int, width: int, grey: bool, seed: int) -> None:
    shape = (height, width) if grey else (height, width, 3)
    pixels = torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    assert np.array_equal(decoded(Image(pixels).fields["image"]), pixels.numpy())


def run_that_showed(folder: Path, *shown: Artifact) -> Path:
    (folder / "run.toml").write_text('[model]\nkind = "module"\nbuild = "a:b"\n')
    with Log(folder / "events.jsonl") as log:
        log.write("run", step=0, steps=1)
        log.write("step", step=1, loss=1.0, tokens=1, seconds=1.0)
        for one in shown:
            log.write("sample", step=1, **one.fields)
    return folder


SHOWN = (
    Text("some <b>words</b>"),
    Image(torch.zeros(2, 3, 3, dtype=torch.uint8), "a <view>"),
    Table(("name", "chance"), [("one", 0.25), ("<two>", 1)]),
)


def test_the_report_shows_each_kind_as_what_it_is(tmp_path: Path) -> None:
    page = report.render(RunTables.read(run_that_showed(tmp_path, *SHOWN)))
    assert "some &lt;b&gt;words&lt;/b&gt;" in page
    (image,) = re.findall(r'<img src="(data:image/png;base64,[^"]+)" alt="a &lt;view&gt; \(3 × 2\)">', page)
    assert decoded(image).shape == (2, 3, 3)
    assert re.search(r"<th scope=\"col\">name</th><th scope=\"col\">chance</th>", page)
    assert re.search(r"<td>one</td><td>0.25</td>", page)
    assert "<td>&lt;two&gt;</td><td>1</td>" in page


def test_only_embedded_images_are_shown(tmp_path: Path) -> None:
    run_that_showed(tmp_path)
    with Log(tmp_path / "events.jsonl") as log:
        log.write("sample", step=1, kind="image", text="elsewhere", image="https://example.org/a.png")
    page = report.render(RunTables.read(tmp_path))
    assert "example.org" not in page
    assert "elsewhere" in page


def test_the_terminal_shows_every_kind_in_letters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printing.finished(RunTables.read(run_that_showed(tmp_path, *SHOWN)), tmp_path / "report.html", 1.0)
    told = capsys.readouterr().out
    assert "some <b>words</b>" in told
    assert "a <view> (3 × 2)" in told
    assert "name   chance\none    0.25\n<two>  1" in told
