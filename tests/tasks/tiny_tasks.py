"""Small data of several tasks, and recipes of them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from espalier.recipe import recipe_file
from espalier.train import workload_registry

LENGTH = 6


class Pictures(Dataset[dict[str, torch.Tensor]]):
    """Pictures of 8 x 8 and a text that says which they are."""

    def __init__(self, count: int = 40) -> None:
        seeded = torch.Generator().manual_seed(1)
        self.text = torch.randint(1, 200, (count, LENGTH), generator=seeded)
        self.image = self.text[:, :1, None, None] / 200 + 0.1 * torch.randn(count, 1, 8, 8, generator=seeded)

    def __len__(self) -> int:
        return len(self.text)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"image": self.image[index], "text": self.text[index]}


class Modules(Dataset[dict[str, torch.Tensor]]):
    """Nodes with three neighbours, in four classes."""

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        seeded = torch.Generator().manual_seed(index)
        return {"nodes": torch.randn(4, 5, generator=seeded), "label": torch.tensor(index % 4)}


def pictures() -> Pictures:
    return Pictures()


def modules() -> Modules:
    return Modules()


def few() -> Pictures:
    return Pictures(3)


def nothing() -> None:
    return None


TABLE: dict[str, Any] = {
    "model": {"kind": "multitask", "length": LENGTH, "joint": 4},
    "towers": [
        {"name": "image", "kind": "image", "width": 8, "depth": 3},
        {"name": "text", "kind": "text", "width": 16, "depth": 2},
        {"name": "package", "kind": "graph", "width": 8, "depth": 1},
    ],
    "tasks": [
        {
            "name": "match",
            "data": "tiny_tasks:pictures",
            "towers": ["image", "text"],
            "loss": "contrastive",
            "batch": 7,
        },
        {"name": "write", "data": "tiny_tasks:pictures", "towers": ["text"], "loss": "next_token", "batch": 5},
        {
            "name": "sort",
            "data": "tiny_tasks:modules",
            "towers": ["package"],
            "loss": "classes",
            "batch": 3,
            "weight": 0.5,
        },
    ],
    "train": {"steps": 4, "validate_every": 4, "precision": "fp64"},
    "plan": {"trial": False, "pin": {"threads": 1}},
}


FIELD: dict[str, Any] = {
    "towers": [
        {"name": "field", "kind": "voxels", "width": 8, "resolution": 8},
        {"name": "package", "kind": "graph", "width": 8, "depth": 2},
        {"name": "text", "kind": "text", "width": 8, "depth": 2},
    ],
    "tasks": [
        {"name": "scene", "data": "spheres:views=24,size=12", "towers": ["field"], "loss": "colours", "batch": 33},
        {"name": "sort", "data": "tiny_tasks:modules", "towers": ["package"], "loss": "classes", "batch": 3},
        {"name": "write", "data": "tiny_tasks:pictures", "towers": ["text"], "loss": "next_token", "batch": 5},
    ],
}
"""A radiance field beside a graph's task and a decoder."""


def table(**changes: Any) -> dict[str, Any]:
    """The recipe; `changes`: a row's name with an underscore and key, such as `write_weight=2`, or a table."""
    made = copy.deepcopy(TABLE)
    rows = {one["name"]: one for one in (*made["towers"], *made["tasks"])}
    for name, value in changes.items():
        row, _, key = name.partition("_")
        if row in rows and key:
            rows[row][key] = value
        else:
            made[name] = value
    return made


def resolved(*overrides: str, **changes: Any) -> workload_registry.Resolved:
    """The recipe with what it leaves open."""
    recipe = recipe_file.from_table(table(**changes), "recipe", overrides)
    return workload_registry.settle(recipe, Path(__file__).parent)
