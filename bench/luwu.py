"""The optimizer on a node of its own, on slow links: LuWu beside FSDP2 and ZeRO-1, and what the node sustains.

    python bench/luwu.py [--quick] [--pairs N] [--json FILE] [--rate 200mbit]
        [--only links|aggregator|waits|tiny|node|stages]

`links`: four workers with an uplink of 200 Mbit/s each, and a node whose uplink is four times as fast, so that it needs
no aggregator. All contestants are up at once and take turns of a few steps. FSDP2 gathers each block anew in backward
(`reshard_after_forward=True`), with Gloo's reduce-scatter and with one that sends half of its bytes (`direct`); ZeRO-1
by hand overlaps its exchanges with forward and backward. `plain` is one process without links. Bytes per link and step
are those of the interface, headers left out, beside the cost function's; seconds stand beside the planner's too, which
is told what the node's parts took, and the workers' own part of a step on the same hosts with unlimited links; and so
do the seconds in which the first worker waits. Hosts use CUBIC, as Linux does by default.
`aggregator`: the node's link is a worker's, and its workers reach it by an aggregator on a host of its own with four
times that, or without; in 8 bits, as FSDP2 with a direct reduce-scatter of 8 bits (as ZeRO++ sends gradients) and
ZeRO-1 are; beside the planner's seconds. `waits`: two workers whose
computing of a layer takes longer than its two pulls, and the share of a step in which the first waits for pulls, beside
the goal of 5 %. `tiny`: the same with a model
of a few thousand numbers, and whether two runs leave the same files. `node`: four workers that compute nothing push and
pull over the same links, and with a quarter of rate and layers, and one over loopback; parameters/s beside the least of
what link, disk and AdamW sustain alone; and AdamW alone, as a node runs it on one core, beside torch's default.
`stages`: threads that belong to steps beside threads that own layers, on the
same O_DIRECT files. Needs root (bench/netlab.py).
"""

from __future__ import annotations

import shutil
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from subprocess import Popen

import msgspec
import torch

sys.path.insert(0, str(Path(__file__).parent))
from espalier.mechanisms.optimizer_node.chunk_update import update
from espalier.mechanisms.optimizer_node.client import Client
from espalier.mechanisms.optimizer_node.node import OptimizerNode
from espalier.mechanisms.optimizer_node.state_file import ChunkState, open_state, open_sums
from espalier.optim import adamw
from espalier.optim.base import Owned
from espalier.plan.axes import node_cost as cost
from espalier.plan.axes.flow_control import SHARE
from espalier.plan.axes.node_layout import NodeJob
from espalier.store.direct_io import aligned
from espalier.store.generations import Generations
from luwu_rank import Task, Turn, job_of, zero
from luwu_stages import stages
from netlab import PORT, Lab, Shape
from netlab import rate as rate_of
from table import Row, arguments, compare, publish, settle

WORKERS = 4
NAMES = {
    "fsdp2": "FSDP2, resharding",
    "fsdp2 direct": "FSDP2, resharding, direct reduce-scatter",
    "zero1": "ZeRO-1 with states in host memory, by hand",
    "fsdp2 int8": "FSDP2, resharding, direct reduce-scatter in int8",
    "zero1 int8": "ZeRO-1 by hand, gradients in int8",
    "luwu int8": "the same without an aggregator",
    "plain": "one process, no links",
}
GOAL = 0.05
"""Of a step that may be waits for pulls."""
ALONE = 1448 / 1514
"""Payload of a full packet: what `tc tbf` counts are whole frames."""


