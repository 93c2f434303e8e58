"""Graphs in the table of kinds: the planner's questions and answers for nodes, links and graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from espalier import contents
from espalier.config import Recipe
from espalier.graph.predict import answers
from espalier.graph.workload import GraphWorkload, open_graph
from espalier.rows import Answer, Profile, Row, Sampling
from espalier.shard.blocks import profile
from espalier.workload import Progress, Workload


def _open(recipe: Recipe, folder: Path | None, progress: Progress, data: Any) -> GraphWorkload:
    return open_graph(recipe, folder, progress)


def _contents(recipe: Recipe, workload: Workload) -> Mapping[str, str]:
    """Of each file of the graph; a graph that has none is one by what is in it."""
    path = recipe.data[0].path
    place = Path(path).expanduser()
    if place.exists():
        return contents.below(place)
    found = {str(one): one for one in sorted(place.parent.glob(f"*.{place.name}.*"))}  # one of several in a folder
    return contents.hashes(found) if found else {path: workload.fingerprint()}


def _profile(recipe: Recipe, opened: Callable[[], Workload]) -> Profile:
    workload = opened()
    assert isinstance(workload, GraphWorkload)
    return profile(workload, workload.anatomy, workload.decisions())


def _answer(workload: Workload, model: nn.Module, text: str | None, sampling: Sampling) -> Answer:
    assert isinstance(workload, GraphWorkload)
    found = answers(workload, model, text)
    return Answer(_lines(found), lambda: {"answers": found})


def _lines(found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for one in found:
        chances = one["probabilities"] if "probabilities" in one else [one["probability"]]
        shown = " ".join(f"{chance:.4f}" for chance in chances)
        yield "\t".join([one["name"], *([one["label"]] if "label" in one else []), shown]) + "\n"


ROW = Row(open=_open, profile=_profile, contents=_contents, reading="Reading the graph", answer=_answer)
