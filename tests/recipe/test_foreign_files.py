"""One way to open files of others: marks, errors, and what was not used."""

from __future__ import annotations

from pathlib import Path

import pytest

from espalier.recipe import foreign_files
from espalier.recipe.errors import UserError
from espalier.recipe.foreign_files import Fields, FieldUse


def test_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_bytes(b'\xef\xbb\xbf{"a": 1}')
    assert foreign_files.read_table(file) == {"a": 1}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"[" * 100_000, "nested too deeply"),
        (b"1" * 5000, "digits"),
        (b"\xff\xfe{\0", "UTF-16"),
        (b'{"a": "\xff"}', "not UTF-8 .byte 7"),
        (b"{", "Expecting"),
    ],
)
def test_whatever_a_parser_raises_names_the_file(tmp_path: Path, content: bytes, reason: str) -> None:
    file = tmp_path / "a.json"
    file.write_bytes(content)
    with pytest.raises(UserError, match=reason) as raised:
        foreign_files.read_table(file)
    assert str(file) in raised.value.what
    assert raised.value.do


def test_control_characters_of_names_are_escaped() -> None:
    assert foreign_files.printable("a\n\x1b[0m\x7f\u202eb") == "a\\n\\x1b[0m\\x7f\\u202eb"
    assert len(foreign_files.printable("x" * 10_000)) < 300


def test_fields_that_are_not_used_are_counted_and_named_once() -> None:
    use = FieldUse(Fields("column", frozenset({"text"})))
    for _ in range(1204):
        use.count(["text", "tools"])
    use.count(["url"])
    assert use.notes() == ("not used: column 'tools' (1,204 rows)", "not used: column 'url' (1 row)")


def test_a_field_that_changes_the_meaning_is_refused_by_name() -> None:
    use = FieldUse(Fields("key", frozenset({"w"}), {"mask_path": "take the masks out"}), "transforms.json")
    with pytest.raises(UserError, match=r"transforms\.json has the key 'mask_path'") as raised:
        use.count(["w", "mask_path"])
    assert raised.value.do == "take the masks out"