class Contestants:
    """Programs that wait on the hosts of a lab until it is their turn. Has state: their processes."""

    def __init__(self, lab: Lab, workers: int) -> None:
        self.lab, self.workers = lab, workers
        self._ranks: dict[str, list[Popen[str]]] = {}

    def start(self, task: Task) -> None:
        """Returns at once. An optimizer node stands on the last host."""
        command = [sys.executable, str(Path(__file__).parent / "luwu_rank.py"), msgspec.json.encode(task).decode()]
        node = task.kind.startswith("luwu") or task.kind == "feed"
        hosts = 1 if task.kind == "plain" else task.workers + node + ("aggregator" in task.kind)
        port = {"MASTER_PORT": str(PORT + 10 * len(self._ranks))}
        self._ranks[task.kind] = self.lab.start(command, port, hosts)

    def turn(self, kind: str, steps: int) -> Turn:
        """What `steps` steps of it took. Raises RuntimeError where it has ended."""
        for rank in self._ranks[kind][: self.workers]:
            assert rank.stdin is not None
            rank.stdin.write(f"{steps}\n")
            rank.stdin.flush()
        said = self._ranks[kind][0].stdout
        assert said is not None
        line = said.readline()
        if not line:
            raise RuntimeError(f"{kind} has ended; its error is above")
        return msgspec.json.decode(line, type=Turn)

    def end(self) -> None:
        """Lets all of them end, and raises RuntimeError where one failed."""
        codes = []
        for place in (slice(self.workers), slice(self.workers, None)):  # an optimizer node last
            some = [rank for ranks in self._ranks.values() for rank in ranks[place]]
            for rank in some:
                assert rank.stdin is not None
                rank.stdin.close()
            codes += [rank.wait(timeout=100) for rank in some]
        if any(codes):
            raise RuntimeError(f"ranks ended with {codes}; their errors are above")

    def kill(self) -> None:
        """Ends what is left."""
        for ranks in self._ranks.values():
            for rank in ranks:
                rank.kill()


@contextmanager
def contest(rate: float, workers: int = WORKERS, narrow: int = 0) -> Iterator[Contestants]:
    """A lab with nobody in it yet; the last node's uplink is as fast as all workers' together. `narrow`: nodes with the
    uplink of a worker before it."""
    rates = (rate,) * (workers + narrow) + (rate * workers,)
    with Lab(Shape(nodes=len(rates), hosts=1, rates=rates, congestion="cubic")) as lab:
        found = Contestants(lab, workers)
        try:
            yield found
            found.end()
        finally:
            found.kill()


def turns(
    kinds: Sequence[str], task: Task, rate: float, pairs: int, steps: int, narrow: int = 0
) -> dict[str, list[Turn]]:
    """`pairs` interleaved turns of each kind, after one that does not count. `narrow`: see `contest`."""
    found: dict[str, list[Turn]] = {kind: [] for kind in kinds}
    with contest(rate, task.workers, narrow) as made:
        for kind in kinds:
            shutil.rmtree(f"{task.folder}/{kind}", ignore_errors=True)
            link = rate / 8 / (task.workers if narrow and "aggregator" not in kind else 1)
            made.start(msgspec.structs.replace(task, kind=kind, folder=f"{task.folder}/{kind}", link=link))
        for kind in kinds:
            made.turn(kind, 1)
        for _ in range(pairs):
            for kind in kinds:
                found[kind].append(made.turn(kind, steps))
            print(*(f"{kind} {ones[-1].seconds:.3f} s" for kind, ones in found.items()), sep=", ", flush=True)
    return found


def links(task: Task, rate: float, pairs: int, steps: int) -> list[Row]:
    """Tokens/s beside the peers, bytes per link beside the formula, and seconds beside the planner's."""
    kinds = ("luwu", "luwu int8", "fsdp2", "fsdp2 direct", "zero1", "plain")
    began = parts(job_of(4, 2**20), Path(task.folder))
    found = turns(kinds, task, rate, pairs, steps)
    free = turns(kinds[:2], task, 0.0, pairs, steps)
    own = {kind: statistics.median(one.seconds - one.stalled for one in ones) for kind, ones in free.items()}
    case = f"{sum(found['luwu'][0].numel) / 1e6:.3g} M parameters, {rate / 1e6:.0f} Mbit/s"
    rows = []
    for kind in ("luwu int8", "luwu"):
        for peer, name in NAMES.items():
            pair = [
                (WORKERS * task.sequence / mine.seconds, WORKERS * task.sequence / other.seconds)
                for mine, other in zip(found[kind], found[peer], strict=True)
            ]
            rows.append(compare(f"{kind}: {case}", name, "tokens/s", pair))
    for kind in kinds[:-1]:
        for way in ("sent", "received"):
            pair = [(getattr(one, way), getattr(one, f"expected_{way}")) for one in found[kind]]
            rows.append(
                compare(
                    f"{kind}: {way} per link and step, {case}", "the formula", "bytes", pair, higher_is_better=False
                )
            )
    for kind in kinds[:2]:
        planned = [predicted(one, own[kind], rate, began) for one in found[kind]]
        pair = [(one.seconds, sum(parts)) for one, parts in zip(found[kind], planned, strict=True)]
        rows.append(compare(f"{kind}: a step, {case}", "as predicted", "s", pair, higher_is_better=False))
        waits = [(one.stalled, exposed) for one, (_, exposed) in zip(found[kind], planned, strict=True)]
        what = f"{kind}: of a step, exposed waits for pulls and pushes, {case}"
        rows.append(compare(what, "as predicted", "s", waits, higher_is_better=False))
    return rows


