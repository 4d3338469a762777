"""What the report at a terminal says of the run itself, and of the files of a job that is gone."""

from collections.abc import Callable
from itertools import islice
from typing import Final

from distdiag.events.ranks import RankSet
from distdiag.findings.finding import ReadFile, Report
from distdiag.reports.base import one_line
from distdiag.reports.terminal_page import TerminalPage
from distdiag.reports.words import count, ranks_by_key, shown_text

MOST_GROUPS: Final = 12
MOST_IGNORED: Final = 1000
"""So many findings that do not count are listed with --verbose, as of those that do."""
MOST_FILES: Final = 4
"""More files of one kind in one folder are shown as one line."""


def write_next_time(page: TerminalPage, report: Report) -> None:
    """Write what would have helped to find more."""
    if not report.next_time:
        return
    page.blank()
    page.write("What to collect next time", indent=0, style="bold")
    for sentence in report.next_time:
        page.write(sentence, indent=4, first="  -")


def write_files(page: TerminalPage, report: Report) -> None:
    """Write what was read, files of one kind in one folder together where they are many."""
    if not report.files:
        return
    page.blank()
    page.write("What was read", indent=0, style="bold")
    alike: dict[tuple[object, ...], list[ReadFile]] = {}
    for file in report.files:
        key = (file.path.rpartition("/")[0], file.kinds, bool(file.num_lines), file.problem)
        alike.setdefault(key, []).append(file)
    for files in islice(alike.values(), MOST_GROUPS):
        several = len(files) > MOST_FILES
        for group in [files] if several else [[file] for file in files]:
            more = f" and {len(group) - 1} more" if several else ""
            page.write_whole(f"{group[0].path}{more}", indent=2)
            page.write(_what_was_read(group, page.who), indent=6)
    if len(alike) > MOST_GROUPS:
        page.write(f"and {count(len(alike) - MOST_GROUPS, 'more kind')}: see report.json")


def _what_was_read(files: list[ReadFile], who: Callable[[RankSet], str]) -> str:
    """Return ``log of ranks 0-3: 16 of 5,000 lines understood; only its end was read``."""
    first = files[0]
    ranks = RankSet(rank for file in files for rank in file.ranks)
    whose = f" of {who(ranks)}" if ranks else ""
    understood = sum(file.num_understood for file in files)
    num_lines = sum(file.num_lines for file in files)
    how_much = f": {understood:,} of {num_lines:,} lines understood" if num_lines else ""
    if understood and not num_lines:
        how_much = f": {understood:,} entries understood"
    what = f"{' and '.join(first.kinds)}{whose}{how_much}" if first.kinds else ""
    return "; ".join(filter(None, [what, first.problem]))


def write_ignored(page: TerminalPage, report: Report, *, verbose: bool) -> None:
    """Write how many findings do not count, and with `verbose` which, by what, and why."""
    counts = report.counts
    ways = ((counts.ignored, "ignored"), (counts.baselined, "known by the baseline"))
    known = ", ".join(f"{count(number, 'finding')} {way}" for number, way in ways if number)
    if known:
        page.write(f"{known}.{'' if verbose else ' --verbose lists them.'}", indent=0)
    if not verbose:
        return
    for each in report.ignored[:MOST_IGNORED]:
        page.write(shown_text(one_line(each.finding).removeprefix("distdiag: ")))
        page.write(f"ignored by {each.by}{f': {each.reason}' if each.reason else ''}", indent=6)
    if (more := len(report.ignored) - MOST_IGNORED) > 0:
        page.write(f"and {count(more, 'more finding')}: see report.json")


def write_run(page: TerminalPage, report: Report, *, verbose: bool) -> None:
    """Write what was run, how it went, and which rank did what last."""
    run = report.run
    page.blank()
    page.write("The run", indent=0, style="bold")
    page.write_label("command", shown_text(" ".join(run.command)))
    if report.files:  # of a post-mortem: what no file says is left out
        page.write_label("ranks", f"{run.world_size}{f', torch {run.torch}' if run.torch else ''}")
    else:
        page.write_label("ranks", f"{run.world_size}, torch {run.torch or 'not loaded'}")
        page.write_label("time", f"{run.started} to {run.ended or '(not ended)'}")
    page.write_label("attempts", str(run.attempts) if run.attempts > 1 else "")
    page.write_label("active", ", ".join(run.active_modes))
    page.write_label("dumps by", run.dump_transport)
    if verbose:
        page.write_label("checked", ", ".join(report.checked) or "nothing")
    statuses = ranks_by_key(((info.fate, info.last), (info.rank,)) for info in run.ranks)
    for (status, last), ranks in islice(statuses.items(), MOST_GROUPS):
        did = f"; last: {shown_text(last)}" if last else ""
        page.write(f"{page.who(ranks)}: {status}{did}")
    if len(statuses) > MOST_GROUPS:
        more = count(len(statuses) - MOST_GROUPS, "more group")
        page.write(f"and {more} of ranks: see report.json")
