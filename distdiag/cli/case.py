"""``distdiag case``: a notebook of an investigation."""

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import click

from distdiag.case.experiments import RESULTS, Trial, with_trial
from distdiag.case.notebook import (
    CONCLUSION,
    OPEN,
    answers_of,
    entries_of,
    item,
    new_notebook,
    read_notebook,
    with_entry,
    with_lines,
)
from distdiag.cli.runs import newest_run
from distdiag.cli.show import tell
from distdiag.events.errors import UsageError

LONGEST_NAME: Final = 40
"""The name of a notebook is made of so many characters of the symptom."""
_case = click.argument("case", type=click.Path(path_type=Path), metavar="CASE.md")


@click.group("case")
def command() -> None:
    """Keep a notebook of an investigation: what is seen, what it may be, what was tried.

    The notebook is a page of Markdown that you edit; these commands add to it.
    """


@command.command("new")
@click.argument("symptom")
@click.option("--expected", metavar="TEXT", help="What should happen instead.")
@click.option("--since", metavar="TEXT", help="Since when it happens, and what was changed then.")
@click.option("--reproducible", metavar="TEXT", help="How often it happens, and how to see it.")
@click.option(
    *("-o", "--output"),
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the notebook here [case-SYMPTOM.md].",
)
def new(
    symptom: str,
    expected: str | None,
    since: str | None,
    reproducible: str | None,
    output: Path | None,
) -> None:
    """Begin a notebook about SYMPTOM: what is seen, in one sentence."""
    words = re.sub(r"\W+", "-", symptom.lower()).strip("-")[:LONGEST_NAME].rstrip("-")
    path = output or Path(f"case-{words}.md")
    if not words:
        raise UsageError("say in words what is seen")
    if path.exists():
        raise UsageError(f"{path} exists already")
    answers = {
        "symptom": symptom,
        "expected": expected or "",
        "since when": since or "",
        "reproducible": reproducible or "",
    }
    _write(path, new_notebook(answers))
    click.echo(path)
    _ask_for_answers(path, {key: value or OPEN for key, value in answers.items()})


@command.command("hypothesis")
@_case
@click.argument("text")
@click.option("--confirmed-if", required=True, metavar="TEXT", help="What would confirm it.")
@click.option("--refuted-if", required=True, metavar="TEXT", help="What would refute it.")
def hypothesis(case: Path, text: str, confirmed_if: str, refuted_if: str) -> None:
    """Add what the cause may be, with the observations that confirm and refute it.

    The order in the notebook is the ranking: move it up by hand if it is likelier than others.
    """
    body = [item("confirmed if", confirmed_if), item("refuted if", refuted_if)]
    notebook, name = with_entry(read_notebook(case), "H", text, body)
    _write(case, notebook)
    click.echo(name)


@command.command("add")
@_case
@click.argument("run", required=False, type=click.Path(path_type=Path))
@click.option("--tries", default="", metavar="H1", help="The run tries the fix of this hypothesis.")
@click.option(
    "--result",
    type=click.Choice(RESULTS),
    help="What came of that fix [whether the finding of the hypothesis is there again].",
)
def add(case: Path, run: Path | None, tries: str, result: str | None) -> None:
    """Add a run: its findings, and what was changed since the run before it.

    RUN is a run directory or a report.json, by default the newest run below ./distdiag-runs. Each
    finding that is new becomes a hypothesis. Says so if more than one thing was changed, and if
    three fixes in a row have failed.
    """
    if result is not None and not tries:
        raise UsageError("--result says what came of a fix: name its hypothesis by --tries")
    trial = Trial(run or newest_run(), tries, result or "")
    notebook, remarks = with_trial(read_notebook(case), trial)
    _write(case, notebook)
    click.echo(entries_of(notebook, "E")[-1].name)
    for remark in remarks:
        tell("case", remark)


@command.command("close")
@_case
@click.option("--cause", required=True, metavar="H1", help="The hypothesis that was confirmed.")
@click.option(
    "--test",
    required=True,
    metavar="FILE[::TEST]",
    help="The test that fails without the fix: it must exist.",
)
@click.option(
    "--constraint",
    required=True,
    metavar="TEXT",
    help="What must hold from now on so that it cannot happen again.",
)
def close(case: Path, cause: str, test: str, constraint: str) -> None:
    """Close a case: with its cause, the regression test, and the constraint that was learnt."""
    notebook = read_notebook(case)
    known = {entry.name: entry for entry in entries_of(notebook, "H")}
    if cause not in known:
        raise UsageError(
            f"no hypothesis is called {cause} (there are: {', '.join(known) or 'none'})"
        )
    if not Path(test.partition("::")[0]).is_file():
        raise UsageError(f"{test}: there is no such test; write it first, and see it fail")
    trials = [entry for entry in entries_of(notebook, "E") if entry.says("tries") == cause]
    if not any(entry.says("result") == "worked" for entry in trials):
        tell("case", f"no experiment says that the fix of {cause} worked")
    body = [item("cause", f"{cause} {known[cause].title}"), item("regression test", test)]
    _write(case, with_lines(notebook, CONCLUSION, ["", *body, item("constraint", constraint)]))
    _ask_for_answers(case, answers_of(notebook))


def _ask_for_answers(path: Path, answers: Mapping[str, str]) -> None:
    still_open = [question for question, answer in answers.items() if answer == OPEN]
    if still_open:
        tell("case", f"still open in {shlex.quote(str(path))}: {', '.join(still_open)}")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from None