def predicted(
    turn: Turn, computing: float, rate: float, alone: dict[str, float], route: cost.Route | None = None
) -> tuple[float, float]:
    """Seconds of computing, and those that the cost function adds to them. `route`: by aggregators with links as fast
    as all workers', to a node with one worker's; None: the node has a link as fast as all workers'."""
    layers = cost.Layers(turn.numel, turn.uses)
    sent = turn.expected_sent
    wire = 4.0, sent / sum(turn.numel)
    pulls = pushes = rate / 8 * SHARE
    if route is not None:
        step = turn.expected_received, sent, max(sent, 2.0 * sum(turn.numel))
        loads, links = route.links(*step), {"worker": 1, "node": 1, "aggregator": WORKERS}
        pulls, pushes = (
            rate / 8 * SHARE * min(links[name] * step[way] / load[way] for name, load in loads.items())
            for way in (0, 1)
        )
    rates = cost.Rates(pulls, alone["disk"] * cost.STATE_BYTES, alone["adam"], pushes)
    readers = WORKERS if route is None else route.aggregators or WORKERS
    return computing, float(cost.seconds(layers, computing, rates, wire, readers) - computing)


def aggregated(task: Task, rate: float, pairs: int, steps: int) -> list[Row]:
    """A node with the link of one worker, with an aggregator before it and without, beside peers in 8 bits too."""
    ours = "luwu int8 aggregator"
    began = parts(job_of(4, 2**20), Path(task.folder))
    found = turns((ours, "luwu int8", "fsdp2 int8", "zero1 int8", "zero1"), task, rate, pairs, steps, narrow=1)
    free = turns(("luwu int8",), task, 0.0, pairs, steps)["luwu int8"]
    own = statistics.median(one.seconds - one.stalled for one in free)
    case = f"{ours}: {sum(found[ours][0].numel) / 1e6:.3g} M parameters, {rate / 1e6:.0f} Mbit/s, also for the node"
    rows = []
    for peer in [kind for kind in found if kind != ours]:
        pair = [
            (WORKERS * task.sequence / mine.seconds, WORKERS * task.sequence / other.seconds)
            for mine, other in zip(found[ours], found[peer], strict=True)
        ]
        rows.append(compare(case, NAMES[peer], "tokens/s", pair))
    for kind, place in ((ours, ("host", 1)), ("luwu int8", ("", 0))):
        route = cost.Route(WORKERS, 1, *place)
        pair = [(one.seconds, sum(predicted(one, own, rate, began, route))) for one in found[kind]]
        rows.append(
            compare(f"{kind}: a step, the node's link is a worker's", "as predicted", "s", pair, higher_is_better=False)
        )
    for kind in (ours, "fsdp2 int8", "zero1 int8"):
        for way in ("sent", "received"):
            pair = [(getattr(one, way), getattr(one, f"expected_{way}")) for one in found[kind]]
            what = f"{kind}: {way} per worker's link and step"
            rows.append(compare(what, "the formula", "bytes", pair, higher_is_better=False))
    return rows


def waits(task: Task, rate: float, pairs: int) -> list[Row]:
    """Of a step the share in which the first worker waits for pulls, where computing takes longer than they do."""
    found = turns(("luwu",), task, rate, pairs, 1)["luwu"]
    each = statistics.median((one.seconds - one.stalled) / task.depth for one in found)
    both = 2 * 4 * max(found[0].numel) / (rate / 8 * SHARE)
    print(f"a layer is computed in {each:.2f} s and pulled twice in {both:.2f} s", flush=True)
    longer = f"a layer computed in {each / both:.1f} times its two pulls"
    case = f"luwu: share of a step that waits for pulls, {task.workers} workers, {longer}"
    pair = [(one.pulls / one.seconds, GOAL) for one in found]
    return [compare(case, "the goal", "of a step", pair, higher_is_better=False)]


