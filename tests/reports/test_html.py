"""The page of a report: what it says, that it is whole by itself, and that nothing in it runs."""

import json
import math
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distdiag.events.base import CallSite, Frame
from distdiag.events.logged import Logged, LossNumbers, MemoryUse
from distdiag.events.updates import OptimizerUpdate, TensorUpdate
from distdiag.findings.finding import Outcome, Report
from distdiag.reports import load_reporter
from tests.reports.browser import browser, needs_browser  # noqa: F401 (a fixture)
from tests.reports.synthetic_run import (
    SyntheticRank,
    make_finding,
    make_report,
    make_run,
    write_healthy,
    write_run,
)

HOSTILE = (
    "</script><script>window.hacked=1</script><img src=x onerror=window.hacked=1>"
    "<!-- {{ 7*7 }} {% raw %} &lt;b&gt; \x1b]0;owned\x07 \u202e \u2028 \ud800 ]]> '\" javascript:1"
)


def page_of(report, run_dir=None):
    return load_reporter("html")(run_dir=run_dir).render(report)


def data_of(page):
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page)
    return json.loads(text)


@pytest.fixture(scope="module", params=[2, 64, 512])
def run(request, tmp_path_factory):
    """A run of so many ranks that hangs, and its page."""
    world = request.param
    root = tmp_path_factory.mktemp(f"run{world}")
    report = write_run(root, world, 12)
    (root / "report.html").write_text(page_of(report, root))
    return world, root / "report.html"


# What the page says.


def test_a_report_without_a_run_directory_has_no_empty_panels():
    page = page_of(make_report(2, 10))
    assert (
        "1 error, 1 warning, 1 note: rank 1 left the loop early: it is in barrier (COL011); "
        in page
    )
    assert not re.findall(r'<section id="(lanes|matrix|waits|stacks|curves|routing|memory)"', page)
    assert page.count("<article") == 3


def test_a_clean_run_says_so():
    report = Report(complete=True, run=make_run(2, Outcome.FINISHED), checked=("COL001",))
    page = page_of(report)
    assert "OK: 1 check looked, nothing found; the run finished" in page
    assert "provisional" not in page
    assert "provisional" in page_of(make_report(2, 10).__class__(run=report.run))


def test_the_page_needs_nothing_from_anywhere():
    page = page_of(make_report(2, 10))
    links = re.findall(r'(?:src|href)\s*=\s*"([^"]*)"', page)
    assert all(link.startswith("#") or link == "data:," for link in links)
    assert set(re.findall(r"url\(([^)]*)\)", page)) <= {"#arrow"}
    assert "@import" not in page and "://" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "default-src 'none'" in page


def test_the_first_difference_and_who_waits_for_whom_are_found(tmp_path):
    report = write_run(tmp_path, 4, 10, calls=3)
    data = data_of(page_of(report, tmp_path))
    (matrix,) = data["matrices"]
    assert matrix["first"] == 28  # the last rank made 9 steps of 3 calls, then went to a barrier
    assert matrix["columns"] == ["ranks 0-2", "rank 3"]
    (row,) = [row for row in matrix["rows"] if row["number"] == 28]
    assert [cell["is_odd"] for cell in row["cells"]] == [False, True]
    assert row["cells"][1]["place"] == "train.py:60"
    pairs = {(edge["source"], edge["target"]) for edge in data["waits"]["edges"]}
    names = [node["ranks"] for node in data["waits"]["nodes"]]
    assert {(names[a], names[b]) for a, b in pairs} == {
        ("ranks 0-2", "rank 3"),
        ("rank 3", "ranks 0-2"),
    }


def test_equal_ranks_have_no_difference_and_nobody_waits(tmp_path):
    report = write_healthy(tmp_path, 3, 5)
    data = data_of(page_of(report, tmp_path))
    assert [matrix["first"] for matrix in data["matrices"]] == [-1]
    assert data["waits"] is None
    assert all(bar[0] != 2 for lane in data["lanes"]["lanes"] for bar in lane["bars"])


def test_lanes_hold_the_end_of_the_run_and_curves_its_numbers(tmp_path):
    report = write_run(tmp_path, 2, 10)
    data = data_of(page_of(report, tmp_path))
    lanes = data["lanes"]["lanes"]
    assert [lane["rank"] for lane in lanes] == [1, 0]  # the culprit first
    waits = [bar for lane in lanes for bar in lane["bars"] if bar[0] == 2]
    assert len(waits) == 2 and all(
        start + length == data["lanes"]["length"] for _, start, length, *_ in waits
    )
    titles = [chart["title"] for chart in data["charts"]]
    assert titles == ["loss", "duration of a step"]
    assert len(data["charts"][0]["curves"][0]["points"]) == 10
    assert data["usages"][0]["by_rank"] == [[0, 300 << 20], [1, 301 << 20]]
    assert [tree["thread"] for tree in data["trees"]] == ["MainThread"]


