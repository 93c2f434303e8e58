"""The report: one self-contained page for every kind of run, that browsers lay out without overflow or error."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import time
import tomllib
import tracemalloc
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import made
import pytest
import tomli_w

from espalier.recipe.errors import UserError
from espalier.track import page, report
from espalier.track.events import Log
from espalier.track.run_tables import RunTables

_EMPTY = {"meta", "link", "br", "img", "input", "hr"}


class Tidy(HTMLParser):
    """Fails on tags that do not nest."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in _EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def checked(path: Path) -> str:
    """The page without its script, which is ours and the only one that a browser runs."""
    text = path.read_text()
    assert f"script-src '{page.script_hash()}';" in text
    assert text.count("Content-Security-Policy") == text.count(f"<script>{page.script()}</script>") == 1
    text = text.replace(f"<script>{page.script()}</script>", "")
    tidy = Tidy()
    tidy.feed(text)
    assert tidy.open == []
    assert not re.search(r"""(src|href)\s*=\s*["'](?!data:)|url\(|@import|<script""", text), "an outside resource"
    return text


def test_a_finished_run_shows_all_it_has(tmp_path: Path) -> None:
    text = checked(report.write(made.make(tmp_path, 450, resumed=200)))
    for said in (
        "finished", "450", "bits per byte", "Predicted beside measured", "Incidents", "resumed from step 200",
        "Two ranks with one thread each", "heads are 48 wide", "2.13.0+cpu", "def read_lines", "gradients",
        "2 files were skipped",
        "in 2 attempts", "prefers-color-scheme", "width=device-width",
        "peak, per rank: anonymous, shared pages; 20.0 MiB reserved beyond that (fragmentation); "
        "300 MiB of files in the page cache apart",
            "Memory at the peak (anonymous, shared pages)",
    ):  # fmt: skip
        assert said in text, said


@pytest.mark.parametrize("end", ["", "failed", "interrupted"])
@pytest.mark.parametrize("steps", [0, 1, 2, 30])
def test_every_state_and_length_makes_a_page(tmp_path: Path, steps: int, end: str) -> None:
    text = checked(report.write(made.make(tmp_path, steps, end=end)))
    assert (end or "silent") in text
    assert ("No step has been done yet" in text) == (steps == 0)
    if end == "failed":
        assert "the loss was not a number at step 1204" in text


