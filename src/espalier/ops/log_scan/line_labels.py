"""Log line labels: the rank, node, time and level that stand before a message.

Launchers label the lines of many ranks each in its own way: `[rank3]:` (torchrun), `[default3]:` (torchrun --tee),
`3:` (srun --label), `[1,3]<stderr>:` (Open MPI), `w2:` (pdsh), `pod-3 |` (compose), `(Worker pid=1, ip=10.0.0.3)`
(Ray).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime

SHARE = 0.3
"""Of the lines, how many must begin with a bare label before it is taken for one."""

_TIME = (
    r"\d{4}[-/]\d\d[-/]\d\d[T_ ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?"
    r"|\d\d/\d\d/\d{4}\ \d\d:\d\d:\d\d|(?:[A-Z][a-z]{2}\ )?[A-Z][a-z]{2}\ [\ \d]\d\ \d\d:\d\d:\d\d(?:\ \d{4})?"
    r"|\d\d:\d\d:\d\d(?:[.,]\d+)?"
)
_HOST = r"(?=[\w.-]*[\d-])[a-z][\w-]*(?:\.[a-z][\w-]*)*"
_PREFIX = re.compile(
    rf"""(?:
      \[rank\s?(?P<rank>\d+)\]:?(?:\[rank\d+\]:)?
    | rank\s?(?P<column>\d+)(?=\s*[|\]:])
    | \[default(?P<local>\d+)\]:?
    | \[(?P<levels>[EWIF])\d{{3,4}}\s[\d:.]+[^\]]*\]          # torch's own: [E503 03:10:11.0 File.cpp:12]
    | \[(?P<older>[EWIF])\s\w[\w.]*\.c(?:pp|c|u):\d+\]
    | (?P<glog>[EWIF])\d{{4}}\s[\d:.]+\s+\d+\s[\w./-]+:\d+\]
    | \[\d+,(?P<mpi>\d+)\]<std(?:err|out)>:
    | \((?:[\w.]+\s)?(?:pid=\d+)(?:,\s*ip=(?P<ip>[\d.]+))?\)
    | \[?(?P<time>{_TIME})\]?(?:,\d+)?:?
    | \[\s*\d{{1,9}}\.\d{{3,9}}\]                                            # the kernel's clock
    | \[?(?P<level>DEBUG|INFO|NOTICE|WARN(?:ING)?|ERROR|CRITICAL|FATAL|SEVERE)\]?:?(?=[\s\]:-])
    | (?P<kernel>{_HOST})\skernel:
    | (?P<said>{_HOST})\s[\w./-]+\[\d+\]:                                    # syslog: host program[pid]:
    | (?P<sys>{_HOST})\s(?:[a-z][\w-]+):(?=\s)
    | (?P<nccl>[\w.-]+):\d+:\d+\s\[(?P<device>\d+)\](?=\s(?:\S+:\d+\s)?NCCL)
    | (?P<pod>[a-z][\w.-]*\d)\s+\|
    | [-|]
    )[ ]?""",
    re.X,
)
_CODE = re.compile(r"^\s+File \".*\", line \d+")
_BARE_RANK = re.compile(r"^\s{0,4}(\d{1,5}): ")
_BARE_HOST = re.compile(rf"^({_HOST}): (?!error)")
_WITHIN = re.compile(r"(?:global[ _]?|world[ _]?)?\brank[ =:#]{0,3}\[?(\d{1,5})\b(?!\s*(?:/|of|ranks))", re.I)
_INIT = re.compile(r"^([\w.-]+):\d+:\d+ \[(\d+)\] NCCL .*\brank (\d+) nranks")
_PLACED = re.compile(r"\brank[ =:]{1,3}(\d{1,5})\b.{0,30}?\b(?:on|node|host)[ =:]{1,3}([a-z][\w.-]*\d[\w.-]*)", re.I)


@dataclass(frozen=True)
class LogLine:
    """One kept line.

    Attributes:
        number: from 1.
        raw, text: as it stands, and without the labels before it.
        rank, node, time, level: of its labels; time in seconds, level in capitals (ERROR, WARN, ...).
    """

    number: int
    raw: str
    text: str
    rank: int | None = None
    node: str | None = None
    time: float | None = None
    level: str = ""


def parse(texts: Mapping[int, str]) -> list[LogLine]:
    """The lines of a log, by number, taken apart. Bare labels (`3: `, `w2: `) count only where many lines have one."""
    count = max(1, sum(bool(text.strip()) for text in texts.values()))
    ranked = sum(_BARE_RANK.match(text) is not None for text in texts.values()) > SHARE * count
    hosts = Counter(match[1] for text in texts.values() if (match := _BARE_HOST.match(text)))
    hosted = sum(hosts.values()) > SHARE * count
    places = _places(texts)
    return [_parse(number, text, ranked, hosts if hosted else None, places) for number, text in texts.items()]


def without_code(lines: Iterable[LogLine]) -> Iterator[LogLine]:
    """The lines but those of tracebacks that show where an exception passed, and the program's text there."""
    shown = set()
    for line in lines:
        if _CODE.match(line.text):
            shown.add(line.rank)
        elif line.rank in shown and line.text.startswith("   "):
            continue
        else:
            shown.discard(line.rank)
            yield line


