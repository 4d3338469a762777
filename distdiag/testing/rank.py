"""One rank of a test: ``python -m distdiag.testing.rank FOLDER`` runs it by pytest, observed."""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from distdiag.agent.agent import RankAgent
from distdiag.agent.launch import read_launch
from distdiag.config import Config
from distdiag.record.guard import guarded
from distdiag.testing.plan import Folder, RankPlan
from distdiag.testing.rank_plugin import RankPlugin

_PR_SET_PDEATHSIG: Final = 1
_NOT_RUN: Final = 3
"""The status of a rank that never came to the test."""

_OPTIONS: Final[Mapping[str, object]] = {
    "basetemp": None,
    "capture": "no",
    "collectonly": False,
    "cov_source": [],
    "deselect": None,
    "dist": "no",
    "durations": None,
    "failedfirst": False,
    "keyword": "",
    "lf": False,
    "looponfail": False,
    "markexpr": "",
    "maxfail": 0,
    "newfirst": False,
    "numprocesses": None,
    "pastebin": None,
    "setuponly": False,
    "setupplan": False,
    "setupshow": False,
    "stepwise": False,
    "timeout": 0,
    "trace": False,
    "tx": [],
    "usepdb": False,
    "xmlpath": None,
}
"""Options that belong to the process of pytest itself: what selects, shows and writes."""

_FOR_THE_PARENT: Final = ("terminalreporter", "timeout", "junitxml")
"""Plugins of pytest that have nothing to do in a rank."""


class _Quiet:
    """Takes away what would speak for the rank: its parent does."""

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        for name in _FOR_THE_PARENT:
            plugin = config.pluginmanager.get_plugin(name)
            if plugin is not None:
                config.pluginmanager.unregister(plugin)


def main(root: str, *, is_forked: bool = False) -> int:
    """Run the test and return the exit status of this rank."""
    die_with_parent()
    folder = Folder(Path(root))
    plan = msgspec.json.decode(folder.plan.read_bytes(), type=RankPlan)
    sys.path[:] = plan.search_path
    agent = _start_agent(folder, plan)
    if is_forked:
        gc.freeze()  # pytest collects garbage when it ends: what all ranks share is none
    plugin = RankPlugin(folder, plan, rank=int(os.environ["RANK"]), agent=agent)
    store = None
    try:
        store = _serve_store(plan)
        _choose_device(plan)
        _run_pytest(folder, plan, plugin)
    except BaseException as error:  # noqa: BLE001 (the parent shows it, whatever it is)
        plugin.report_problem("".join(traceback.format_exception(error)))
    status = 1 if plugin.has_failed else _NOT_RUN if not plugin.has_run else 0
    if agent is not None:
        agent.exit_status = status
        if plugin.has_failed:
            agent.wait_for_last_words()
    del store
    return status


def die_with_parent() -> None:
    """Let the kernel kill this process when pytest is killed, so that none is left behind."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() == 1:
        os._exit(_NOT_RUN)


def _start_agent(folder: Folder, plan: RankPlan) -> RankAgent | None:
    config = Config(
        run_dir=folder.run,
        report=("json",),
        fail_on="never",  # whoever started the ranks judges the findings
        hang_timeout_s=plan.hang_timeout,
    )
    agents: list[RankAgent] = []

    def start() -> None:
        launch = read_launch(os.environ)
        agent = RankAgent(launch, config, ("pytest", plan.nodeid), main_script=plan.file)
        agents.append(agent)
        RankAgent.current = agent
        agent.start()

    guarded(start, "observation")
    return agents[0] if agents else None


def _serve_store(plan: RankPlan) -> object:
    """On rank 0, serve the store of the job on the socket that the parent opened for it."""
    descriptor = os.environ.pop("DISTDIAG_LISTENER", None)
    if descriptor is None:
        return None
    import torch.distributed as dist

    return dist.TCPStore(  # type: ignore[attr-defined]
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        plan.world_size,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=plan.timeout),
        master_listen_fd=int(descriptor),
    )


def _choose_device(plan: RankPlan) -> None:
    if "nccl" in plan.backend:
        import torch

        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))


def _run_pytest(folder: Folder, plan: RankPlan, plugin: RankPlugin) -> None:
    """Let pytest collect the file of the test, under the options that the parent has."""
    options: dict[str, Any] = {}
    for name, form in pickle.loads(folder.options.read_bytes()).items():
        with suppress(Exception):  # an option of a class that this process cannot import
            options[name] = pickle.loads(form)
    options |= _OPTIONS
    options["basetemp"] = str(folder.root / f"rank-{plugin.rank}-tmp")
    config = pytest.Config.fromdictargs(options, [plan.file])
    # The sign for other plugins that this process writes no reports of its own.
    worker = os.environ.get("PYTEST_XDIST_WORKER", "master")
    vars(config)["workerinput"] = {"workerid": worker, "testrunuid": plan.nodeid}
    config.pluginmanager.register(_Quiet(), "distdiag-quiet")
    config.pluginmanager.register(plugin, "distdiag-rank")
    config.hook.pytest_cmdline_main(config=config)
    plugin.require_run()


def leave(status: int) -> None:
    """End without the interpreter's teardown, in which threads of gloo may abort the process."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    leave(main(sys.argv[1]))