def tiny(task: Task, rate: float, pairs: int) -> list[Row]:
    """A model that links hardly notice, and the bits of two undisturbed runs."""
    kinds = ("luwu int8", "fsdp2 direct", "zero1")
    turns(kinds[:1], task, rate, pairs, 10)
    first = _state(task)
    found = turns(kinds, task, rate, pairs, 10)
    second = _state(task)
    size = f"{sum(found[kinds[0]][0].numel):,} parameters"
    equal = len(first) if first == second else 0
    case = f"luwu int8: the node's state after {len(found[kinds[0]]) * 11 + 2} steps, two runs of one seed, {size}"
    rows = [Row(case, "the first run", len(first), equal, equal / len(first), "equal bytes", "(n=2)")]
    for peer in kinds[1:]:
        pair = [(mine.seconds, other.seconds) for mine, other in zip(found[kinds[0]], found[peer], strict=True)]
        rows.append(compare(f"luwu int8: a step, {size}", NAMES[peer], "s", pair, higher_is_better=False))
    return rows


# --- the node alone ------------------------------------------------------------------------------------------------


def loopback_rate(job: NodeJob, folder: Path, steps: int) -> list[float]:
    """Parameters/s of steps in which one worker over loopback pulls every layer twice and pushes it once."""
    with open_state(folder, job, zero) as state, socket.create_server(("127.0.0.1", 0)) as door:
        node = OptimizerNode(job, (state, open_sums(folder, job)), door, "bench").start()
        client = Client([[door.getsockname()[:2]]], 0, job, "bench")
        outs = [torch.empty(layer.numel) for layer in job.layers]
        gradient, took = torch.full((job.layers[0].numel,), 1e-3), []
        for step in range(steps + 2):
            began = time.perf_counter()
            for _ in range(2):
                for one in [client.pull(number, step, out) for number, out in enumerate(outs)]:
                    client.wait(one)
            for one in [client.push(number, step, gradient) for number in range(len(outs))]:
                client.wait(one)
            client.move(step, 1.0, 1.0, following=1.0)
            client.settle(step + 1)
            took.append(time.perf_counter() - began)
        client.close()
        node.close()
    return [sum(layer.numel for layer in job.layers) / one for one in took[2:]]


