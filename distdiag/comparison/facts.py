"""What is known of a run, as facts that have one value and as values that go from step to step."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, Final

import msgspec
import xxhash

from distdiag.analysis.run_folders import find_run_folders, merged
from distdiag.config import Config
from distdiag.events.base import Event
from distdiag.events.data import EpochFed, ModelFed
from distdiag.events.environment import FactKind, SourceSeen, Surroundings
from distdiag.events.errors import UNDECODABLE, DamagedFileError, UsageError
from distdiag.events.lifecycle import RankStarted
from distdiag.events.models import ModelPlan, ModelState, Moment, OptimizerState, TensorPlan
from distdiag.findings.finding import Report
from distdiag.monitor.source_state import look_at_source
from distdiag.record.environment import variables_of
from distdiag.record.regular_file import read_regular
from distdiag.record.run_dir import LaunchFile
from distdiag.record.visible import json_text
from distdiag.record.wire import Interner
from distdiag.reports import read_report

Key = tuple[str, str]
"""What a fact is about, such as ``variable``, and its name."""
ALL: Final = -1
"""Stands for a rank in facts of the whole run."""
PLAN: Final = "plan"
OPTION: Final = "option"
ARGUMENT: Final = "argument"
_NEITHER: Final = "neither a report nor a capture of an environment"
_START: Final = -1
"""Stands for a step: before the first one."""


@dataclass(frozen=True, slots=True)
class RunFacts:
    """One run.

    `facts` are by rank (`ALL`: of the run). `traces` tell, by name and then by step and rank, what
    could be compared of data, weights, gradients and rates; a step is -1 before the first one.
    """

    source: Path
    facts: dict[Key, dict[int, str]] = field(default_factory=dict)
    traces: dict[str, dict[tuple[int, int], str]] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)

    def put(self, kind: str, name: str, value: str, rank: int = ALL) -> None:
        """Add a fact; the first one counts."""
        self.facts.setdefault((kind, name), {}).setdefault(rank, value)

    def trace(self, name: str, step: int, rank: int, value: str) -> None:
        """Add what a rank had at a step; the first one counts."""
        self.traces.setdefault(name, {}).setdefault((step, rank), value)


def facts_of(path: Path) -> RunFacts:
    """Return the facts of a run directory, a report.json, or what ``compare --env`` has written.

    Raises:
        UsageError: there is no run.
        DamagedFileError: the file is something else.

    """
    if not path.exists():
        raise UsageError(f"{path}: there is no such file or directory")
    if path.is_dir():
        return _of_folder(path)
    try:
        return _of_capture(path, msgspec.json.decode(read_regular(path), type=dict[str, Any]))
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    except UNDECODABLE:
        raise DamagedFileError(f"{path}: {_NEITHER}") from None


def own_facts() -> bytes:
    """Return what can be told here and now, without torch, as JSON that `facts_of` reads."""
    run = RunFacts(Path())
    for name, value in variables_of(os.environ):
        run.put(FactKind.VARIABLE, name, value)
    run.put(FactKind.VERSION, "Python", platform.python_version())
    for package in distributions():
        run.put(FactKind.VERSION, package.metadata["Name"] or "", package.version)
    _add_source(run, look_at_source(None, os.getcwd(), 0))
    facts = {f"{kind} {name}": values[ALL] for (kind, name), values in run.facts.items()}
    return json_text({"environment": facts}).encode()


def _of_capture(path: Path, found: Mapping[str, Any]) -> RunFacts:
    if "schema_version" in found:
        run = RunFacts(path)
        _add_report(run, read_report(path))
        return run
    environment = found.get("environment")
    if not isinstance(environment, dict):
        raise DamagedFileError(f"{path}: {_NEITHER}")
    run = RunFacts(path)
    for words, value in environment.items():
        kind, _, name = str(words).partition(" ")
        run.put(kind, name, str(value))
    return run


def _of_folder(path: Path) -> RunFacts:
    run = RunFacts(path)
    folders = find_run_folders([path])
    if (path / "report.json").exists():
        _add_report(run, read_report(path))
    elif not folders:
        raise UsageError(f"{path}: there is no run in it")
    for folder in folders:
        if (launch := folder.launch_file) is not None:
            _add_launch(run, launch)
    for _, event in merged(folders, Interner(), by_wall_clock=True):
        _add_event(run, event)
    return run


def _add_report(run: RunFacts, report: Report) -> None:
    _add_command(run, report.run.command)
    run.put(FactKind.LAUNCH, "number of ranks", str(report.run.world_size))
    run.put(FactKind.LAUNCH, "number of nodes", str(len({r.hostname for r in report.run.ranks})))
    run.put(FactKind.VERSION, "torch", report.run.torch)
    run.put("outcome", "how the run ended", str(report.run.outcome))
    codes = sorted({finding.code for finding in report.findings})
    run.put("outcome", "findings", ", ".join(codes) or "none")


def _add_launch(run: RunFacts, file: LaunchFile) -> None:
    _add_command(run, file.command)
    run.put(FactKind.LAUNCH, "folder", file.cwd)
    usual = msgspec.to_builtins(Config(), enc_hook=str)
    for name, value in file.config.items():
        if name != "run_dir" and value != usual.get(name):
            run.put(OPTION, name, str(value))


def _add_command(run: RunFacts, command: Iterable[str]) -> None:
    script, *words = command or ("",)
    run.put(FactKind.LAUNCH, "script", Path(script).name)
    for name, value in arguments_of(words):
        run.put(ARGUMENT, name, value)


def arguments_of(words: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the arguments of a script by name; those without one are counted from 1."""
    name, num_unnamed = "", 0
    for word in words:
        if word.startswith("-") and not word[1:2].isdigit():
            if name:
                yield name, "given"
            name, is_assigned, value = word.partition("=")
            if is_assigned:
                yield name, value
                name = ""
        elif name:
            yield name, word
            name = ""
        else:
            num_unnamed += 1
            yield f"number {num_unnamed}", word
    if name:
        yield name, "given"


