"""What a rank adds to its pytest: the one test, the process group, the values of fixtures."""

from __future__ import annotations

import pickle
import time
from collections.abc import Generator
from contextlib import suppress
from datetime import timedelta
from types import TracebackType
from typing import Any, Final

import pytest

from distdiag.agent.agent import RankAgent
from distdiag.probes.process.exceptions import strip_own_frames
from distdiag.record.user_code import is_user_file
from distdiag.testing.plan import Folder, Measured, RankPlan, RankResult, converted

NAME = "distdiag-rank"
"""The name of the plugin: pytest's own process has none of this name."""

GROUP_PATIENCE_S: Final = 60.0
"""The process group waits so much longer than the whole test may take."""
POLL_S: Final = 0.005
"""How often a rank looks whether the others have come: seldom more than ten times."""


class RankPlugin:
    """Runs one test on one rank, and reports to its parent how each phase went."""

    def __init__(
        self, folder: Folder, plan: RankPlan, *, rank: int, agent: RankAgent | None
    ) -> None:
        self.rank = rank
        self.plan = plan
        self.has_failed = False
        self.has_run = False
        self._folder = folder
        self._agent = agent
        self._fixtures: dict[str, bytes] = pickle.loads(folder.fixtures.read_bytes())
        self._reports: list[dict[str, Any]] = []
        self._measured: Measured | None = None
        self._problem = ""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keep the one test only."""
        items[:] = [item for item in items if item.nodeid == self.plan.nodeid][:1]

    @pytest.hookimpl(tryfirst=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest
    ) -> object | None:
        """Give a fixture the value that it has in the parent, if that could be passed on."""
        form = self._fixtures.get(fixturedef.argname)
        value: object = converted(pickle.loads, form) if form is not None else None
        if value is None:
            return None  # the rank makes its own
        fixturedef.cached_result = (value, fixturedef.cache_key(request), None)  # type: ignore[arg-type]
        return value

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self) -> Generator[None, None, None]:
        """Make the process group before any fixture of the test."""
        import torch.distributed as dist

        self.has_run = True
        # The parent's patience ends first: it takes the stacks while all ranks still stand.
        timeout = timedelta(seconds=self.plan.timeout + GROUP_PATIENCE_S)
        dist.init_process_group(self.plan.backend, timeout=timeout)
        self._folder.began(self.rank).touch()
        self._wait_for_the_others()
        return (yield)

    def _wait_for_the_others(self) -> None:
        """Begin when all have met: one that has ended by then would refuse who still connects.

        Should one not come, the parent ends the others.
        """
        deadline = time.monotonic() + self.plan.timeout
        marks = [self._folder.began(rank) for rank in range(self.plan.world_size)]
        while time.monotonic() < deadline and not all(mark.exists() for mark in marks):
            time.sleep(POLL_S)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self) -> Generator[None, None, None]:
        """Destroy the process group after all fixtures, unless something went wrong."""
        yield
        import torch.distributed as dist

        if not self.has_failed and dist.is_initialized():
            dist.destroy_process_group()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Report what was raised to the agent, and the phase to the parent."""
        if call.excinfo is not None:
            strip_own_frames(call.excinfo.tb, self.plan.file)
            if not is_user_file(_innermost_file(call.excinfo.tb), self.plan.file):
                # The long style would show the whole source of a function of torch.
                option = item.config.option
                option.tbstyle = "short" if option.tbstyle == "auto" else option.tbstyle
        report = yield
        if report.failed:
            self.has_failed = True
            if self._agent is not None and call.excinfo is not None:
                trace = _without_pytest(call.excinfo.tb, self.plan.file)
                self._agent.exceptions.raised(call.excinfo.value, trace)
        form = item.config.hook.pytest_report_to_serializable(config=item.config, report=report)
        self._reports.append({**form, "user_properties": [*report.user_properties]})
        self._report()
        return report

    @pytest.hookimpl(trylast=True)
    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Report why the file of the test cannot be imported."""
        if report.failed:
            self.report_problem(str(report.longrepr))

    def report_measured(self, measured: Measured) -> None:
        """Report what a step function returned."""
        self._measured = measured
        self._report()

    def report_problem(self, problem: str) -> None:
        """Report why the test could not be run."""
        self.has_failed = True
        self._problem = self._problem or problem
        self._report()

    def require_run(self) -> None:
        """Report if the test was not found."""
        if not self.has_run and not self._problem:
            self.report_problem(
                f"the test {self.plan.nodeid} was not found when this rank collected "
                f"{self.plan.file}: do its parameters differ from one collection to the next?"
            )

    def _report(self) -> None:
        result = RankResult(
            reports=tuple(self._reports), problem=self._problem, measured=self._measured
        )
        with suppress(OSError):
            self._folder.write_result(self.rank, result)


def _without_pytest(trace: TracebackType, file: str) -> TracebackType:
    """Return the traceback from the first frame that is the user's."""
    here: TracebackType | None = trace
    while here is not None:
        if is_user_file(here.tb_frame.f_code.co_filename, file):
            return here
        here = here.tb_next
    return trace


def _innermost_file(trace: TracebackType) -> str:
    while trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_frame.f_code.co_filename
