"""Run one test on its ranks, and take in what they, and the observation of them, have to say."""

from __future__ import annotations

import pickle
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import pytest

from distdiag.events.errors import DamagedFileError, UsageError
from distdiag.findings.finding import Report
from distdiag.live.job_dump import jobs_of, take_dump
from distdiag.live.ranks import ranks_of_pids
from distdiag.live.report import report_of
from distdiag.live.text import job_text
from distdiag.reports import read_report
from distdiag.testing.plan import Folder, Mark, ParityRun, RankPlan, RankResult, pickled
from distdiag.testing.processes import POLL_S, Ranks, server_environment
from distdiag.testing.reuse import RankServer, server_for

# Where the ranks of a test stand when its time is up, and what their stacks alone show.

STACKS_S: Final = 5.0


class Stacks(NamedTuple):
    """The stacks of ranks as text, and the report of the checks that need nothing else."""

    ranks: frozenset[int]
    text: str
    report: Report | None = None


def take_stacks(pids: Mapping[int, int], world_size: int) -> Stacks:
    """Take the Python stacks of all ranks that still run."""
    ranks = frozenset(pids)
    try:
        seen = ranks_of_pids(list(pids.values()))
    except UsageError as error:
        return Stacks(ranks, f"no stacks could be taken: {error}\n")
    by_pid = {pid: rank for rank, pid in pids.items()}
    # The environment that /proc shows of a forked process tells no numbers.
    found = tuple(
        msgspec.structs.replace(
            each, rank=by_pid[each.pid], local_rank=by_pid[each.pid], world_size=world_size
        )
        for each in seen
    )
    jobs = jobs_of([take_dump(found, timeout_s=STACKS_S, say=lambda _: None)])
    if not jobs:
        return Stacks(ranks, "all ranks had ended before their stacks could be taken\n")
    return Stacks(ranks, job_text(jobs[0]), report_of(jobs[0]))


# Runs one test on its ranks.

SHORTEST_STALL_S: Final = 1.0
LONGEST_STALL_S: Final = 30.0
PARTS_OF_TIMEOUT: Final = 4
"""No progress for such a part of the timeout is a hang, so that it is found before the end."""
START_S: Final = 90.0
"""Importing torch on all ranks, and the meeting of their process group, may take so long."""
LAST_REPORT_S: Final = 3.0
"""When the time is up, a report that is under way may take so long."""
MONITOR_S: Final = 10.0
"""The report may take so long after the ranks have ended."""
LATE_MONITOR_S: Final = 2.0
"""The same, when the time was up."""

MADE_BY_EACH_RANK: Final = frozenset(
    {
        "assert_parity",
        "cache",
        "capfd",
        "capfdbinary",
        "caplog",
        "capsys",
        "capsysbinary",
        "capteesys",
        "distdiag_world_size",
        "doctest_namespace",
        "loss_parity",
        "monkeypatch",
        "pytestconfig",
        "pytester",
        "record_property",
        "record_testsuite_property",
        "record_xml_attribute",
        "recwarn",
        "request",
        "subtests",
        "testdir",
        "testrun_uid",
        "tmp_path_factory",
        "tmpdir_factory",
        "worker_id",
    }
)
"""Fixtures that mean something in their own process only."""


class Ended(NamedTuple):
    """How the ranks of one test ended.

    `statuses` are those of ranks that ended by themselves. `stacks` were taken when the time was
    up, `early` is the report as it stood then, if it had findings, and `report` the last one.
    """

    mark: Mark
    world_size: int
    results: Mapping[int, RankResult | None]
    statuses: Mapping[int, int]
    stopped: frozenset[int]
    stacks: Stacks | None
    early: Report | None
    report: Report | None
    outputs: Mapping[int, str]
    has_begun: bool

    @property
    def went_well(self) -> bool:
        """Whether all ranks came to the end of the test, and nothing failed there."""
        results = [self.results[rank] for rank in range(self.world_size)]
        is_good = all(result is not None and not _is_failed(result) for result in results)
        return is_good and not any(self.statuses.get(r, 1) for r in range(self.world_size))


