"""Entry point of pytest: ``@pytest.mark.distdiag(world_size=[1, 2])`` runs a test on real ranks.

This module costs a process that uses no mark next to nothing: everything else is imported by the
first test that has one, and torch by its ranks only.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

if TYPE_CHECKING:
    from distdiag.testing.outcome import Outcome
    from distdiag.testing.plan import Mark

_WORLD_SIZE: Final = "distdiag_world_size"
_RANK_PLUGIN: Final = "distdiag-rank"
_OUTCOME: Final = pytest.StashKey["Outcome"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the command line."""
    parser.getgroup("distdiag").addoption(
        "--distdiag-report-dir",
        metavar="DIR",
        help="keep the reports and outputs of failed tests on ranks in DIR, by name of the test",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Make the mark known."""
    option = config.option
    if option.distdiag_report_dir:  # ranks and workers may have another current directory
        option.distdiag_report_dir = str(Path(option.distdiag_report_dir).absolute())
    config.addinivalue_line(
        "markers",
        'distdiag(world_size=2, backend="gloo", timeout=60, fail_on="error"): run the test in so '
        "many processes with torch.distributed initialised, under observation; world_size may be "
        'a list; with reuse="module" torch is imported once for the tests of a module',
    )


@pytest.fixture
def distdiag_world_size(request: pytest.FixtureRequest) -> int:
    """Return on how many ranks a marked test runs."""
    if not hasattr(request, "param"):
        pytest.fail("distdiag_world_size is for tests with @pytest.mark.distdiag", pytrace=False)
    return int(request.param)


@pytest.fixture
def assert_parity(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Return a function that fails unless a step returns the same on 1, 2, … ranks."""
    from distdiag.testing.parity_fixtures import assert_parity_of

    return assert_parity_of(request)


@pytest.fixture
def loss_parity() -> Callable[..., None]:
    """Return a function that fails unless losses by world size agree."""
    from distdiag.testing import parity_fixtures

    return parity_fixtures.loss_parity


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one test for each world size."""
    marker = metafunc.definition.get_closest_marker("distdiag")
    if marker is None:
        return
    mark = _read(marker)
    if _WORLD_SIZE not in metafunc.fixturenames:
        metafunc.fixturenames.append(_WORLD_SIZE)
    ids = [f"world{size}" for size in mark.world_size]
    metafunc.parametrize(_WORLD_SIZE, mark.world_size, ids=ids, indirect=True)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Refuse what cannot run on several ranks, and skip where GPUs are short."""
    marker = item.get_closest_marker("distdiag")
    if marker is None or _is_rank(item.config):
        return
    size = _world_size(item)
    if size is None:
        pytest.fail(
            "the distdiag mark is for test functions and methods, not for unittest.TestCase",
            pytrace=False,
        )
    mark = _read(marker)
    item.user_properties += [("world_size", size), ("backend", mark.backend)]
    if "nccl" in mark.backend:
        from distdiag.testing.processes import num_gpus

        available = num_gpus()
        if available < size:
            pytest.skip(f"backend nccl needs {size} GPUs, and there are {available}")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a marked test on its ranks instead of here."""
    marker = pyfuncitem.get_closest_marker("distdiag")
    size = _world_size(pyfuncitem)
    if marker is None or size is None or _is_rank(pyfuncitem.config):
        return None
    if "assert_parity" in pyfuncitem.funcargs:
        return None  # which starts the ranks itself, of more than one world size
    from distdiag.testing.kept import keep_failure
    from distdiag.testing.outcome import outcome_of, output_sections
    from distdiag.testing.run import run_ranks

    ended = run_ranks(pyfuncitem, _read(marker), size)
    outcome = outcome_of(ended, pyfuncitem)
    pyfuncitem.stash[_OUTCOME] = outcome
    keep_failure(pyfuncitem, ended, outcome)
    for title, text in output_sections(ended):
        pyfuncitem.add_report_section("call", title, text)
    if outcome.kind == "skipped":
        pytest.skip()
    if outcome.kind == "failed" and outcome.failures is not None:
        pytest.fail(outcome.failures.reprcrash.message, pytrace=False)
    return True


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Put what the ranks say in the place of what this process saw."""
    report = yield
    outcome = item.stash.get(_OUTCOME, None)
    if outcome is None or call.when != "call":
        return report
    del item.stash[_OUTCOME]
    if outcome.by_ranks:
        _follow_ranks(report, outcome)
    if report.failed and outcome.failures is not None:
        report.longrepr = outcome.failures
    return report


def _follow_ranks(report: pytest.TestReport, outcome: Outcome) -> None:
    """Take over the ranks' own view of marks such as xfail: they know what was raised."""
    report.outcome = "skipped" if outcome.kind == "xfailed" else outcome.kind
    if outcome.skip is not None:
        report.longrepr = outcome.skip
    if outcome.wasxfail is not None:
        report.wasxfail = outcome.wasxfail
    elif hasattr(report, "wasxfail"):
        del report.wasxfail


def _is_rank(config: pytest.Config) -> bool:
    return config.pluginmanager.has_plugin(_RANK_PLUGIN)


def _world_size(item: pytest.Item) -> int | None:
    params: dict[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
    return params.get(_WORLD_SIZE)


def _read(marker: pytest.Mark) -> Mark:
    from distdiag.events.errors import UsageError
    from distdiag.testing.mark import read_mark

    try:
        return read_mark(marker.args, marker.kwargs)
    except UsageError as error:
        pytest.fail(str(error), pytrace=False)
