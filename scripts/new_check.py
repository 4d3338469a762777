#!/usr/bin/env python3
"""Scaffold a check: its source file, its test file and its row in docs/checks.md.

``--view VIEW``: on a view that exists. ``--fact NAME``: on a new fact, with its event, probe and
aligner.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROW = re.compile(r"^\| (?P<code>[A-Z]{3}\d{3}) \| (?P<name>\S+) \|.*$", re.MULTILINE)
KEBAB = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")

CHECK = '''"""{code}: SAY THE DEFECT IN ONE SENTENCE."""

from __future__ import annotations

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.findings.finding import Finding, Severity
from {view_module} import {view}


class {class_name}(Check[{view}]):
    """Say the defect in one sentence.

    ## What you see
    Say what the run does, and what that costs.

    ## Example
        wrong()  # wrong
        right()  # right

    ## How to fix
    Say what to change, and where.

    Changes: Say what else the fix changes.

    Leaves: Say what it does not mend.

    ## When it is not a defect
    Say what to look at if the program is right. Then `ignore = ["{code}"]` in the configuration.

    ## References
    - Link the page that states the rule.
    """

    code = "{code}"
    name = "{name}"
    severity = Severity.ERROR

    def check(self, view: {view}) -> Iterator[Finding]:
        """Say what is compared."""
        yield from ()
'''

TEST = """from __future__ import annotations

import pytest

from distdiag.checks.{family}.{stem} import {class_name}


def test_{stem}_names_the_culprit():
    pytest.fail(f"{{{class_name}.code}} needs a view that has the defect")


def test_a_correct_view_is_silent():
    pytest.fail(f"{{{class_name}.code}} needs the nearest view that is correct")
"""

EVENT = '''"""What is observed of {fact_words}."""

from __future__ import annotations

from distdiag.events.base import CallSite, Event


class {fact_class}(Event, frozen=True, kw_only=True):
    """Say what one rank saw, at which moment."""

    value: str
    site: CallSite
'''

PROBE = '''"""Observes {fact_words}."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from distdiag.probes.base import Probe
from distdiag.probes.catalogue import ProbeSpec, Wiring


class {fact_class}Probe(Probe):
    """Say what is written down, and when."""

    name: ClassVar[str] = "{fact}"

    def _install(self) -> None:
        raise NotImplementedError("wrap what the program calls: see docs/adding-a-check.md")


def _make(wiring: Wiring) -> Sequence[Probe]:
    return [{fact_class}Probe(wiring.recorder)]