def run_ranks(
    item: pytest.Function, mark: Mark, world_size: int, parity: ParityRun | None = None
) -> Ended:
    """Run a test on so many ranks; when this returns or raises, no process of theirs is left."""
    with _folder() as folder:
        _write_plan(folder, item, mark, world_size, parity)
        server = server_for(item, server_environment()) if mark.reuse else None
        return _run(folder, mark, world_size, server)


@contextmanager
def _folder() -> Iterator[Folder]:
    root = Path(tempfile.mkdtemp(prefix="distdiag-test-"))
    try:
        yield Folder(root)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _write_plan(
    folder: Folder, item: pytest.Function, mark: Mark, world_size: int, parity: ParityRun | None
) -> None:
    config = item.config
    plan = RankPlan(
        nodeid=item.nodeid,
        file=str(item.path),
        world_size=world_size,
        backend=mark.backend,
        timeout=mark.timeout,
        hang_timeout=min(max(mark.timeout / PARTS_OF_TIMEOUT, SHORTEST_STALL_S), LONGEST_STALL_S),
        search_path=tuple(sys.path),
        parity=parity,
    )
    folder.plan.write_bytes(msgspec.json.encode(plan))
    options = {**vars(config.option), "rootdir": str(config.rootpath)}
    options.pop("file_or_dir", None)
    if config.inipath is not None:
        options["inifilename"] = str(config.inipath)
    folder.options.write_bytes(pickle.dumps(pickled(options)))
    folder.fixtures.write_bytes(pickle.dumps(pickled(_fixtures(item))))


def _fixtures(item: pytest.Function) -> dict[str, Any]:
    """Return the values that all ranks share. A fixture without one was made for what it does."""
    callspec = getattr(item, "callspec", None)
    params: Mapping[str, object] = callspec.params if callspec is not None else {}
    return {
        name: value
        for name, value in item.funcargs.items()
        if value is not None and name not in MADE_BY_EACH_RANK and name not in params
    }


def _run(folder: Folder, mark: Mark, world_size: int, server: RankServer | None) -> Ended:
    stacks = early = None

    def has_failed(rank: int) -> bool:
        if ranks.statuses.get(rank):
            return True
        result = folder.read_result(rank)
        return result is not None and _is_failed(result)

    def has_begun() -> bool:
        return all(folder.began(rank).exists() for rank in range(world_size))

    with Ranks(folder, world_size, server) as ranks:
        is_over = ranks.wait(START_S, has_failed=has_failed, until=has_begun)
        if has_begun():
            is_over = ranks.wait(mark.timeout, has_failed=has_failed)
        if not is_over:
            stacks = take_stacks(ranks.pids, world_size)
            early = _early_report(folder)
        statuses = ranks.statuses
        if early is not None:
            ranks.kill_monitor()
        ranks.kill()
        ranks.wait_for_report(MONITOR_S if stacks is None else LATE_MONITOR_S)
        report = _report(folder)
    return Ended(
        mark=mark,
        world_size=world_size,
        results={rank: folder.read_result(rank) for rank in range(world_size)},
        statuses=statuses,
        stopped=frozenset(ranks.stopped),
        stacks=stacks,
        early=early,
        report=report,
        outputs={rank: _text(folder.log(rank)) for rank in range(world_size)},
        has_begun=has_begun(),
    )


def _early_report(folder: Folder) -> Report | None:
    """Wait a moment for what the monitor finds in ranks that stand still."""
    deadline = time.monotonic() + LAST_REPORT_S
    while True:
        report = _report(folder)
        has_findings = report is not None and any(f.severity.weight for f in report.findings)
        if has_findings or time.monotonic() > deadline:
            return report if has_findings else None
        time.sleep(POLL_S)


def _is_failed(result: RankResult) -> bool:
    return bool(result.problem) or any(r.get("outcome") == "failed" for r in result.reports)


def _report(folder: Folder) -> Report | None:
    try:
        return read_report(folder.run)
    except (UsageError, DamagedFileError):
        return None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