def test_what_a_program_logs_is_drawn(tmp_path):
    folder = tmp_path / "attempt-0"
    folder.mkdir()
    for rank in range(2):
        writer = SyntheticRank(folder, rank, 2)
        for step in range(20):
            loss = math.nan if step == 7 else 2.0 - step / 20
            values = (("acc", step / 20), ("train/loss", loss))
            writer.event(Logged, 10**9 + step, step, logger="log", values=values, logged_step=step)
            numbers = {"loss": 2.0, "is_coarse": False, "rate": 0.1}
            writer.event(LossNumbers, 10**9 + step, step, **numbers)
            use = {"memory": "host", "used_bytes": (step + 1) << 28, "limit_bytes": 1 << 40}
            writer.event(MemoryUse, 10**9 + step, step, **use)
    data = data_of(page_of(make_report(2, 10), tmp_path))
    charts = {chart["title"]: chart for chart in data["charts"]}
    assert list(charts) == [
        "loss that a backward pass began with",
        "logged: train/loss",
        "logged: acc",
        "memory of the process",
    ]
    points = charts["logged: train/loss"]["curves"][1]["points"]
    assert points[7] == [7, None] and points[8] == [8, 1.6]


def test_what_steps_do_to_weights_is_drawn(tmp_path):
    folder = tmp_path / "attempt-0"
    folder.mkdir()
    site = CallSite((Frame("train.py", 7, "main"),))
    writer = SyntheticRank(folder, 0, 1)
    for number in range(3):
        figures = {"num_sampled": 100, "num_unchanged": 25, "weight": 2.0, "gradient_norm": 3.0}
        tensors = (
            TensorUpdate("w", "float32", "float32", 100, 0.1, update=0.02, **figures),
            TensorUpdate("of an unknown kind", "float32", "float32", 100, 0.1, **figures),
            TensorUpdate("without a gradient", "float32", "float32", 100, 0.1),
        )
        about = {"optimizer": "AdamW", "model": "M", "rate": 0.1, "full_rate": 0.1, "site": site}
        writer.event(OptimizerUpdate, 10**9, number, number=number, tensors=tensors, **about)
    charts = data_of(page_of(make_report(1, 3), tmp_path))["charts"]
    found = {chart["title"]: chart["curves"][0]["points"][-1] for chart in charts}
    assert found == {
        "AdamW: gradient norm at the step": [2, 4.24264],
        "AdamW: share of weights that the step left as they were": [2, 0.25],
        "AdamW: size of the update, of that of the weights": [2, 0.01],
    }


def test_damaged_files_are_named_and_the_rest_is_shown(tmp_path):
    report = write_run(tmp_path, 2, 10)
    (path,) = (tmp_path / "attempt-0").glob("rank-0.*")
    path.write_bytes(b"garbage" * 100)
    (tmp_path / "attempt-0" / "monitor.journal").write_bytes(b"\xff" * 99)
    page = page_of(report, tmp_path)
    assert "is not an event file of this version of distdiag" in page
    assert [lane["rank"] for lane in data_of(page)["lanes"]["lanes"]] == [1]


# Whatever stands in a report is text.


def test_hostile_strings_end_up_as_text(tmp_path):
    report = write_run(tmp_path, 2, 10, text="</script><b>&")
    page = page_of(report, tmp_path)
    scripts = re.findall(r"<script[^>]*>", page)
    assert scripts == ['<script type="application/json" id="data">', "<script>"]
    assert page.count("</script>") == 2
    assert "<b>" not in page
    assert data_of(page)["matrices"][0]["group"] == "default_pg</script><b>&"


def test_endless_strings_are_cut():
    text = "x" * 10_000_000 + "the end"
    page = page_of(
        Report(
            run=make_run(2, Outcome.FAILED, text=text),
            findings=(make_finding(text=text),),
            not_checked={text: text},
        )
    )
    assert len(page) < 400_000
    assert "the end" in page


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.text(st.characters(), max_size=60))
def test_no_string_leaves_its_place(text):
    report = make_report(2, 10, text)
    page = page_of(report)
    page.encode()  # no half of a surrogate pair is left
    assert len(re.findall(r"<script[^>]*>", page)) == 2
    assert page.count("<article") == 3
    assert all(line.isprintable() for line in page.split("\n"))


# In a real browser.


@needs_browser
def test_a_page_opens_whole_and_quietly(run, browser):  # noqa: F811
    world, path = run
    browser.problems.clear()
    browser.requests.clear()
    browser.open(path)
    assert browser.text("h1").startswith("1 error, 1 warning, 1 note: ")
    assert browser.run("document.documentElement.dataset.ready") == "yes"
    assert browser.problems == []
    assert {url.split(":")[0] for url in browser.requests} <= {"file", "data"}
    assert browser.count("article.finding") == 3
    views = ["lanes", "matrix", "waits", "stacks", "curves", "memory"]
    assert (
        browser.run(
            f"{json.dumps(views)}.filter((id) => !document.getElementById(`${{id}}-view`)"
            ".childElementCount)"
        )
        == []
    )
    assert "differ at #45" in browser.text("#matrix-view")
    assert f"rank {world - 1}" in browser.text("#waits-view")
    assert browser.run("document.documentElement.scrollWidth <= window.innerWidth")