PROBES = (ProbeSpec("{fact}", ("torch",), _make),)
'''

ALIGNER = '''"""Puts {fact_words} of all ranks side by side."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from distdiag.checks.{family}.{stem} import {view}
from distdiag.engine.aligner import Aligner, Gap, Job, NothingThere
from distdiag.events.base import Event
from distdiag.events.{fact_stem} import {fact_class}
from distdiag.views.base import View

_NONE: Final = NothingThere("{fact_words}", "there were no {fact_words}")


class {fact_class}Aligner(Aligner):
    """Shows what all ranks have reported last."""

    needs = ({fact_class},)
    builds = ({view},)

    def __init__(self, job: Job) -> None:
        """No rank has reported anything."""
        super().__init__(job)
        self._last: dict[int, {fact_class}] = {{}}

    def feed(self, event: Event) -> Iterable[View]:
        """Take in what one rank has reported."""
        assert isinstance(event, {fact_class})
        self._last[event.rank] = event
        return ()

    def end(self) -> Iterator[View]:
        """Compare what is last when the run is over: before, ranks are not in step."""
        if self._last.keys() >= set(self.job.world):
            yield {view}(dict(sorted(self._last.items())))

    def gaps(self) -> Mapping[type[View | Event], Gap]:
        """Say whether any rank has reported something."""
        return {{}} if self._last else {{{view}: _NONE}}
'''

VIEW = '''@dataclass(frozen=True, slots=True)
class {view}(View):
    """What each rank has reported last, where all ranks have."""

    by_rank: Mapping[int, {fact_class}]


'''


def rows_with(table: str, code: str, name: str, since: str) -> str:
    """Return docs/checks.md with a row for the new check, in the order of codes."""
    row = f"| {code} | {name} | Say the defect in one sentence. | {since} |"
    for match in ROW.finditer(table):
        if match["code"] > code:
            return f"{table[: match.start()]}{row}\n{table[match.start() :]}"
    return f"{table.rstrip()}\n{row}\n"


def problem_with(code: str, name: str, table: str, root: Path, fact: str = "") -> str | None:
    """Return in one line why this code, name or fact cannot be taken, or None."""
    if not re.fullmatch(r"[A-Z]{3}\d{3}", code):
        return f"code {code!r} is not three capital letters and three digits, like COL013"
    if not KEBAB.fullmatch(name):
        return f"name {name!r} is not the defect in kebab-case, like collective-shape-mismatch"
    if fact and not KEBAB.fullmatch(fact):
        return f"fact {fact!r} is not in kebab-case, like default-dtypes"
    for match in ROW.finditer(table):
        if match["code"] == code:
            return f"code {code} is taken by {match['name']}; a code never changes its meaning"
        if match["name"] == name:
            return f"name {name} is taken by {match['code']}"
    stem, family = name.replace("-", "_"), code[:3].lower()
    if not (root / "distdiag" / "checks" / family / "__init__.py").exists():
        return f"there is no family {code[:3]}: docs/checks.md lists them"
    paths = [f"distdiag/checks/{family}/{stem}.py", f"tests/checks/{family}/test_{stem}.py"]
    if fact:
        fact_stem = fact.replace("-", "_")
        folders = [f"distdiag/{part}/{fact_stem}" for part in ("events", "probes", "engine")]
        paths += [*folders, *(f"{folder}.py" for folder in folders)]
    return next((f"{path} exists already" for path in paths if (root / path).exists()), None)


def module_of(view: str, root: Path) -> str | None:
    """Return the module of distdiag/views that defines a view, or None."""
    for path in sorted((root / "distdiag" / "views").glob("*.py")):
        # A part of a view may be called so too, but derives from nothing.
        if re.search(rf"^class {re.escape(view)}\(", path.read_text(), re.MULTILINE):
            return f"distdiag.views.{path.stem}"
    return None


def scaffold(code: str, name: str, root: Path, *, view: str = "", fact: str = "") -> list[Path]:
    """Write a check on a view, or on a new fact with all that it takes; return the paths."""
    texts = {
        "code": code,
        "name": name,
        "stem": name.replace("-", "_"),
        "family": code[:3].lower(),
        "class_name": name.title().replace("-", ""),
        "fact": fact,
        "fact_stem": fact.replace("-", "_"),
        "fact_words": fact.replace("-", " "),
        "fact_class": fact.title().replace("-", ""),
    }
    texts["view"] = view or f"{texts['fact_class']}View"
    texts["view_module"] = module_of(view, root) or "distdiag.views.base"
    version = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    docs, family, stem = root / "docs" / "checks.md", texts["family"], texts["stem"]
    check = root / "distdiag" / "checks" / family / f"{stem}.py"
    contents = {
        check: CHECK.format(**texts),
        root / "tests" / "checks" / family / f"test_{stem}.py": TEST.format(**texts),
        docs: rows_with(docs.read_text(), code, name, version.rpartition(".")[0]),
    }
    if fact:
        contents[check] = _with_view(contents[check], texts)
        fact_stem = texts["fact_stem"]
        contents |= {
            root / "distdiag" / "events" / f"{fact_stem}.py": EVENT.format(**texts),
            root / "distdiag" / "probes" / fact_stem / "__init__.py": PROBE.format(**texts),
            root / "distdiag" / "engine" / f"{fact_stem}.py": ALIGNER.format(**texts),
        }
    for path, content in contents.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return list(contents)


def _with_view(check: str, texts: dict[str, str]) -> str:
    """Let a check define the view that it judges: nothing else knows it yet."""
    check = check.replace(
        f"from {texts['view_module']} import {texts['view']}\n",
        "from distdiag.views.base import View\n",
    )
    check = check.replace("Iterator\n", "Iterator, Mapping\nfrom dataclasses import dataclass\n", 1)
    event = f"from distdiag.events.{texts['fact_stem']} import {texts['fact_class']}\n"
    check = check.replace("from distdiag.findings", f"{event}from distdiag.findings", 1)
    return check.replace("class ", f"{VIEW.format(**texts)}class ", 1)


def main(arguments: list[str], root: Path = ROOT) -> int:
    """Scaffold the check that the command line names; exit status 2 if it cannot be."""
    parser = argparse.ArgumentParser(prog="new_check.py", description=__doc__)
    parser.add_argument("code", metavar="CODE", help="family and number, like COL013")
    parser.add_argument("name", help="the defect in kebab-case, like collective-shape-mismatch")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--view", default="", help="the view that it judges, like OptimizerView")
    form.add_argument("--fact", default="", help="a new fact, in kebab-case, like default-dtypes")
    options = parser.parse_args(arguments)
    table = (root / "docs" / "checks.md").read_text()
    problem = problem_with(options.code, options.name, table, root, options.fact)
    if problem:
        print(f"new_check.py: {problem}", file=sys.stderr)
        return 2
    view = options.view or ("" if options.fact else "CollectiveView")
    if view and module_of(view, root) is None:
        print(f"new_check.py: distdiag/views has no {view}", file=sys.stderr)
        return 2
    for path in scaffold(options.code, options.name, root, view=view, fact=options.fact):
        print(f"wrote {path.relative_to(root)}")
    print("next: docs/adding-a-check.md says what goes where; then run scripts/test tests/checks")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
