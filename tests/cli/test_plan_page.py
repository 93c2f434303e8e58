"""The picture of a plan: one self-contained page, whatever was priced, that also fits a phone."""

from __future__ import annotations

import html
import itertools
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest

from espalier.cli import plan_page
from espalier.plan.base import Layout, Plan, Predicted, Rank, RunnerUp, Stage
from espalier.recipe.errors import UserError
from espalier.recipe.units import show_seconds, show_size
from espalier.track import charts
from espalier.track import page as pages
from espalier.track.charts import Point

GIB = 2.0**30
VOID = {"meta", "link", "br", "img", "hr"}


def Priced(
    seconds: float,
    peak_bytes: float,
    fits: bool = True,
    label: str = "dp 8",
    algorithm: str = "data",
    chosen: bool = False,
    frontier: bool = False,
) -> Point:
    return Point(seconds, peak_bytes, fits, label, algorithm, chosen, frontier)


PREDICTED = Predicted(
    step_seconds=4.31,
    tokens_per_second=97_400.0,
    tokens_per_second_per_device=12_175.0,
    mfu=0.437,
    terms={"forward": 1.4, "backward": 2.6, "all_reduce": 0.3, "optimizer": 0.01, "send": 0.0},
    memory_bytes={"params": 12.6 * GIB, "activations": 30.1 * GIB, "slack": 4.27 * GIB, "peak": 46.97 * GIB},
    memory_limit=72.7 * GIB,
    sent_bytes={"gradients": 1e9},
    spread=0.25,
    sources={"forward": "products on an A100", "all_reduce": "a ring & its hops"},
)
PLAN = Plan(
    planner="search",
    ranks=tuple(Rank(device=f"cuda:{slot}") for slot in range(8)),
    predicted=PREDICTED,
    why=("States are replicated: they fit.", "See `espalier explain amsp`."),
    runners_up=(RunnerUp(Layout(dp=2, pp=4), 8, 1, 4.77, 21.3 * GIB, "10.7% slower"),),
)
BEST = Priced(4.31, 46.97 * GIB, label="the plan", chosen=True, frontier=True)


def many(count: int) -> list[Priced]:
    """`count` layouts of all algorithms, a third of which do not fit, with the plan among them."""
    made = [
        Priced(
            4.4 + (index * 37 % 101) * 0.3,
            (3 + index * 53 % 997 * 0.11) * GIB,
            (3 + index * 53 % 997 * 0.11) < 72.7,
            f"layout {index}",
            list(plan_page.NAMES)[index % 4],
        )
        for index in range(count - 1)
    ]
    return [*made, BEST]


