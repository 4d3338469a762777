"""What the fixtures `assert_parity` and `loss_parity` do, in pytest's process and on the ranks."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from distdiag.events.errors import UsageError
from distdiag.testing.kept import keep_failure
from distdiag.testing.mark import read_mark, read_world_sizes
from distdiag.testing.outcome import outcome_of, output_sections
from distdiag.testing.parity import Rtol, measure, parity_problem, replicas_problem
from distdiag.testing.plan import Mark, Measured, ParityRun
from distdiag.testing.rank_plugin import NAME, RankPlugin
from distdiag.testing.run import run_ranks

# Compares a script on one rank with itself on several, by ``distdiag parity``.

FOUND_STATUS: Final = 1
"""With this status the command says that something differs."""
GRACE_S: Final = 20.0
"""The command ends the ranks of its runs within this time when it is interrupted."""


class ScriptOptions(NamedTuple):
    """What a script is compared with itself on, for how long, and with which arguments."""

    world_sizes: Sequence[int]
    num_steps: int
    arguments: Sequence[str] = ()
    options: Sequence[str] = ()


def script_problem(script: Path, chosen: ScriptOptions) -> str | None:
    """Return what differs, as the report shows it; None if nothing does.

    Raises:
        UsageError: the runs cannot be compared, or the command failed.

    """
    sizes = ",".join(str(size) for size in (1, *chosen.world_sizes))
    command = [sys.executable, "-m", "distdiag.cli", "parity", "--world-sizes", sizes]
    command += ["--steps", str(chosen.num_steps), *chosen.options, str(script)]
    status, report, errors = _run([*command, *chosen.arguments])
    if not status:
        return None
    if status == FOUND_STATUS and report:
        return report
    raise UsageError(errors or f"distdiag parity ended with status {status}")


def _run(command: Sequence[str]) -> tuple[int, str, str]:
    """Run to the end and return the status and what was written to stdout and stderr."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        written, errors = process.communicate()
    except BaseException:  # such as the timeout of the test: no rank may be left behind
        process.send_signal(signal.SIGINT)
        try:
            process.communicate(timeout=GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
        raise
    return process.returncode, written.strip(), errors.strip()


# The fixtures.

StepFunction = Callable[[int, int], Any]
"""Called with the rank and the world size; returns what must be equal for all world sizes."""


class AssertParity:
    """The value of the fixture in pytest's own process: it starts the ranks and compares."""

    def __init__(self, item: pytest.Function) -> None:
        self._item = item
        self._num_calls = 0
        marker = item.get_closest_marker("distdiag")
        given = dict(marker.kwargs) if marker is not None else {}
        given.pop("world_size", None)
        self._of_mark: Mapping[str, Any] = given
        params: dict[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
        self._sizes = (1, int(params.get("distdiag_world_size", 2)))

    def __call__(
        self,
        step_fn: StepFunction | str | Path,
        world_sizes: Iterable[int] | None = None,
        rtol: Rtol = "auto",
        *,
        args: Sequence[str] = (),
        steps: int = 10,
        parity_args: Sequence[str] = (),
        **options: object,
    ) -> None:
        """Fail the test unless all world sizes return the same.

        `step_fn` is a function, or the path of a script, which then gets `args`, and is compared
        for so many `steps` with the options `parity_args` of ``distdiag parity``. `options` are
        those of the mark: backend, timeout, fail_on; of a script, the timeout of each run. In a
        test with the mark, its arguments count where none are given here; `world_sizes` are 1 and
        that of the mark, 1 and 2 without one.
        """
        __tracebackhide__ = True
        call, self._num_calls = self._num_calls, self._num_calls + 1
        try:
            sizes = self._sizes if world_sizes is None else read_world_sizes(tuple(world_sizes))
            mark = read_mark((), {**self._of_mark, **options})
        except UsageError as error:
            pytest.fail(str(error).replace("distdiag mark", "assert_parity"), pytrace=False)
        others = [size for size in sizes if size != 1]
        if not callable(step_fn):
            more = ("--timeout", str(mark.timeout)) if "timeout" in options else ()
            chosen = ScriptOptions(others, steps, tuple(args), (*more, *parity_args))
            _compare_script(Path(step_fn), chosen, rtol=rtol, mark_options=options)
            return
        base = self._run(mark, call, 1)[0]
        noise = self._run(mark, call, 1)[0] if rtol == "auto" else None
        for size in others:
            by_rank = self._run(mark, call, size)
            problem = replicas_problem(by_rank) or parity_problem(
                base, by_rank[0], noise, rtol=rtol, world_size=size
            )
            if problem:
                pytest.fail(f"world size {size} against 1: {problem}")

    def _run(self, mark: Mark, call: int, world_size: int) -> dict[int, Measured]:
        __tracebackhide__ = True
        ended = run_ranks(self._item, mark, world_size, ParityRun(call=call))
        outcome = outcome_of(ended, self._item)
        if outcome.kind == "failed":
            keep_failure(self._item, ended, outcome)
            for title, text in output_sections(ended):
                self._item.add_report_section("call", title, text)
            pytest.fail(f"world size {world_size}:\n{outcome.failures}")
        measured = {
            rank: result.measured
            for rank, result in ended.results.items()
            if result is not None and result.measured is not None
        }
        if len(measured) < world_size:
            pytest.fail(
                f"world size {world_size}: not every rank came to call {call + 1} of "
                "assert_parity: is it under a condition?"
            )
        return measured


class MeasureHere:
    """The value of the fixture on a rank: it calls the step function and ends the test."""

    def __init__(self, plugin: RankPlugin) -> None:
        self._plugin = plugin
        self._num_calls = 0

    def __call__(self, step_fn: StepFunction, *_: object, **__: object) -> None:
        """Measure the one call that is asked for; those before it are left out."""
        plan = self._plugin.plan
        if plan.parity is None:
            pytest.fail("assert_parity must be an argument of a test with the mark", pytrace=False)
        call, self._num_calls = self._num_calls, self._num_calls + 1
        if call == plan.parity.call:
            self._plugin.report_measured(measure(step_fn(self._plugin.rank, plan.world_size)))
            pytest.skip("measured")


def assert_parity_of(request: pytest.FixtureRequest) -> AssertParity | MeasureHere:
    """Return what the fixture means in this process."""
    plugin = request.config.pluginmanager.get_plugin(NAME)
    if isinstance(plugin, RankPlugin):
        return MeasureHere(plugin)
    return AssertParity(request.node)


def loss_parity(losses: Mapping[int, Sequence[float]], rtol: Rtol = "auto") -> None:
    """Fail unless the losses by world size agree, step by step, with those of the smallest."""
    __tracebackhide__ = True
    measured = {
        size: Measured(
            values={"loss": [float(loss) for loss in values]},
            dtypes={"loss": "float32"},
            series=("loss",),
        )
        for size, values in losses.items()
    }
    if len(measured) < 2:
        pytest.fail("loss_parity needs the losses of two world sizes", pytrace=False)
    smallest = min(measured)
    for size in sorted(measured.keys() - {smallest}):
        problem = parity_problem(
            measured[smallest], measured[size], None, rtol=rtol, world_size=size // smallest
        )
        if problem:
            pytest.fail(f"world size {size} against {smallest}: {problem}")


def _compare_script(
    script: Path, options: ScriptOptions, *, rtol: Rtol, mark_options: Mapping[str, Any]
) -> None:
    __tracebackhide__ = True
    for name in ("rtol",) if rtol != "auto" else sorted(mark_options.keys() - {"timeout"}):
        pytest.fail(f"assert_parity: a script takes no {name}", pytrace=False)
    try:
        problem = script_problem(script, options)
    except UsageError as error:
        pytest.fail(f"assert_parity: {script} cannot be compared:\n{error}", pytrace=False)
    if problem:
        pytest.fail(problem)
