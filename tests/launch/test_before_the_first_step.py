"""What a run executes before its first step, counted in the process of rank 0 and before it was forked.

Of 696 functions in 130 files, with nothing kept from before, 153 price layouts and say why one is the plan (`plan`); 90
cut the corpus into shards and build the model (`language`); 117 lay states, groups and the optimizer on the ranks and
price that (`shard`, `parallel`, `optim`, `sync`, `stages`); 86 read and fill the recipe and say what was decided
(`config`, `verbs`); 81 fork, connect and watch the ranks (`launch`, `comm`, `resilience`); 35 know the machine
(`cluster`, `hardware`); 17 know where checkpoints and copies go (`checkpoint`); 18 write the run log and show progress
(`track`); 6 make the table of fast forms (`kernels`); 93 are modules between packages, such as the trainer.
"""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

PROGRAM = """
import inspect, json, sys, threading
from pathlib import Path

folder = Path(sys.argv[1])
seen = set()


def entered(frame, event, argument):
    code = frame.f_code
    ours = "/src/espalier/" in code.co_filename and not code.co_name.startswith("<")
    if event == "call" and ours and code.co_flags & inspect.CO_OPTIMIZED:  # no bodies of classes
        seen.add((code.co_filename.rpartition("/src/espalier/")[2], code.co_qualname))


sys.setprofile(entered)
threading.setprofile(entered)

from espalier import trainer
from espalier.cli import main

plain = trainer.Trainer.train_step


def train_step(self, *arguments):
    if self.setting.place.rank == 0 and not (folder / "seen").exists():
        (folder / "seen").write_text(json.dumps(sorted(seen)))
    return plain(self, *arguments)


trainer.Trainer.train_step = train_step
sys.exit(main(sys.argv[2:]))
"""
LIMIT, RESILIENCE = 697, 20
"""Functions of the package before rank 0's first step; and of what is there for failures."""


def test_few_functions_run_before_the_first_step(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        textwrap.dedent(f"""
        [model]
        depth = 1
        width = 32
        heads = 2
        feed_forward = 64
        [data]
        path = "{corpus}"
        cache = "{tmp_path}/cache"
        [train]
        steps = 2
        sequence = 32
        batch_tokens = 256
        [plan.pin]
        ranks = 2
        """)
    )
    command = [sys.executable, str(tmp_path / "program.py"), str(tmp_path), "train", str(recipe)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    seen = json.loads((tmp_path / "seen").read_text())
    assert len(seen) <= LIMIT, f"{len(seen)} in {len({path for path, _ in seen})} files"
    assert len([name for path, name in seen if path.startswith("resilience/")]) <= RESILIENCE
    assert ["checkpoint/coordination.py", "Team.agree"] not in seen, (
        "a new run looks for no state, so its ranks need not agree"
    )
