"""RTop-K's early stop in recipes beside the exact search: `model.max_iterations` of MaxK and of a mixture's router.

    python bench/early_stop.py --data FOLDER [--pairs SEEDS] [--json FILE]

MaxK-SAGE (8 of 64 columns) on Cora (FOLDER/planetoid, the standard split): test accuracy, trained as in bench/graph.py.
A mixture (2 of 16 experts) on the bytes of the standard library: held-out loss. A row has the means over the seeds.
"""

from __future__ import annotations

import statistics
import sys
import sysconfig
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import msgspec
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from espalier import recipe as config
from espalier.graph.data import sources
from espalier.graph.data.graph import Graph
from espalier.language import gpt, moe
from espalier.recipe import defaults
from graph import opened, trained
from table import Row, arguments, compare, publish

LIMITS = (2, 4, 8)
SEEDS = 5
GRAPH = {"width": 64, "depth": 2, "norm": True, "k": 8}
MIXTURE = {"depth": 1, "width": 64, "heads": 2, "feed_forward": 64, "vocabulary": 256, "context": 128, "experts": 16}
STEPS, BATCH, RATE = 60, 8, 3e-3


def accuracy(graph: Graph, seed: int, limit: int | None) -> float:
    """Test accuracy in per cent."""
    return 100 * trained(opened(graph, "sage", seed=seed, steps=STEPS, model={**GRAPH, "max_iterations": limit}))


@cache
def text() -> Tensor:
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()


def batch(generator: torch.Generator, first: int, last: int) -> tuple[Tensor, Tensor]:
    """Sequences that begin between `first` and `last`."""
    begins = torch.randint(first, last - 129, (BATCH, 1), generator=generator)
    rows = text()[begins + torch.arange(129)]
    return rows[:, :-1], rows[:, 1:]


def loss(seed: int, limit: int | None) -> float:
    """Held-out nats per byte, of the last tenth of the text."""
    options = config.Moe(**MIXTURE, active=2, max_iterations=limit)
    model = moe.MOE(defaults.resolve(config.Recipe(model=options))[0].model)
    gpt.initialise(model, seed)
    optimizer = torch.optim.AdamW(model.parameters(), RATE)
    drawn = torch.Generator().manual_seed(seed)
    edge = len(text()) * 9 // 10
    for _ in range(STEPS):
        optimizer.zero_grad()
        tokens, targets = batch(drawn, 0, edge)
        (model.loss_sum(tokens, targets) / targets.numel()).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        held = [batch(drawn, edge, len(text())) for _ in range(20)]
        return statistics.mean(float(model.loss_sum(*pair)) / pair[1].numel() for pair in held)


def rows(what: str, unit: str, measure: Callable[[int, int | None], float], seeds: int) -> Iterator[Row]:
    """A row for each limit; the exact search is measured once for each seed."""
    exact = [measure(seed, None) for seed in range(seeds)]
    for limit in LIMITS:
        early = [measure(seed, limit) for seed in range(seeds)]
        pairs = list(zip(early, exact, strict=True))
        row = compare(f"{what}, max_iterations = {limit}", "exact search", unit, pairs, higher_is_better=unit == "%")
        ours, peer = statistics.mean(early), statistics.mean(exact)
        ratio = ours / peer if unit == "%" else peer / ours
        print(f"{row.case}: {early} {exact}", file=sys.stderr)
        yield msgspec.structs.replace(row, ours=ours, peer_value=peer, ratio=ratio)


def main() -> None:
    options = arguments(__doc__ or "", data={"metavar": "FOLDER", "required": True})
    seeds = options.pairs or SEEDS
    cora = sources.load(config.Data(path=str(Path(options.data) / "planetoid" / "cora")), config.GraphOptions())
    found = [
        *rows("MaxK-SAGE, 8 of 64, Cora, test accuracy", "%", lambda seed, limit: accuracy(cora, seed, limit), seeds),
        *rows("mixture, 2 of 16 experts, held-out loss", "nats per byte", loss, seeds),
    ]
    publish(found, options.json)


if __name__ == "__main__":
    main()
