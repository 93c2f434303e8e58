"""Pages for users by their names on the site: README.md, those of docs/, and the README.md of each mechanism."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
MECHANISMS = {
    f"{path.parent.name.replace('_', '-')}.md": path
    for path in sorted((ROOT / "src" / "espalier" / "mechanisms").glob("*/README.md"))
}
"""As `.ci/site.py` names them: tensor_parallel/README.md is tensor-parallel.md."""
PAGES = {
    "README.md": ROOT / "README.md",
    **{path.name: path for path in sorted((ROOT / "docs").glob("*.md"))},
    **MECHANISMS,
}
MEASURED = {f"measured/{path.name}": path for path in sorted((ROOT / "docs" / "measured").glob("*.md"))}
"""What was measured and tried."""
