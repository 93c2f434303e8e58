import gzip
import os
import sys
import types

import msgspec
import pytest
import zstandard

from espalier.language import row_files
from espalier.language.text_sources import documents, listing
from espalier.recipe import Data
from espalier.recipe.errors import UserError


def write(folder, **files):
    for name, content in files.items():
        path = folder / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def texts(path, **options):
    return [(name, data.decode()) for name, data, _ in documents(Data(path=str(path), **options))]


def lines(*values, field="text"):
    return b"".join(msgspec.json.encode({field: value, "other": 1}) + b"\n" for value in values)


def test_a_file_is_one_document(tmp_path):
    write(tmp_path, a_txt="hello")
    assert texts(tmp_path / "a.txt") == [("a.txt", "hello")]


def test_a_folder_is_read_recursively_by_sorted_name_without_hidden_files(tmp_path):
    write(tmp_path, b_txt="b", a__z_md="z", a__B_py="B", _hidden="no", _git__config="no")
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "x.txt").write_text("no")
    assert [name for name, _ in texts(tmp_path)] == ["a/B.py", "a/z.md", "b.txt"]


def test_a_glob_names_documents_below_its_fixed_part(tmp_path):
    write(tmp_path, x__a_py="a", x__y__b_py="b", x__c_txt="c")
    assert texts(tmp_path / "x" / "**" / "*.py") == [("a.py", "a"), ("y/b.py", "b")]


def test_the_working_folder_and_links_to_files_work(tmp_path, monkeypatch):
    write(tmp_path, a_txt="a")
    os.symlink(tmp_path / "a.txt", tmp_path / "b.txt")
    monkeypatch.chdir(tmp_path)
    assert texts(".") == texts("*.txt") == [("a.txt", "a"), ("b.txt", "a")]


@pytest.mark.parametrize("form", ["jsonl", "jsonl.gz", "jsonl.zst"])
def test_json_lines_are_documents_in_every_compression(tmp_path, form):
    raw = lines("one", "two\nlines", "漢" * 300_000) + b"\n" + lines("last").rstrip()
    # Two frames: what `cat a.zst b.zst` and pzstd give.
    pack = {
        "jsonl": lambda part: part,
        "jsonl.gz": gzip.compress,
        "jsonl.zst": zstandard.ZstdCompressor().compress,
    }[form]
    (tmp_path / f"d.{form}").write_bytes(pack(raw[:700]) + pack(raw[700:]))
    expected = [("1", "one"), ("2", "two\nlines"), ("3", "漢" * 300_000), ("5", "last")]
    assert texts(tmp_path / f"d.{form}") == [(f"d.{form}:{number}", text) for number, text in expected]


def test_json_lines_in_a_folder_are_read_as_such_and_the_field_can_be_named(tmp_path):
    (tmp_path / "d.jsonl").write_bytes(lines("one", "two", field="some-field"))
    assert texts(tmp_path, field="some-field") == [("d.jsonl:1", "one"), ("d.jsonl:2", "two")]


@pytest.mark.parametrize("bad", [b"{", b"[1]", b'{"text": "x"} {', b'{"text": ' + b"[" * 9999])
def test_a_malformed_line_is_named_by_file_and_number(tmp_path, bad):
    (tmp_path / "d.jsonl").write_bytes(lines("one", "two") + bad + b"\n" + lines("four"))
    with pytest.raises(UserError, match=r"d\.jsonl, line 3 is not a JSON object"):
        texts(tmp_path / "d.jsonl")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (b'{"other": 1}', "is missing"),
        (b'{"text": null}', "is null"),
        (b'{"text": 5}', "is a number, not text"),
        (b'{"text": ""}', "is empty"),
        (b'{"text": "\\u0000"}', "has a NUL byte"),
        (b'{"text": "\xff"}', "is not UTF-8"),
        (b'{"text": "cut \\ud83d"}', "has half a surrogate pair"),
    ],
)
def test_a_row_without_text_is_left_out_and_named_unless_all_are(tmp_path, row, reason):
    file = tmp_path / "d.jsonl"
    file.write_bytes(lines("one") + row + b"\n" + lines("three"))
    skipped = []
    read = [document.data for document in documents(Data(path=str(file)), skipped=skipped)]
    assert (read, skipped) == ([b"one", b"three"], [("d.jsonl:2", f"'text' {reason}")])
    file.write_bytes(row + b"\n" + row + b"\n")
    with pytest.raises(UserError, match=rf"holds no text.(.|\n)*2 skipped .d.jsonl:1 and 1 more: 'text' {reason}"):
        texts(file)


