"""Syntax nodes of the source by room and by mechanism, beside their budgets. Run by `make check`.

A mechanism counts with its part of the planner in plan/axes. Nodes are those of `ast.walk`, so that nothing is
gained by longer lines. Fails where a mechanism holds more than its budget, or the whole more than .ci/size.json says;
`python .ci/lines.py --write` lowers the numbers of that file to those of today.
"""

from __future__ import annotations

import ast
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "espalier"
FILE = ROOT / ".ci" / "size.json"
BUDGET = 35_000
NEW = 12_000
"""Budget of a mechanism that size.json does not name."""
PLANNER = {
    "experts": "expert_parallel",
    "flat_layout": "sharding",
    "flow_control": "optimizer_node",
    "node_cost": "optimizer_node",
    "node_layout": "optimizer_node",
    "offload": "offload",
    "offload_layout": "offload",
    "offload_tiers": "offload",
    "optimizer_node": "optimizer_node",
    "pipeline": "pipeline",
    "placement": "sharding",
    "placement_plan": "sharding",
    "sequence": "sequence_parallel",
    "sharding": "sharding",
    "state_holders": "sharding",
    "tensor": "tensor_parallel",
    "token_chunks": "token_chunks",
}
"""Which mechanism a module of plan/axes belongs to."""


def nodes(path: Path) -> int:
    """Of one file."""
    return sum(1 for _ in ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def count(package: Path) -> tuple[Counter[str], Counter[str]]:
    """Nodes by room, and by mechanism with its part of the planner."""
    rooms: Counter[str] = Counter()
    mechanisms: Counter[str] = Counter()
    for path in package.rglob("*.py"):
        size = nodes(path)
        parts = path.relative_to(package).with_suffix("").parts
        rooms[parts[0] if len(parts) > 1 else "(top)"] += size
        if parts[0] == "mechanisms" and len(parts) > 2:
            mechanisms[parts[1]] += size
        elif parts[:2] == ("plan", "axes") and parts[2] in PLANNER:
            mechanisms[PLANNER[parts[2]]] += size
    return rooms, mechanisms


def excess(size: int, mechanisms: Counter[str], limits: dict[str, Any]) -> list[str]:
    """What is over its limit, one sentence each."""
    sentences = []
    if size > limits["espalier"]:
        sentences.append(f"The source has {size:,} nodes, more than the {limits['espalier']:,} of .ci/size.json.")
    for name, held in mechanisms.items():
        budget = limits["mechanisms"].get(name, NEW)
        if held > budget:
            sentences.append(f"mechanisms/{name} holds {held:,} nodes, more than its budget of {budget:,}.")
    return sentences


def lowered(size: int, mechanisms: Counter[str], limits: dict[str, Any]) -> dict[str, Any]:
    """The limits, none of them higher than before. A mechanism over BUDGET may keep what it holds."""
    budgets = {
        name: min(budget, max(BUDGET, mechanisms[name]))
        for name, budget in limits["mechanisms"].items()
        if name in mechanisms
    }
    return {"espalier": min(size, limits["espalier"]), "mechanisms": budgets}


def main(words: list[str]) -> int:
    """Prints both tables. Returns how many limits are exceeded."""
    limits = json.loads(FILE.read_text(encoding="utf-8"))
    rooms, mechanisms = count(PACKAGE)
    size = rooms.total()
    if words == ["--write"]:
        limits = lowered(size, mechanisms, limits)
        FILE.write_text(json.dumps(limits, indent=1) + "\n", encoding="utf-8")
    print(f"{size:,} syntax nodes in espalier: {table(rooms)}")
    print(f"by mechanism, with its part of the planner: {table(mechanisms)}")
    sentences = excess(size, mechanisms, limits)
    for sentence in sentences:
        print(sentence)
    return len(sentences)


def table(sizes: Counter[str]) -> str:
    """The largest first."""
    return ", ".join(f"{name} {size:,}" for name, size in sizes.most_common())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