def _add_event(run: RunFacts, event: Event) -> None:
    match event:
        case Surroundings():
            for fact in event.facts:
                run.put(str(fact.kind), fact.name, fact.value, event.rank)
        case SourceSeen():
            _add_source(run, event)
        case RankStarted():
            run.put(FactKind.VERSION, "Python", event.python, event.rank)
            run.put(FactKind.DEVICE, "host", event.hostname, event.rank)
        case ModelPlan(moment=Moment.START):
            for tensor in event.tensors:
                name = f"{event.model} {tensor.name}"
                run.put(PLAN, name, plan_text(tensor), event.rank)
        case _:
            _add_trace(run, event)


def _add_source(run: RunFacts, event: SourceSeen) -> None:
    if event.script:
        run.put(FactKind.CODE, "text of the script", event.script_digest)
        run.texts.setdefault("text of the script", event.script)
    if event.commit:
        run.put(FactKind.CODE, "commit", f"{event.commit[:12]} ({event.branch})")
        run.put(FactKind.CODE, "changes since the commit", event.changes_digest)
        run.texts.setdefault("changes since the commit", event.changes)


def plan_text(tensor: TensorPlan) -> str:
    """Return how a tensor is kept, in words."""
    placements = ", ".join(tensor.placements)
    mesh = f" over {tensor.mesh}" if tensor.mesh is not None else ""
    trained = "trained" if tensor.requires_grad else "frozen"
    words = (f"{tensor.dtype} {list(tensor.shape)}", trained, tensor.wrapper, placements + mesh)
    return ", ".join(filter(None, words))


def _add_trace(run: RunFacts, event: Event) -> None:
    rank = event.rank
    match event:
        case ModelFed():
            run.trace(f"data given to {event.model}", event.number, rank, _digest(event.inputs))
        case EpochFed():
            run.trace(f"order of {event.dataset}", event.number, rank, event.digest)
        case OptimizerState():
            rates = ", ".join(f"{rate:g}" for rate in event.learning_rates)
            run.trace(f"learning rate of {event.optimizer}", event.step, rank, rates)
        case ModelState(first=0):
            what = "gradients" if event.moment in (Moment.GRADIENT, Moment.BACKWARD) else "weights"
            if event.moment is Moment.EVALUATION:
                return
            step = _START if event.moment is Moment.START else event.step
            digests = [each.digest if each is not None else "" for each in event.contents]
            run.trace(f"{what} of {event.model}", step, rank, _digest(digests))


def _digest(parts: Iterable[str]) -> str:
    return xxhash.xxh3_64_hexdigest(" ".join(parts).encode())