@pytest.mark.parametrize("form", ["gz", "zst"])
def test_a_compressed_file_cut_short_is_an_error(tmp_path, form):
    raw = lines(*(os.urandom(50).hex() for _ in range(2000)))
    packed = gzip.compress(raw) if form == "gz" else zstandard.ZstdCompressor().compress(raw)
    (tmp_path / f"d.jsonl.{form}").write_bytes(packed[: len(packed) // 2])
    with pytest.raises(UserError, match=rf"d\.jsonl\.{form}|line \d+ is not"):
        texts(tmp_path)


@pytest.mark.parametrize("form", ["gz", "zst"])
def test_a_file_that_is_not_compressed_as_its_name_says_is_read_by_its_content(tmp_path, form):
    (tmp_path / f"d.jsonl.{form}").write_bytes(lines("one"))
    assert texts(tmp_path) == [(f"d.jsonl.{form}:1", "one")]
    (tmp_path / f"d.jsonl.{form}").write_bytes(b"\x1f neither")
    with pytest.raises(UserError, match="line 1 is not a JSON object"):
        texts(tmp_path)


def test_what_is_no_text_is_skipped_and_reported(tmp_path):
    write(tmp_path, a_txt="fine", b_bin=b"x\0y", c_txt="é".encode("latin-1"), d_txt="")
    os.symlink("nowhere", tmp_path / "e.txt")
    os.mkfifo(tmp_path / "f.pipe")
    skipped = []
    found = list(documents(Data(path=str(tmp_path)), skipped=skipped))
    assert [document.name for document in found] == ["a.txt"]
    assert dict(skipped) == {
        "b.bin": "binary (NUL byte)",
        "c.txt": "not UTF-8 (byte 0)",
        "d.txt": "empty",
        "e.txt": "a link to nothing",
        "f.pipe": "not a regular file",
    }


def test_bytes_read_rise_to_the_size_of_the_listing(tmp_path):
    write(tmp_path, a_txt="fine", b_jsonl=lines("one", "two", "three"), c_txt="end")
    listed = listing(Data(path=str(tmp_path)))
    read = [document.read for document in documents(Data(path=str(tmp_path)), listed)]
    assert read == sorted(read)
    assert read[-1] == listed.bytes == sum(path.stat().st_size for path in tmp_path.iterdir())


def test_the_listing_changes_with_names_sizes_and_times_only(tmp_path):
    data = Data(path=str(write(tmp_path, a_txt="one", b_txt="two")))
    key = listing(data).key
    assert listing(data).key == key
    os.utime(tmp_path / "a.txt", ns=(1, 1))
    touched = listing(data).key
    write(tmp_path, c_txt="three")
    assert len({key, touched, listing(data).key}) == 3


def test_the_standard_library_is_there_and_in_fixed_order():
    data = Data(path="python:stdlib")
    first, second = listing(data), listing(data)
    names = [entry.name for entry in first.entries]
    assert first == second
    assert names == sorted(names)
    assert "argparse.py" in names
    assert "asyncio/__init__.py" in names
    assert not any("site-packages" in name or "__pycache__" in name or not name.endswith(".py") for name in names)
    assert next(iter(documents(data, first))).data


def test_a_missing_path_names_the_nearest(tmp_path):
    write(tmp_path, corpus_txt="x")
    with pytest.raises(UserError, match=r"does not exist(.|\n)*did you mean .*corpus\.txt"):
        texts(tmp_path / "corpsu.txt")
    with pytest.raises(UserError, match="does not exist"):
        texts(tmp_path / "no" / "such" / "folder")


@pytest.mark.parametrize(("path", "near"), [("python:stdlb", "python:stdlib"), ("hff:squad", "hf:squad"), ("s3:x", "")])
def test_an_unknown_scheme_lists_the_known_ones(path, near):
    with pytest.raises(UserError, match="python:stdlib, hf:NAME") as caught:
        texts(path)
    assert f"did you mean {near}?" in caught.value.do or not near


def test_an_empty_corpus_is_an_error(tmp_path):
    with pytest.raises(UserError, match="holds no files"):
        texts(tmp_path)
    with pytest.raises(UserError, match="holds no files"):
        texts(tmp_path / "*.txt")
    write(tmp_path, a_bin=b"\0")
    with pytest.raises(UserError, match=r"holds no text(.|\n)*1 skipped \(a\.bin: binary"):
        texts(tmp_path)


def test_a_path_that_is_no_file_is_an_error():
    with pytest.raises(UserError, match="neither a file nor a folder"):
        texts("/dev/null")


def test_an_unreadable_file_is_an_error(tmp_path, monkeypatch):
    write(tmp_path, a_txt="x")

    def refuse(path, *_):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(row_files, "open", refuse, raising=False)
    with pytest.raises(UserError, match=r"a\.txt cannot be read(.|\n)*Permission denied(.|\n)*chmod"):
        texts(tmp_path)


class Rows(list):
    """The little of `datasets.Dataset` that is used."""

    column_names = ("text", "label")
    _fingerprint = "abc"

    def select_columns(self, names):
        return Rows({name: row[name] for name in names} for row in self)


@pytest.fixture
def hub(monkeypatch):
    asked = []

    def load_dataset(*names, split):
        asked.append((*names, split))
        if names[0] == "old/config":
            raise FileNotFoundError("no such data set on the hub")
        return Rows({"text": f"{number}", "label": 1} for number in range(3))

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    return asked


def test_hub_rows_are_documents(hub):
    assert texts("hf:owner/name", split="test") == [(f"owner/name:{number}", f"{number}") for number in range(3)]
    assert hub == [("owner/name", "test")]
    data = Data(path="hf:owner/name")
    assert listing(data).bytes == 3
    assert listing(data).key != listing(Data(path="hf:owner/name", split="test")).key


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("hf:name", [("name", "train")]),
        ("hf:owner/name/config", [("owner/name", "config", "train")]),
        ("hf:old/config", [("old/config", "train"), ("old", "config", "train")]),
    ],
)
def test_hub_names_may_carry_owner_and_configuration(hub, path, asked):
    listing(Data(path=path))
    assert hub == asked


def test_hub_mistakes_are_explained(hub, monkeypatch):
    with pytest.raises(UserError, match=r"no such column(.|\n)*data\.field = 'text'"):
        texts("hf:name", field="txt")
    with pytest.raises(UserError, match="'label' is a number, not text"):
        texts("hf:name", field="label")
    with pytest.raises(UserError, match="more than three parts"):
        texts("hf:a/b/c/d")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"espalier-train\[hub\]"):
        texts("hf:name")


@pytest.mark.parametrize("path", ["/nope", "python:imports", "hg:squad"])
def test_what_is_not_similar_is_not_suggested(path):
    with pytest.raises(UserError) as caught:
        texts(path)
    assert "did you mean" not in str(caught.value)
