"""A checkpoint names its run: another run's is refused by name, and is neither counted nor deleted."""

from __future__ import annotations

import msgspec
import pytest
import torch
import xxhash
from parts import Box

from espalier.checkpoint import manifest, run_identity
from espalier.checkpoint.run_identity import RunIdentity, RunStamp
from espalier.checkpoint.save_and_restore import Checkpoints
from espalier.checkpoint.storage import PROTOCOLS, folder_name, open_place
from espalier.recipe.errors import RunFailed, UserError


def identity(name: str) -> RunIdentity:
    return RunIdentity(RunStamp(f"id of {name}", name, "a-host", 1.7e9, f"meaning of {name}"), (f"meaning of {name}",))


def checkpoints(target, owner: RunIdentity | None, **options) -> Checkpoints:
    made = Checkpoints(target, **options)
    made.run = owner
    return made


def save(target, owner: RunIdentity | None, *steps: int, **options) -> Checkpoints:
    made = checkpoints(target, owner, **options)
    for step in steps:
        made.save(step, {"box": Box(value=torch.full((3,), float(step)))}, {"step": step}, wait=True)
    return made


OWN, OTHER = identity("own"), identity("other")


@pytest.mark.parametrize("scheme", ["", "memory://"])
def test_a_checkpoint_of_another_run_is_not_loaded(tmp_path, scheme) -> None:
    save(f"{scheme}{tmp_path}", OTHER, 4)
    own = checkpoints(f"{scheme}{tmp_path}", OWN)
    expected = "step-00000004 belongs to run other .id of other. of host a-host, begun on 2023-11-14 22:13 UTC"
    with pytest.raises(UserError, match=expected):
        own.load({"box": Box(value=torch.zeros(3))})
    (entry,) = own.entries()
    assert "belongs to run other" in entry.why
    assert own.newest() == -1


def test_a_checkpoint_of_another_run_is_not_counted_deleted_forgotten_or_replaced(tmp_path) -> None:
    save(tmp_path, OTHER, 2, 9)
    own = save(tmp_path, OWN, 3, 4, 5, keep=1, keep_best=False)
    assert own.place.names() == ["step-00000002", "step-00000005", "step-00000009"]
    own.forget(after=1)
    assert own.place.names() == ["step-00000002", "step-00000009"]
    with pytest.raises(UserError, match="belongs to run other"):
        save(tmp_path, OWN, 9)
    assert checkpoints(tmp_path, OTHER).load({"box": Box(value=torch.zeros(3))}).step == 9


def test_a_run_that_was_copied_and_then_meant_something_else_is_another_run(tmp_path) -> None:
    changed = OWN.now_means("new data")
    save(tmp_path, changed, 4)
    with pytest.raises(UserError, match="belongs to run own"):
        checkpoints(tmp_path, OWN).load({"box": Box(value=torch.zeros(3))})
    save(tmp_path / "before", OWN, 4)  # of the same run, before its data was changed and accepted
    assert checkpoints(tmp_path / "before", changed).load({"box": Box(value=torch.zeros(3))}).step == 4


def test_the_identity_is_in_no_file_but_the_manifest(tmp_path) -> None:
    for owner, name in ((OWN, "a"), (OTHER, "b"), (None, "c")):
        save(tmp_path / name, owner, 4)
    folders = [tmp_path / name / folder_name(4) for name in "abc"]
    contents = [{file.name: file.read_bytes() for file in folder.iterdir()} for folder in folders]
    manifests = [files.pop(manifest.NAME) for files in contents if files.pop(".metadata")]  # torch draws an id there
    assert contents[0] == contents[1] == contents[2]
    assert manifests[0] != manifests[1]


def test_a_manifest_of_format_2_is_read_with_one_sentence(tmp_path) -> None:
    save(tmp_path, OWN, 4)
    path = tmp_path / folder_name(4) / manifest.NAME
    written = msgspec.json.decode(path.read_bytes())
    del written["run"]
    body = {**written, "version": 2, "seal": ""}
    body["seal"] = xxhash.xxh3_128_hexdigest(msgspec.json.encode(body))
    path.write_bytes(msgspec.json.encode(body))
    saved = checkpoints(tmp_path, OWN)
    assert saved.load({"box": Box(value=torch.zeros(3))}).step == 4
    assert "does not say which run it is of" in saved.doubt
    assert "\n" not in saved.doubt


def test_who_comes_first_has_the_place(tmp_path) -> None:
    for target in (tmp_path / "new", f"memory://{tmp_path}"):
        place = open_place(target)
        assert place.claim(b"first") == b"first"
        assert place.claim(b"second") == b"first"
        assert place.names() == []


@pytest.mark.parametrize("text", ["{", "[]", '{"run": {"id": 3}}', "[" * 100_000])
def test_a_damaged_identity_is_refused_by_name(tmp_path, text) -> None:
    (tmp_path / run_identity.NAME).write_text(text)
    with pytest.raises(UserError, match=r"run\.json cannot be read"):
        run_identity.read(tmp_path)


@pytest.mark.parametrize("begun", [1e300, -1e300, float("inf")])
def test_a_stamp_of_no_possible_time_is_shown(begun) -> None:
    assert "run a\\x1b[2J" in str(RunStamp("b", "a\x1b[2J", "c", begun, "d"))


ELSEWHERE = [
    "ftp",
    "sftp",
    "ssh",
    "http",
    "https",
    "github",
    "hf",
    "git",
    "hdfs",
    "smb",
    "zip",
    "simplecache::s3",
    "foo",
]


@pytest.mark.parametrize("protocol", ELSEWHERE)
def test_a_protocol_that_is_not_listed_is_refused_before_anything_is_asked(protocol, monkeypatch) -> None:
    def connect(*arguments: object) -> None:
        raise AssertionError(f"asks {arguments}")

    monkeypatch.setattr("socket.socket.connect", connect)
    monkeypatch.setattr("socket.getaddrinfo", connect)
    assert protocol not in PROTOCOLS
    with pytest.raises(UserError, match="is no place for checkpoints"):
        Checkpoints(f"{protocol}://127.0.0.1:9/ck")


class Unreachable:
    """A store whose client raises errors of its own."""

    def __getattr__(self, name: str) -> object:
        def ask(*arguments: object, **options: object) -> object:
            raise RuntimeError("no credentials\nfor \x1b[2J")

        return ask


def test_what_the_client_of_a_store_raises_is_one_sentence(monkeypatch) -> None:
    monkeypatch.setattr("fsspec.core.url_to_fs", lambda url: (Unreachable(), "bucket"))
    saved = checkpoints("s3://bucket/run", OWN)
    for ask in (saved.entries, saved.newest, lambda: saved.place.claim(b"")):
        with pytest.raises(RunFailed, match=r"s3://bucket/run' cannot be reached.") as error:
            ask()
        assert "no credentials\\nfor \\x1b" in error.value.why
    with pytest.raises(OSError, match="no credentials"):
        saved.place.open("step-00000004", manifest.NAME)