def parts(job: NodeJob, folder: Path) -> dict[str, float]:
    """Parameters/s of the disk (12 bytes read and 12 written, with a commit), AdamW and loopback, each alone."""
    layer = job.layers[0]
    size = layer.numel * 12
    folder.mkdir(parents=True, exist_ok=True)
    with Generations.create(folder / "disk", {str(one): size for one in range(4)}) as state:
        buffer = aligned(size)
        for step in range(3):
            began = time.perf_counter()
            for one in range(4):
                state.write(str(one), buffer)
            state.commit(step)
            for one in range(4):
                state.read(str(one), buffer)
        disk = 4 * layer.numel / (time.perf_counter() - began)
    (folder / "disk").unlink()
    owned = [Owned("one", torch.nn.Parameter(torch.zeros(layer.numel // 64, 64)), torch.Size((layer.numel // 64, 64)))]
    owned[0].tensor.grad = torch.ones_like(owned[0].tensor)
    optimizer = adamw.build(job.optimizer, owned)
    optimizer.step(1.0)
    began = time.perf_counter()
    for _ in range(4):
        optimizer.step(1.0)
    adam = 4 * layer.numel / (time.perf_counter() - began)
    return {"disk": disk, "adam": adam, "link": loopback(64 * 2**20) / 12}


def loopback(size: int) -> float:
    """Bytes/s of a plain TCP connection on this machine."""
    with socket.create_server(("127.0.0.1", 0)) as door, socket.create_connection(door.getsockname()) as one:
        other, _ = door.accept()
        data, room = bytes(size), bytearray(2**20)
        sender = threading.Thread(target=one.sendall, args=(data,))
        began = time.perf_counter()
        sender.start()
        left = size
        while left:
            left -= other.recv_into(room)
        sender.join()
        other.close()
        return size / (time.perf_counter() - began)


def fed(task: Task, rate: float, pairs: int) -> list[tuple[float, float]]:
    """Parameters/s of a node that four workers feed over links of that rate, and of the slowest of its parts."""
    folder, found = Path(task.folder), []
    link = rate / 8 * ALONE / 8  # a worker's link brings each number twice a step, in fp32
    with contest(rate) as made:
        made.start(msgspec.structs.replace(task, kind="feed", folder=f"{folder}/feed {rate:g}", link=rate / 8))
        made.turn("feed", 1)
        for _ in range(pairs):
            alone = parts(job_of(1, task.width), folder)
            took = made.turn("feed", 2)
            found.append((task.depth * task.width / took.seconds, min(link, alone["disk"], alone["adam"])))
            print(f"fed over links: {found[-1][0] / 1e6:.2f} M/s of {found[-1][1] / 1e6:.2f}", flush=True)
    return found


def node(task: Task, rate: float, pairs: int) -> list[Row]:
    """The node beside the slowest of its parts: fed by four workers over their links, and by one over loopback."""
    name, rows = "least of link, disk and AdamW", []
    for slower in (1, 4):
        pair = fed(msgspec.structs.replace(task, width=task.width // slower), rate / slower, pairs)
        case = f"node fed by {WORKERS} workers, {rate / slower / 1e6:.0f} Mbit/s each"
        rows.append(compare(case, name, "parameters/s", pair))
    job, found = job_of(6, task.width), []
    for number in range(pairs):
        place = Path(task.folder) / f"node{number}"
        alone = parts(job, place)
        settle()
        found.append((statistics.median(loopback_rate(job, place, 3)), min(alone.values())))
        print({part: f"{value / 1e6:.0f} M/s" for part, value in alone.items()}, f"{found[-1][0] / 1e6:.0f} M/s")
        shutil.rmtree(place)
    rows.append(compare("node fed by one worker over loopback, unlimited", name, "parameters/s", found))
    return [
        *rows,
        compare("AdamW of a node, one core", "torch's default AdamW", "parameters/s", adam_rates(job, pairs)),
    ]


def adam_rates(job: NodeJob, pairs: int) -> list[tuple[float, float]]:
    """Parameters/s of a chunk in a node's buffers, and of the same tensor by `torch.optim.AdamW` as it comes."""
    chunk, found = job.chunks[0][0], []
    buffers = ChunkState(chunk.elements)
    buffers.open(chunk)
    for memory in (buffers.master, buffers.first, buffers.second):
        memory.zero_()
    buffers.gradient.fill_(1e-3)
    parameter = torch.nn.Parameter(torch.zeros(job.layers[0].tensors[0][1]))
    parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer = torch.optim.AdamW([parameter], lr=1e-3)
    for number in range(pairs + 1):
        settle()
        took = []
        for step in (lambda number=number: update(job, buffers, number + 1, 1.0), optimizer.step):
            began = time.perf_counter()
            for _ in range(8):
                step()
            took.append(8 * chunk.elements / (time.perf_counter() - began))
        if number:
            found.append((took[0], took[1]))
    return found


def _state(task: Task) -> bytes:
    """The node's state file: after as many steps its newest step lies in the same places."""
    return next(Path(task.folder).rglob("state")).read_bytes()


def main() -> int:
    """Measures and prints."""
    given = arguments(
        __doc__ or "",
        rate={"default": "200mbit", "help": "of a worker's uplink, each way"},
        only={"choices": ("links", "aggregator", "waits", "tiny", "node", "stages"), "help": "one part"},
    )
    quick, rows, rate = given.quick, list[Row](), rate_of(given.rate)
    pairs = given.pairs or (3 if quick else 5)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="luwu-", dir=Path.cwd()) as made:
        size, long = ((4, 192), (3, 256, 512)) if quick else ((6, 256), (8, 256, 4096))
        made_by: dict[str, Callable[[], list[Row]]] = {
            "stages": lambda: stages(2**19 if quick else 2**20, pairs, Path(made)),
            "node": lambda: node(Task("feed", 6 if quick else 8, 2**20, 0, made, WORKERS), rate, pairs),
            "waits": lambda: waits(Task("", *long, f"{made}/waits", 2), rate, min(pairs, 3)),
            "tiny": lambda: tiny(Task("", 1, 32, 16, f"{made}/tiny", WORKERS), rate, pairs),
            "links": lambda: links(Task("", *size, 64, f"{made}/links", WORKERS), rate, pairs, 2),
            "aggregator": lambda: aggregated(Task("", *size, 64, f"{made}/aggregator", WORKERS), rate, pairs, 2),
        }
        for part, measure in made_by.items():
            if given.only in (None, part):
                began = time.perf_counter()
                print(f"{part} begins", flush=True)
                rows += measure()
                print(f"{part} took {time.perf_counter() - began:.0f} s", flush=True)
    if quick:
        rows = [msgspec.structs.replace(row, case=f"{row.case}, quick") for row in rows]
    publish(rows, given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