def test_a_folder_with_a_bare_log_makes_a_page(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text('{"event":"step","step":1}\n{"event":"validation","step":1}\n')
    checked(report.write(tmp_path))
    (tmp_path / "events.jsonl").write_text("")
    checked(report.write(tmp_path))


def test_steps_left_out_in_fp16_are_counted(tmp_path: Path) -> None:
    assert "steps left out" not in checked(report.write(made.make(tmp_path, 20)))
    with Log(tmp_path / "events.jsonl") as log:
        log.write("step", step=21, loss=3.0, tokens=4096, seconds=0.7, gradient_norm=float("inf"), skipped=7)
    text = checked(report.write(tmp_path))
    assert re.search(r"steps left out.*?7", text, re.DOTALL) is not None
    assert "gradients too large for fp16" in text


def test_what_others_wrote_is_escaped(tmp_path: Path) -> None:
    folder = made.make(tmp_path, 3, end="")
    with (folder / "events.jsonl").open("a") as file:
        file.write('{"event":"sample","time":1,"step":3,"text":"<script>alert(1)</script>"}\n')
        file.write('{"event":"incident","time":1,"step":3,"what":"<img src=x>","action":""}\n')
    text = checked(report.write(folder))
    assert "&lt;script&gt;" in text


MARKUP = """'"></title></svg><script>alert(1)</script><img src=x onerror=alert(1)>"""


def poisoned(value: Any, keys: bool) -> Any:
    """`value` with markup after every text in it, and after the names of what is counted (with `keys`)."""
    if isinstance(value, dict):
        return {
            key + MARKUP * (keys and isinstance(item, float)): poisoned(item, keys) if key != "event" else item
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [poisoned(item, keys) for item in value]
    return value + MARKUP if isinstance(value, str) else value


def test_no_text_of_a_run_is_markup(tmp_path: Path) -> None:
    """Names, reasons, samples, versions, hosts, classes of traffic, kinds of memory, keys of the recipe: all of it."""
    folder = made.make(tmp_path, 12, end="failed")
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    (folder / "events.jsonl").write_text("".join(json.dumps(poisoned(one, False)) + "\n" for one in lines))
    plan = json.loads((folder / "plan.json").read_text())
    plan = {key: poisoned(value, key in ("layout",)) for key, value in plan.items()}
    for kind in ("terms", "memory_bytes", "sent_bytes"):
        plan["predicted"][kind] = {
            name if name == "peak" else name + MARKUP: value for name, value in plan["predicted"][kind].items()
        }
    (folder / "plan.json").write_text(json.dumps(plan))
    recipe = tomllib.loads((folder / "run.toml").read_text())
    (folder / "run.toml").write_text(tomli_w.dumps({**poisoned(recipe, False), MARKUP: "x"}))
    text = checked(report.write(folder))
    assert text.count("&lt;script&gt;") > 20
    assert "<img" not in text


def test_the_error_is_measured_over_predicted(tmp_path: Path) -> None:
    row = report._row("x", 2.0, 3.0, str)
    assert (row.error, page.signed(row.error)) == (0.5, "+50%")
    assert report._row("x", 0.0, 0.0, str).error == 0.0
    assert report._row("x", None, 1.0, str).error is None


@pytest.mark.parametrize("steps", [30_000, pytest.param(300_000, marks=pytest.mark.slow)])
def test_a_huge_run_is_quick_and_small(tmp_path: Path, steps: int) -> None:
    folder = made.make(tmp_path, steps)
    began = time.process_time()
    with (folder / "events.jsonl").open() as lines:
        for line in lines:
            json.loads(line)
    parsed = time.process_time() - began
    report.write(made.make(tmp_path / "small", 3))  # templates are loaded
    began = time.process_time()
    path = report.write(folder)
    assert time.process_time() - began < 3 * parsed  # 1.0 times; seconds would depend on what else runs
    assert path.stat().st_size < 500_000


def held(folder: Path) -> tuple[int, int, int]:
    """Of a report: events held when its log has been read, points of the longest line, and bytes at the peak."""
    run = RunTables.read(folder)
    events = sum(len(run.newest(kind)) for kind in ("step", "validation", "checkpoint", "incident", "sample", "eval"))
    points = max(len(line.x) for chart in report._plots(run) for line in chart.series)
    tracemalloc.start()
    report.render(RunTables.read(folder))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return events, points, peak


def test_memory_does_not_grow_with_the_steps(tmp_path: Path) -> None:
    """Four times the steps: as many events and points are held, in as many bytes."""
    report.render(RunTables.read(made.make(tmp_path / "first", 3)))  # modules and templates are loaded
    few, many = (held(made.make(tmp_path / str(steps), steps, resumed=2000)) for steps in (10_000, 40_000))
    assert max(few[0], many[0]) < 100
    assert max(few[1], many[1]) <= 1000
    assert many[2] < 1.2 * few[2]
    assert many[2] < 20 * 2**20


def test_spikes_of_a_long_run_stay_on_the_page(tmp_path: Path) -> None:
    with Log(tmp_path / "events.jsonl") as log:
        log.write("run", step=0, steps=5000, ranks=1)
    lines = [{"event": "step", "step": step, "loss": 99.5 if step == 4321 else 1.0} for step in range(1, 5001)]
    with (tmp_path / "events.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    (loss,) = charts_of(report.write(tmp_path).read_text(), "Loss")["series"]
    assert max(loss["high"]) == 99.5
    assert abs(loss["x"][loss["high"].index(99.5)] - 4321) <= 5
    assert max(loss["y"]) < 10


def charts_of(text: str, title: str) -> Any:
    charts = [json.loads(html.unescape(data)) for data in re.findall(r'data-chart="([^"]*)"', text)]
    return next(chart for chart in charts if chart["title"] == title)


def test_the_page_knows_hours_and_attempts(tmp_path: Path) -> None:
    text = report.write(made.make(tmp_path, 450, resumed=200)).read_text()
    (run,) = json.loads(html.unescape(re.findall(r'data-runs="([^"]*)"', text)[0]))
    assert run["resumed"] == [200]
    steps, hours = run["clock"]
    assert steps == list(range(1, 451))
    assert hours == sorted(hours)
    assert hours[-1] == pytest.approx((450 + 37 - 1) * 0.75 / 3600, rel=1e-3)


def test_a_folder_without_a_run_and_one_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a run folder"):
        report.write(tmp_path)
    folder = made.make(tmp_path / "run", 2)
    (folder / report.NAME).mkdir()
    with pytest.raises(UserError, match="Cannot write"):
        report.write(folder)
    assert not (folder / "report.html.tmp").exists()


FRAMES = """<body style="margin:0">{frames}<script>
addEventListener("load", () => {{
  document.title = [...document.querySelectorAll("iframe")].map(f =>
    f.contentDocument.documentElement.scrollWidth + "/" + f.contentWindow.innerWidth + "/" +
    f.contentDocument.querySelectorAll(".chart canvas").length).join(" ");
}});
</script></body>"""


@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed")
def test_a_browser_lays_it_out_without_overflow_or_error(tmp_path: Path) -> None:
    text = report.write(made.make(tmp_path / "run", 450, resumed=200)).read_text()
    widths = (360, 390, 768, 1280)
    frames = "".join(
        f'<iframe style="border:0" width={w} height=900 srcdoc="{html.escape(text)}"></iframe>' for w in widths
    )
    framed = tmp_path / "frames.html"
    framed.write_text(FRAMES.format(frames=frames))
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
               "--hide-scrollbars", "--disable-background-networking", "--disable-component-update", "--disable-sync",
               "--enable-logging=stderr", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom",
               framed.as_uri()]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    found = re.search(r"<title>([^<]*)</title>", done.stdout.split("<iframe")[0] + done.stdout.split("</iframe>")[-1])
    assert found is not None, done.stderr[-2000:]
    assert found[1].split() == [f"{w}/{w}/6" for w in widths]
    assert "CONSOLE" not in done.stderr


READER = """<body><iframe width=1000 height=2000 srcdoc="{page}"></iframe><script>
addEventListener("load", async () => {{
  const w = document.querySelector("iframe").contentWindow, box = w.document.querySelectorAll(".chart")[1];
  const errors = [], rest = () => new Promise(done => setTimeout(done, 50));
  w.addEventListener("error", event => errors.push(event.message));
  const over = () => box.querySelector(".u-over"), words = () => box.querySelector(".tools").textContent;
  const button = name => [...box.querySelectorAll("button")].find(one => one.textContent === name);
  const point = (target, kind, x, y) => {{
    const at = over().getBoundingClientRect();
    const where = {{bubbles: true, clientX: at.left + x, clientY: at.top + y, detail: 1, movementX: 1, movementY: 1}};
    target.dispatchEvent(new w.MouseEvent(kind, where));
  }};
  const hover = async x => {{
    point(over(), "mouseenter", x, 50); point(over(), "mousemove", x, 50); await rest(); return words();
  }};
  const seen = [await hover(60)];
  point(over(), "mousedown", 60, 20); point(over(), "mousemove", 160, 20); point(w.document, "mouseup", 160, 20);
  seen.push(await hover(2));
  button("reset").click(); seen.push(await hover(2));
  button("hours").click(); await rest(); seen.push(await hover(60));
  button("log").click(); await rest(); seen.push(button("log").getAttribute("aria-pressed"));
  button("training").click(); await rest(); seen.push(box.querySelectorAll(".off").length);
  document.title = JSON.stringify([seen, errors]);
}});
</script></body>"""


@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed")
def test_a_reader_points_zooms_and_switches(tmp_path: Path) -> None:
    text = report.write(made.make(tmp_path / "run", 450, resumed=200)).read_text()
    (tmp_path / "reader.html").write_text(READER.format(page=html.escape(text)))
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
               "--disable-background-networking", "--disable-component-update", "--disable-sync",
               "--virtual-time-budget=20000", "--enable-logging=stderr", f"--user-data-dir={tmp_path / 'profile'}",
               "--dump-dom", (tmp_path / "reader.html").as_uri()]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    title = re.search(r"<title>(\[\[[^<]*)</title>", done.stdout)
    assert title is not None, done.stderr[-2000:]
    (pointed, zoomed, reset, hours, log, off), errors = json.loads(html.unescape(title[1]))
    assert errors == []
    step = {
        name: int(re.findall(r"step (\d+)", text)[0]) for name, text in (("a", pointed), ("b", zoomed), ("c", reset))
    }
    assert step["c"] < step["b"]
    assert abs(step["a"] - step["b"]) < 10, "where the zoom begins"
    assert re.search(r"training \d\.\d", pointed)
    assert "hour 0.0" in hours
    assert (log, off) == ("true", 1)
    assert "CONSOLE" not in done.stderr


def test_failures_and_what_they_cost_are_on_the_page(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    with Log(run / "events.jsonl") as log:
        log.write("run", step=0, steps=4)
        for step in (1, 2, 3):
            log.write("step", step=step, loss=1.0, seconds=0.5)
        log.write(
            "incident", kind="killed", what="Rank 1 was killed", why="the system", rank=1, step=3, attempt=0, action="x"
        )
        log.write("run", step=2, steps=4)
        log.write("step", step=3, loss=1.0, seconds=0.5)
        log.write("recovered", kind="killed", rank=1, step=2, attempt=1, seconds=1.25, lost_steps=1, source="disk")
        log.write("end", reason="finished")
    text = report.write(run).read_text()
    assert "goodput" in text
    assert "Time to recover" in text
    assert "1.2 s" in text or "1.25 s" in text
    assert "<small>the system</small>" in text


def graph_run(folder: Path) -> Path:
    """Two attempts of a graph run: a slow one, and one with another plan that is as fast as predicted."""
    recipe = {"name": "graph", "model": {"kind": "gcn"}, "train": {"steps": 40}}
    (folder / "run.toml").write_text(tomli_w.dumps(recipe))
    plan = {"predicted": {"step_seconds": 0.01, "tokens_per_second": 200.0, "mfu": 0.1, "sent_bytes": {}}}
    (folder / "plan.json").write_text(json.dumps(plan))
    with Log(folder / "events.jsonl") as log:
        for first, last, seconds in ((0, 30, 1.0), (30, 40, 0.01)):
            log.write("run", step=first, workload="graph", steps=40)
            for step in range(first + 1, last + 1):
                took = seconds * (3 if step % 3 == 0 else 1)
                log.write("step", step=step, loss=1.0, tokens=2, seconds=took, mfu=0.001 / took, memory=1e6 / took)
            log.write(
                "validation",
                step=last,
                loss=0.3,
                accuracy=0.812,
                f1=0.8,
                test_accuracy=0.797,
                test_f1=0.79,
                test_loss=0.4,
            )
    return folder


def test_the_page_of_a_graph_begins_with_its_metric_and_knows_no_tokens(tmp_path: Path) -> None:
    run = RunTables.read(graph_run(tmp_path))
    figures, plots = report._figures(run), report._plots(run)
    assert figures[:2] == [
        ("accuracy", "0.812", "validation; test 0.797"),
        ("f1", "0.800", "validation; test 0.790"),
    ]
    assert plots[0].title == "Accuracy"
    text = checked(report.write(tmp_path))
    shown = re.sub(r"<style>.*?</style>", "", text, flags=re.DOTALL).lower()
    assert "samples per second" in shown
    assert "token" not in shown


def test_predicted_is_beside_the_latest_attempt_and_tiles_say_the_same(tmp_path: Path) -> None:
    run = RunTables.read(graph_run(tmp_path))
    rows = {row.label: row for row in report._compared(run, run.plan["predicted"])}
    assert rows["Seconds per step"].measured == "10 ms"
    assert rows["Samples per second"].error == pytest.approx(0)
    assert rows["MFU"].error == pytest.approx(0)  # by the same seconds
    tiles = {figure.label: figure.value for figure in report._figures(run)}
    assert tiles["samples per second"] == rows["Samples per second"].measured
    assert tiles["MFU"] == rows["MFU"].measured


def test_loads_of_experts_stand_beside_an_even_share(tmp_path: Path) -> None:
    with Log(tmp_path / "events.jsonl") as log:
        log.write("run", step=0, steps=2, name="mixture", workload="language", parameters=10, ranks=2)
        for step, rows in enumerate(((30, 10), (50, 10)), start=1):
            experts = {str(number): count for number, count in enumerate(rows)}
            waits = {"waited": 0.5, "longest": 2.0}
            log.write("step", step=step, loss=1.0, tokens=8, seconds=1.0, experts=experts, dispatch=waits)
    text = checked(report.write(tmp_path))
    assert re.search(r"<td>0</td><td>40</td><td>1\.60</td>.*<td>1</td><td>10</td><td>0\.40</td>", text, re.DOTALL)
    assert "Ranks wait 500 ms per step" in text
    assert "waits most 2.0 s" in text
