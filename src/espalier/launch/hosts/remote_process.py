"""Remote process: one process started on another host, its output and its exit status. No torch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from espalier.launch.hosts.host_agent import Told
from espalier.launch.hosts.hosts import Host
from espalier.recipe.errors import EspalierError
from espalier.train import version_check


@dataclass
class Far:
    """One started process, seen from here. Has state: what it said, and whether it has ended."""

    host: Host
    argv: Sequence[str]
    process: subprocess.Popen[bytes]
    rank: int = -1
    """The number of its host, once it has spoken."""
    messages: list[Told] = field(default_factory=list)
    open: dict[int, tuple[str, bytes]] = field(default_factory=dict)
    """Its output still read: descriptor -> (`out` or `err`, the beginning of a line)."""
    last: str = ""
    """The last line of its standard error."""
    code: int | None = None
    error: EspalierError | None = None
    reported: bool = False
    """Whether it told that error itself."""
    label: str = ""
    """Its name in logs, once its ranks are known."""
    identity: dict[str, str] = field(default_factory=dict)
    """What it is, as far as it has said."""
    reached: Told = field(default_factory=dict)
    """How another process in its place finds the others: where it has found them itself."""
    joined: bool = False
    """Whether it knows the plan, so that another could take its place."""

    @property
    def named(self) -> str:
        """For messages and logs."""
        return self.label or self.host.name

    @property
    def silent(self) -> bool:
        """Whether it has ended before its time and said nothing of that."""
        return self.code is not None and self.error is not None and not self.reported

    @property
    def done(self) -> Told:
        """What it said at its good end; empty when it did not."""
        return self.messages[-1] if self.messages and self.messages[-1]["is"] == "done" else {}

    def answered(self, kinds: Sequence[str]) -> bool:
        """Whether the next thing to hear of it is one of these."""
        return self.error is None and bool(self.messages) and self.messages[0]["is"] in kinds

    def tell(self, message: Mapping[str, Any]) -> None:
        """Says one thing to the process; one that has gone is met where its end is noticed."""
        assert self.process.stdin is not None
        with suppress(OSError, ValueError):
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()

    def hang_up(self) -> None:
        """Lets go of its lifeline."""
        with suppress(OSError):
            self.process.stdin.close()  # type: ignore[union-attr]

    def kill(self) -> None:
        """Ends its command, if need be."""
        self.hang_up()
        if self.process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        """Ends its command, if need be, and gives back what that took here."""
        self.kill()
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()


def compare(fars: Sequence[Far], identities: Sequence[tuple[Far, Mapping[str, str]]]) -> None:
    """Raises UserError where processes are not the same as some of them have just said (`identities`)."""
    for far, identity in identities:
        far.identity = {**far.identity, **identity}
    version_check.check(
        [{"host": far.host.name, **{key: far.identity[key] for key in identities[0][1]}} for far in fars]
    )
