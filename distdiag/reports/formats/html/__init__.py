"""The report as one page for a browser: what was found, and pictures of what the ranks did."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib.resources import files
from typing import Any, ClassVar, Final

import msgspec

from distdiag.findings.finding import Report
from distdiag.reports.base import Reporter
from distdiag.reports.folding import said_once
from distdiag.reports.formats.html.pictures import Pictures, pictures_of
from distdiag.reports.formats.html.texts import (
    MOST_FINDINGS,
    file_texts,
    finding_texts,
    gap_texts,
    rank_texts,
    run_texts,
    safe,
)
from distdiag.reports.recording import Bounds, Recording, read_recording
from distdiag.reports.words import by_severity, counts, coverage, ending_of, silence, verdict

BOUNDS: Final = Bounds(300_000, 20_000, fewest_of_a_rank=400)
"""So many events are read: 1.2 s of one core at 4 us each, measured on 2 GHz."""
SCRIPTS: Final = ("findings.js", "lanes.js", "matrix.js", "graphs.js", "charts.js")

PANELS: Final = (
    (
        "lanes",
        "Time",
        "One lane for each rank. Point at a bar to read what it is; zoom with the buttons, with "
        "Ctrl and the wheel, or with + and - when the lanes have the focus.",
    ),
    (
        "matrix",
        "Collectives",
        "What each rank called, by the number of the collective in its process group.",
    ),
    ("waits", "Waits", "Who waits for whom. A red border marks those that wait for nobody."),
    (
        "stacks",
        "Stacks",
        "The stacks of all ranks as one tree, the outermost frame first; frames of the program "
        "itself are bold.",
    ),
    ("curves", "Curves", "What the run recorded of its steps, one line for each rank."),
    ("routing", "Experts", "How the routers spread tokens over experts."),
    ("memory", "Memory", "What each rank used when it was looked at from outside."),
)
"""Which pictures there are, their titles, and how to read them."""


class HtmlReporter(Reporter):
    """Write one page that needs nothing but a browser."""

    name = "html"
    file_name: ClassVar[str] = "report.html"
    is_slow: ClassVar[bool] = True

    def render(self, report: Report) -> str:
        """Return the whole page. What stands in the report is text there, whatever it holds."""
        # Imported here: who asks for no page need not wait for it.
        from jinja2 import Environment, StrictUndefined
        from markupsafe import Markup

        report = msgspec.structs.replace(report, findings=tuple(said_once(report.findings)))
        recording = read_recording(self.run_dir, BOUNDS)
        pictures = pictures_of(report, recording)
        environment = Environment(
            autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
        )
        template = environment.from_string(_page("report.html.jinja"))
        style, script = _page("style.css"), "\n".join(_page(name) for name in SCRIPTS)
        page = template.render(
            style=Markup(style),  # ours, as the script and the JSON without HTML in it
            style_hash=_hash(style),
            script=Markup(script),
            script_hash=_hash(script),
            data=Markup(pictures.to_json()),
            **_texts(report, recording, pictures),
        )
        return page + "\n"


def _texts(report: Report, recording: Recording, pictures: Pictures) -> dict[str, Any]:
    findings = by_severity(report.findings)
    shown = [finding_texts(finding) for finding in findings[:MOST_FINDINGS]]
    words = [finding["severity"] for finding in shown]
    panels = [panel for panel in PANELS if _is_drawn(panel[0], pictures)]
    ranks = rank_texts(report)
    sections = [(name, title) for name, title, _ in panels]
    sections += [("ranks", "Ranks")] if ranks else []
    is_provisional = not report.complete
    result = verdict(report)
    return {
        "verdict": {"level": result.level, "text": safe(result.text, 300)},
        "silence": safe(silence(report), 600),
        "provisional": "the reporter was ended early, or still runs" if is_provisional else "",
        "run": list(run_texts(report)),
        "findings": shown,
        "findings_left_out": len(findings) - len(shown),
        "severities": [(word, words.count(word)) for word in dict.fromkeys(words)],
        "nothing": f"{counts(findings) or 'Nothing was found'}; {ending_of(report)}.",
        "panels": panels,
        "sections": sections,
        "ranks": ranks,
        "files": file_texts(report),
        "next_time": [safe(sentence) for sentence in report.next_time],
        "coverage": safe(coverage(report, is_whole=True, most=20)),
        "problems": [safe(problem, 600) for problem in recording.problems[:20]],
        "gaps": gap_texts(report),
        "checked": safe(", ".join(report.checked), 8000),
    }


def _is_drawn(name: str, pictures: Pictures) -> bool:
    drawn = {
        "lanes": pictures.lanes,
        "matrix": pictures.matrices,
        "waits": pictures.waits,
        "stacks": pictures.trees,
        "curves": pictures.charts,
        "routing": pictures.routing,
        "memory": pictures.usages,
    }
    return bool(drawn[name])


@cache
def _page(name: str) -> str:
    return (files(__package__) / "page" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """Return what the page's policy lets run: this text and no other."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