def rank_within(text: str) -> int | None:
    """The rank that a message speaks of: `[Rank 5]`, `on rank 3`, `global rank 12`."""
    match = _WITHIN.search(text)
    return int(match[1]) if match else None


def _places(texts: Mapping[int, str]) -> dict[object, tuple[int | None, str]]:
    """Where ranks are: by rank, and by node and device."""
    places: dict[object, tuple[int | None, str]] = {}
    for text in texts.values():
        if match := _INIT.match(text):
            places[match[1], int(match[2])] = int(match[3]), match[1]
            places[int(match[3])] = int(match[3]), match[1]
        elif match := _PLACED.search(text):
            places.setdefault(int(match[1]), (int(match[1]), match[2]))
    return places


def _parse(
    number: int, raw: str, ranked: bool, hosts: Counter[str] | None, places: Mapping[object, tuple[int | None, str]]
) -> LogLine:
    seen = {}
    at = 0
    if ranked and (match := _BARE_RANK.match(raw)):
        seen["rank"] = match[1]
        at = match.end()
    elif hosts is not None and (match := _BARE_HOST.match(raw)):
        seen["pod"] = match[1]
        at = match.end()
    for _ in range(8):
        match = _PREFIX.match(raw, at)
        if match is None or match.end() == at:
            break
        seen |= {name: value for name, value in match.groupdict().items() if value is not None and name not in seen}
        at = match.end()
    text = raw[at:]
    rank = next((int(seen[name]) for name in ("rank", "mpi", "column") if name in seen), None)
    node = next((seen[name] for name in ("kernel", "said", "sys", "nccl", "pod", "ip") if name in seen), None)
    if rank is None and "device" in seen:
        rank = places.get((node, int(seen["device"])), (None, ""))[0]
    if rank is None and "local" in seen:
        rank = int(seen["local"])
    if node is None and rank in places:
        node = places[rank][1]
    level = seen.get("level") or _LOUD.get(next((seen[name] for name in _LETTERS if name in seen), ""), "")
    return LogLine(number, raw, text, rank, node, _seconds(seen.get("time", "")), level)


_LETTERS = ("levels", "older", "glog")
_LOUD = {"E": "ERROR", "F": "FATAL", "W": "WARNING", "I": "INFO"}


def _seconds(text: str) -> float | None:
    """Seconds since 1970 of a full date and time, None of anything less."""
    if text[2:3] == text[5:6] == "/":  # month, day, year
        text = f"{text[6:10]}-{text[:5]}{text[10:]}"
    try:
        return datetime.fromisoformat(text.replace("/", "-")).replace(tzinfo=None).timestamp()
    except ValueError:
        return None
