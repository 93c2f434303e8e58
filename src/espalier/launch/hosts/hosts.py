"""The hosts a user names: `a,b:2,user@c` or `@FILE`, and the command that starts a process on each. No torch."""

from __future__ import annotations

import getpass
import re
import shlex
import socket
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from espalier.comm.rendezvous_wait import known_addresses
from espalier.recipe import Launch
from espalier.recipe.errors import UserError
from espalier.recipe.foreign_files import read_text

HELP = "--hosts a,b,user@c:2 or --hosts @FILE with a host on each line"
# Neither an option of ssh nor shell: letters, digits and few signs, none of them in front that means something there.
_USER = r"(\w[\w.+-]*@)?"
_HOST = re.compile(rf"(?P<name>{_USER}(\w[\w.-]*|\[[0-9A-Fa-f:.]+(%[\w.-]+)?\]))(:(?P<ranks>[0-9]+))?")
_MOST = 4096  # ranks on one host; more is a slip of the finger, such as a port


@dataclass(frozen=True)
class Host:
    """One host: its name as `launch.command` takes it, and how many ranks it gets (None: one, or one for each GPU)."""

    name: str
    ranks: int | None = None

    def __str__(self) -> str:
        """As `--hosts` takes it."""
        return self.name if self.ranks is None else f"{self.name}:{self.ranks}"

    @property
    def bare(self) -> str:
        """The name without a user and without brackets."""
        return self.name.rpartition("@")[2].strip("[]")


def parse(text: str) -> list[Host]:
    """The hosts in `text` (with commas), or in the file it names after `@` (a host on each line, `#` comments).

    Raises UserError for none, for two of one name, and for what is no host.
    """
    words = _lines(Path(text[1:])) if text.startswith("@") else [word.strip() for word in text.split(",")]
    if not any(words):
        raise UserError(f"--hosts {text!r} names no host.", do=HELP)
    hosts = [_host(word) for word in words]
    twice = [name for name, count in Counter(host.bare for host in hosts).items() if count > 1]
    if twice:
        raise UserError(
            f"--hosts names {twice[0]} more than once.",
            why="two sets of ranks would share its memory unknowingly",
            do=f"{twice[0]}:2 starts two ranks there",
        )
    return hosts


def _lines(file: Path) -> list[str]:
    bare = [line.partition("#")[0].strip() for line in read_text(file, HELP).splitlines()]
    return [line for line in bare if line]


def _host(word: str) -> Host:
    match = _HOST.fullmatch(word)
    if match is None:
        why = "a host and a user are letters, digits and . _ -, and begin with a letter or digit"
        raise UserError(f"--hosts: {word!r} is no host.", why=why, do=HELP)
    ranks = int(match["ranks"]) if match["ranks"] else None
    if ranks is not None and not 0 < ranks <= _MOST:
        raise UserError(f"--hosts: {word!r} asks for {ranks} ranks.", do=f"between 1 and {_MOST} ranks on a host")
    return Host(match["name"], ranks)


def here_first(hosts: Sequence[Host]) -> tuple[list[Host], bool]:
    """The hosts with this machine, where it is one of them, at the front: the run folder is the first host's.
    And whether it is one of them."""
    local = [host for host in hosts if is_here(host)]
    return [*local, *(host for host in hosts if host not in local)], bool(local)


def is_here(host: Host) -> bool:
    """Whether `host` is this machine and this user: its name, or an address of its own."""
    if "@" in host.name and host.name.partition("@")[0] != getpass.getuser():
        return False
    if host.bare in ("localhost", socket.gethostname()):
        return True
    return any(map(_is_own, resolve(host)))


def resolve(host: Host) -> list[str]:
    """The IPv4 addresses that the host's name has here; empty for a name that only ssh knows."""
    addresses = known_addresses(host.bare, socket.SOCK_DGRAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in addresses if entry[0] == socket.AF_INET))


def _is_own(address: str) -> bool:
    """An address that can be bound is this machine's."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def command(host: Host, options: Launch, module: str) -> list[str]:
    """What starts `python -m module` on `host`: `launch.command`, or a shell when the host is this machine.

    Raises UserError when the template is not a command line.
    """
    line = f"exec {shlex.quote(options.python or sys.executable)} -u -m {module}"
    if is_here(host):
        return ["sh", "-c", line]
    try:
        words = shlex.split(options.command)
    except ValueError as error:
        raise UserError(f"launch.command = {options.command!r} is no command line: {error}.") from None
    filled = {"{host}": host.name, "{command}": line}
    return [re.sub(r"\{host\}|\{command\}", lambda match: filled[match[0]], word) for word in words]
