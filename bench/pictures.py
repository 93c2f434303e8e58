"""Writes the pictures of README and of docs/ that show a terminal, a report and plans, into the folder given:

    python bench/pictures.py docs/images chromium      (`make pictures`)

They are of the run that README describes, examples/language.toml, which is trained for them in a new folder. Make
them on a machine with nothing else to do: they show how long it took.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import tempfile
import termios
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parents[1]
COLUMNS, LINES = 108, 38
"""Of the terminal."""
SHOWN = 11
"""Lines of the plan that the picture shows."""
RUN = "espalier train examples/language.toml"
PLAN = "espalier plan examples/llama-7b.toml --cluster examples/a100.toml"
FOUR_STAGES = "plan.pin.pp=4 plan.pin.dp=16 plan.pin.schedule=zero_bubble train.batch_tokens=524288"
PAGES = {
    "report": ("runs/language/report.html", (1000, 1060)),
    "plan": ("plan.html", (1000, 1060)),
    "timetable": ("timetable.html", (1000, 1245)),
    "terminal": ("terminal.html", (940, 570)),
}
"""By the name of the picture: the page, and the size of the window."""
PROGRESS = re.compile(r"^\s*\d+/\d+ ")
STYLE = "<style>body { background: #16181d; color: #d7dae0; margin: 14px 18px; } pre { font-size: 14px; }</style>"


def shown(command: str, folder: Path) -> str:
    """What a terminal gets from a command that runs in `folder`, as it came. Raises SystemExit where it fails."""
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(folder)
        words = shlex.split(command)
        os.execvp(words[0], words)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    parts = []
    while True:
        try:
            part = os.read(terminal, 65536)
        except OSError:  # the program has ended
            break
        if not part:
            break
        parts.append(part)
    if code := os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]):
        raise SystemExit(f"{command}: exit code {code}")
    return b"".join(parts).decode(errors="replace")


def screen(text: str) -> list[Text]:
    """The lines that a reader has seen, each as it was at last; of a progress bar that was drawn anew again and again,
    the last."""
    lines: list[Text] = []
    for line in text.replace("\r\n", "\n").split("\n"):
        last = re.split(r"\r|\x1b\[2K", line)[-1]
        lines.append(Text.from_ansi(re.sub(r"\x1b\[\?\d+[hl]", "", last)))
    bars = [number for number, line in enumerate(lines) if PROGRESS.match(line.plain)]
    return [line for number, line in enumerate(lines) if line.plain.strip() and number not in bars[:-1]]


def terminal_page(command: str, text: str) -> str:
    """A page with the first lines of the plan and what the terminal shows from the first step on, below the command."""
    lines = screen(text)
    plan, steps = (
        next(number for number, line in enumerate(lines) if line.plain.startswith(words))
        for words in ("Plan", "training to step")
    )
    dots = Text("  …", style="dim")
    console = Console(record=True, width=COLUMNS, force_terminal=True, file=StringIO())
    for line in (Text(f"$ {command}", style="bold"), dots, *lines[plan:][:SHOWN], dots, *lines[steps:]):
        console.print(line, overflow="crop", no_wrap=True)
    return console.export_html(inline_styles=True).replace("</head>", f"{STYLE}</head>")


def main(images: Path, browser: str) -> None:
    """Trains, plans, and photographs the pages."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "examples").symlink_to(ROOT / "examples")
        (folder / "terminal.html").write_text(terminal_page(RUN, shown(RUN, folder)), encoding="utf-8")
        for command in (f"{PLAN} --html plan.html", f"{PLAN} {FOUR_STAGES} --html timetable.html"):
            subprocess.run(shlex.split(command), cwd=folder, check=True, stdout=subprocess.DEVNULL)
        for picture, (page, (width, height)) in PAGES.items():
            flags = ["--headless", "--no-sandbox", "--hide-scrollbars", "--force-device-scale-factor=1"]
            size, path = f"--window-size={width},{height}", (images / f"{picture}.png").absolute()
            subprocess.run([browser, *flags, size, f"--screenshot={path}", f"file://{folder / page}"], check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