class Page(HTMLParser):
    """Fails on tags that do not nest; keeps attributes by tag and what text there is."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] not in (["style"], ["script"]):
            self.words.append(data)

    @property
    def said(self) -> str:
        return " ".join(" ".join(self.words).split())


def page(tmp_path: Path, plan: Plan = PLAN, points: list[Any] | None = None, title: str = "A title") -> Page:
    target = tmp_path / "plan.html"
    plan_page.write(target, plan, [BEST] if points is None else points, title)
    text = target.read_text(encoding="utf-8")
    assert text.count(pages.script()) == 1
    others = text.replace(f"<script>{pages.script()}</script>", "")
    assert not re.search(r"""<script|@import|url\(|https?:""", others), "not self-contained"
    assert f"script-src '{pages.script_hash()}'" in others
    found = Page(text)
    for tag, attributes in found.tags:
        for name in ("href", "src"):
            assert (attributes.get(name) or "#").startswith(("#", "data:")), (tag, attributes)
        assert not any(name.startswith("on") for name in attributes), (tag, attributes)
    return found


def picture(found: Page) -> dict[str, Any]:
    """What the script of a page draws as the picture; empty without one."""
    drawn = [json.loads(str(attributes["data-chart"])) for _, attributes in found.tags if "data-chart" in attributes]
    return drawn[0] if drawn else {}


def marks(found: Page) -> list[Point]:
    return [Point(*point) for point in picture(found).get("points", ())]


def test_the_page_holds_every_number_and_reason(tmp_path: Path) -> None:
    said = page(tmp_path, points=many(50)).said
    numbers = [show_seconds(value) for value in PREDICTED.terms.values() if value]
    numbers += [show_size(value) for value in PREDICTED.memory_bytes.values()]
    numbers += [show_size(PREDICTED.memory_limit), "4.3 s", "43.7%", "12.2 k", "50 layouts"]
    for text in (
        *numbers,
        "States are replicated: they fit.",
        "10.7% slower",
        "4 stages",
        "8 GPUs",
        "a ring & its hops",
    ):
        assert text in said, text
    assert "send" not in said.split("Memory")[0].split("Where the seconds")[1], "a part of no seconds is no part"


def test_the_band_is_the_spread_by_factors_and_absent_where_not_known(tmp_path: Path) -> None:
    assert f"{show_seconds(4.31 / 1.25)} to {show_seconds(4.31 * 1.25)}" in page(tmp_path).said
    plain = msgspec.structs.replace(PLAN, predicted=msgspec.structs.replace(PREDICTED, spread=0.0))
    assert "four of five" not in page(tmp_path, plain).said


def test_what_does_not_fit_says_what_is_missing(tmp_path: Path) -> None:
    assert "does not fit" not in page(tmp_path).said
    lacking = msgspec.structs.replace(PLAN, executable=False, missing="3 GiB of memory per rank")
    said = page(tmp_path, lacking).said
    assert "does not fit" in said
    assert "3 GiB of memory per rank" in said


def test_labels_and_titles_are_escaped(tmp_path: Path) -> None:
    evil = "<img src=x onerror=1>&\"'"
    plan = msgspec.structs.replace(PLAN, why=(evil,), missing=evil, executable=False)
    found = page(tmp_path, plan, [BEST, BEST._replace(label=evil, chosen=False, algorithm=evil)], evil)
    assert "img" not in {tag for tag, _ in found.tags}
    assert found.said.count(evil) >= 4
    assert [mark.label for mark in marks(found)].count(evil) == 1


def test_one_point_and_none_make_a_page(tmp_path: Path) -> None:
    assert len(marks(page(tmp_path))) == 1
    assert marks(page(tmp_path, points=[])) == []
    nothing = [BEST._replace(seconds=float("inf"), fits=False), BEST._replace(peak_bytes=float("nan"))]
    assert marks(page(tmp_path, points=nothing)) == []


@pytest.mark.parametrize("limit", [30.0, 46.97, 72.7])
def test_the_limit_stands_where_the_peak_says(tmp_path: Path, limit: float) -> None:
    tight = msgspec.structs.replace(PLAN, predicted=msgspec.structs.replace(PREDICTED, memory_limit=limit * GIB))
    memory = plan_page._memory(tight.predicted)
    assert memory["limit_at"] / memory["peak_width"] == pytest.approx(limit / 46.97)
    assert max(memory["limit_at"], memory["peak_width"]) < 98
    assert ("too much" in page(tmp_path, tight).said) == (limit < 46.97)


def test_no_limit_draws_no_line(tmp_path: Path) -> None:
    plain = msgspec.structs.replace(PLAN, predicted=msgspec.structs.replace(PREDICTED, memory_limit=float("inf")))
    assert picture(page(tmp_path, plain, many(30)))["limit"] is None
    assert picture(page(tmp_path, points=many(30)))["limit"] == 72.7 * GIB


def test_thousands_of_points_are_thinned_but_the_plan_and_the_front_stay(tmp_path: Path) -> None:
    points = many(5000)
    front = [Priced(4.32 + 0.2 * k, (40 - k) * GIB, True, f"front {k}", "isp", frontier=True) for k in range(30)]
    found = page(tmp_path, points=[*points, *front])
    assert (tmp_path / "plan.html").stat().st_size < 300_000
    assert 200 < len(marks(found)) <= charts.MOST + 31
    assert sum(mark.chosen for mark in marks(found)) == 1
    assert sum(mark.frontier and not mark.chosen for mark in marks(found)) == 30
    assert {mark.algorithm for mark in marks(found)} == {"data", "megatron", "fsp", "isp"}
    assert "5,030 layouts" in found.said
    assert {f"front {k}" for k in range(30)} <= {mark.label for mark in marks(found)}


def test_marks_stand_in_order_of_seconds_and_bytes(tmp_path: Path) -> None:
    points = [Priced(4.0 * 1.1**k, (4 + 3 * k) * GIB, True, str(k), "fsp") for k in range(12)]
    found = marks(page(tmp_path, points=points[::-1]))
    assert found == points


def test_layouts_far_from_what_matters_are_counted_not_drawn(tmp_path: Path) -> None:
    far = [Priced(60.0, 40 * GIB, label="slow"), Priced(5.0, 600 * GIB, False, "large")]
    found = page(tmp_path, points=[BEST, *far])
    assert marks(found) == [BEST]
    assert "Not drawn: 2 more" in found.said


def test_parts_follow_one_another_and_fill_the_whole() -> None:
    rungs = plan_page._ladder(PREDICTED.terms, sum(PREDICTED.terms.values()), show_seconds, PREDICTED.sources)
    assert [rung.name for rung in rungs] == ["backward", "forward", "all reduce", "optimizer"]
    for before, after in itertools.pairwise(rungs):
        assert after.start == pytest.approx(before.start + before.width)
    assert rungs[-1].start + rungs[-1].width == pytest.approx(100)
    assert rungs[2].source == "a ring & its hops"


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for target in (tmp_path / "folder", tmp_path / "none" / "plan.html"):
        with pytest.raises(UserError, match="Cannot write") as refused:
            plan_page.write(target, PLAN, [BEST], "x")
        assert "--html" in str(refused.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder"]


@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed")
def test_a_browser_lays_it_out_without_overflow_or_error(tmp_path: Path) -> None:
    plan_page.write(tmp_path / "plan.html", PLAN, many(400), "LLaMA-7B on eight GPUs")
    text, widths = (tmp_path / "plan.html").read_text(encoding="utf-8"), (360, 390, 1280)
    frames = "".join(
        f'<iframe style="border:0" width={w} height=900 srcdoc="{html.escape(text)}"></iframe>' for w in widths
    )
    (tmp_path / "frames.html").write_text(
        f"""<body style="margin:0">{frames}<script>addEventListener("load", () => {{
        document.title = [...document.querySelectorAll("iframe")].map(f => {{
          const page = f.contentDocument, canvas = page.querySelectorAll(".chart canvas");
          return page.documentElement.scrollWidth + "/" + f.contentWindow.innerWidth + "/" + canvas.length;
        }}).join(" "); }});</script></body>""",
        encoding="utf-8",
    )
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
               "--hide-scrollbars", "--disable-background-networking", "--disable-component-update", "--disable-sync",
               "--enable-logging=stderr", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom",
               (tmp_path / "frames.html").as_uri()]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    found = re.search(r"<title>([^<]*)</title>", done.stdout.split("<iframe")[0] + done.stdout.split("</iframe>")[-1])
    assert found is not None, done.stderr[-2000:]
    assert found[1].split() == [f"{w}/{w}/1" for w in widths]
    assert "CONSOLE" not in done.stderr


@pytest.mark.parametrize(("schedule", "interleave"), [("1f1b", 1), ("1f1b", 2), ("zero_bubble", 1)])
def test_a_plan_with_stages_shows_the_timetable_of_a_step(schedule: str, interleave: int) -> None:
    places, layers = 4, 8
    count = places * interleave
    stages = tuple(
        Stage(
            ranks=(2 * (stage % places), 2 * (stage % places) + 1),
            layers=(layers * stage // count, layers * (stage + 1) // count),
            micro_batches=6,
        )
        for stage in range(count)
    )
    plan = msgspec.structs.replace(PLAN, stages=stages, schedule=schedule, interleave=interleave)
    shown = plan_page.render(plan, [BEST], "a plan")
    assert "One step, rank by rank" in shown
    passes = 3 if schedule == "zero_bubble" else 2
    assert len(re.findall(r'<i class="s\d" style="left', shown)) == passes * 6 * count
    assert "stage 0, micro-batch 5: backward" in shown
    assert shown.count(">rank ") == places
    starts = [float(one) for one in re.findall(r'<i class="s\d" style="left:([\d.]+)%', shown)]
    assert min(starts) == 0
    assert max(starts) < 100


def test_a_plan_of_whole_models_shows_no_timetable() -> None:
    assert "rank by rank" not in plan_page.render(PLAN, [BEST], "a plan")