@needs_browser
def test_findings_are_searched_and_filtered(run, browser):  # noqa: F811
    browser.open(run[1])
    browser.press("/")
    assert browser.run("document.activeElement.id") == "search"
    browser.ask("Input.insertText", text="SAME dat001")
    assert browser.count("article.finding") == 1
    assert browser.text("#shown") == "1 of 3 shown"
    browser.ask("Input.insertText", text=" nowhere")
    assert browser.count("article.finding") == 0
    assert browser.count("#no-match") == 1
    browser.run("document.getElementById('search').value = ''")
    browser.press("Escape")
    browser.click("input[value=error]")
    assert browser.count("article.finding") == 2
    browser.click("input[value=error]")
    assert browser.count("article.finding") == 3


@needs_browser
def test_keys_lead_through_the_findings(run, browser):  # noqa: F811
    browser.open(run[1])

    def focused():
        return browser.run("document.activeElement.id")

    seen = []
    for key in "jjjjk":
        browser.press(key)
        seen.append(focused())
    assert seen == [f"finding-{number}" for number in (1, 2, 3, 3, 2)]
    assert not browser.run("document.querySelector('#finding-2 details').open")
    browser.press("Enter")
    assert browser.run("document.querySelector('#finding-2 details').open")
    browser.press("?")
    assert browser.run("document.getElementById('help').open")
    browser.press("j")
    browser.click("#help button")
    assert not browser.run("document.getElementById('help').open")


@needs_browser
def test_it_is_dark_or_light_as_one_likes(run, browser):  # noqa: F811
    def ground():
        return browser.run("getComputedStyle(document.body).backgroundColor")

    features = [{"name": "prefers-color-scheme", "value": "dark"}]
    browser.ask("Emulation.setEmulatedMedia", features=features)
    browser.open(run[1])
    assert ground() == "rgb(20, 24, 29)"
    browser.click("#theme")
    assert ground() == "rgb(255, 255, 255)"
    browser.press("t")
    assert ground() == "rgb(20, 24, 29)"
    features[0]["value"] = "light"
    browser.ask("Emulation.setEmulatedMedia", features=features)


@needs_browser
def test_lanes_tell_what_is_under_the_pointer_and_zoom(run, browser):  # noqa: F811
    browser.open(run[1])
    browser.run("document.getElementById('lanes').scrollIntoView({behavior: 'instant'})")
    browser.hover("#lanes-view canvas", 0.99, 30)
    assert "waits for" in browser.text("#lanes-view .tip")
    assert "at train.py:60" in browser.text("#lanes-view .tip")
    before = browser.run("document.querySelector('#lanes-view canvas').toDataURL()")
    browser.click("#lanes-view button[title='Zoom in']")
    assert browser.run("document.querySelector('#lanes-view canvas').toDataURL()") != before
    assert browser.problems == []


@needs_browser
def test_hostile_strings_do_nothing(tmp_path, browser):  # noqa: F811
    report = write_run(tmp_path, 2, 10, text=HOSTILE.replace("\ud800", ""))
    hostile = make_finding(text=HOSTILE)
    path = tmp_path / "report.html"
    path.write_text(page_of(Report(run=report.run, findings=(hostile,)), tmp_path))
    browser.problems.clear()
    browser.requests.clear()
    browser.open(path)
    assert browser.run("window.hacked ?? 0") == 0
    assert browser.problems == []
    assert {url.split(":")[0] for url in browser.requests} <= {"file", "data"}
    assert browser.count("img") == 0
    assert "<img src=x onerror=window.hacked=1>" in browser.text("article .fix")
    assert "<img src=x onerror=window.hacked=1>" in browser.text("#matrix-view")


@needs_browser
def test_text_can_be_read_on_its_ground(run, browser):  # noqa: F811
    """Contrast of at least 4.5, as WCAG 2.1 (AA) asks of text, in both schemes."""
    code = """
    (() => {
      const light = (text) => {
        const parts = text.match(/[\\d.]+/g).slice(0, 3).map((part) => part / 255)
          .map((part) => part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
      };
      const ground = (each) => {
        while (each) {
          const color = getComputedStyle(each).backgroundColor;
          if (!color.endsWith(", 0)")) return color;
          each = each.parentElement;
        }
        return "rgb(255, 255, 255)";
      };
      const poor = [];
      for (const each of document.querySelectorAll("body *")) {
        const own = [...each.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
        if (!own || !each.checkVisibility() || each.closest("svg, script, button")) continue;
        const pair = [light(getComputedStyle(each).color), light(ground(each))];
        const [a, b] = pair.sort((x, y) => y - x);
        if ((a + 0.05) / (b + 0.05) < 4.5) poor.push(`${each.tagName}.${each.className}`);
      }
      return [...new Set(poor)];
    })()
    """
    browser.open(run[1])
    for _ in range(2):
        assert browser.run(code) == []
        browser.press("t")
