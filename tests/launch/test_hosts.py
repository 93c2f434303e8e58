"""What users write after --hosts, and the command it becomes."""

from __future__ import annotations

import getpass
import socket
import sys

import pytest

from espalier.launch.hosts import hosts
from espalier.launch.hosts.hosts import Host
from espalier.recipe import Launch
from espalier.recipe.errors import UserError


def test_hosts_carry_users_and_ranks() -> None:
    found = hosts.parse("a, me@b:2,10.0.0.7,me@[fe80::1]:3,[::1]")
    assert found == [Host("a"), Host("me@b", 2), Host("10.0.0.7"), Host("me@[fe80::1]", 3), Host("[::1]")]
    assert [host.bare for host in found] == ["a", "b", "10.0.0.7", "fe80::1", "::1"]


def test_a_file_of_hosts_has_comments_and_empty_lines(tmp_path) -> None:
    (tmp_path / "hosts").write_text("# the office\na\n\nb:2  # two sockets\n")
    assert hosts.parse(f"@{tmp_path}/hosts") == [Host("a"), Host("b", 2)]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "names no host"),
        (" , ", "names no host"),
        ("a,,b", "''"),
        ("a,b,a", "a more than once"),
        ("me@a,you@a", "a more than once"),
        ("a:0", "0 ranks"),
        ("a:29500", "29500 ranks"),
        ("a:x", "'a:x'"),
        ("a b", "'a b'"),
        ("-oProxyCommand=x", "'-oProxyCommand=x'"),
        ("me@-oProxyCommand=x", "'me@-oProxyCommand=x'"),
        ("-l@b", "'-l@b'"),
        ("$(touch)", "'$(touch)'"),
        ("a;b", "'a;b'"),
        ("`x`@b", "'`x`@b'"),
        ("{command}", "'{command}'"),
        ("a\x1b[1m", "is no host"),
        ("a/b", "'a/b'"),
        ("@/not/there", "/not/there"),
    ],
)
def test_what_is_no_list_of_hosts_is_refused_by_name(text, named) -> None:
    with pytest.raises(UserError) as caught:
        hosts.parse(text)
    assert named in caught.value.what


def test_a_file_that_is_no_text_is_refused(tmp_path) -> None:
    (tmp_path / "hosts").write_bytes(b"\xff\xfe\0")
    with pytest.raises(UserError, match="UTF-8"):
        hosts.parse(f"@{tmp_path}/hosts")


def test_this_machine_comes_first_and_needs_no_ssh() -> None:
    own = Host(socket.gethostname())
    ordered, here = hosts.here_first([Host("no-such-host-a"), own])
    assert here
    assert ordered == [own, Host("no-such-host-a")]
    assert hosts.command(own, Launch(), "some.module")[:2] == ["sh", "-c"]
    assert hosts.is_here(Host("127.0.0.1"))
    assert hosts.is_here(Host(f"{getpass.getuser()}@localhost"))
    assert not hosts.is_here(Host("somebody-else@localhost"))


def test_the_template_takes_the_host_and_one_line_of_shell() -> None:
    there = Host("me@no-such-host")
    line = f"exec {sys.executable} -u -m some.module"
    assert hosts.command(there, Launch(), "some.module")[-2:] == ["me@no-such-host", line]
    netns = Launch(command="ip netns exec {host} sh -c {command}", python="/opt/my python")
    words = hosts.command(Host("lab0"), netns, "some.module")
    assert words == ["ip", "netns", "exec", "lab0", "sh", "-c", "exec '/opt/my python' -u -m some.module"]
    with pytest.raises(UserError, match="no command line"):
        hosts.command(there, Launch(command="sh -c '{command}"), "some.module")


def test_a_template_is_filled_once() -> None:
    """What is filled in holds no place to be filled in again, whatever the interpreter is called."""
    options = Launch(command="ssh {host} {command}", python="/{host}/{command} $(x)/python")
    found = hosts.command(Host("no-such-host-a"), options, "m")
    assert found == ["ssh", "no-such-host-a", "exec '/{host}/{command} $(x)/python' -u -m m"]
