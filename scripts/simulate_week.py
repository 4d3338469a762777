#!/usr/bin/env python3
"""Say how the monitor's memory grows in a run that never ends, and whether it still finds faults.

    python scripts/simulate_week.py [--ranks 4] [--records 2000000] [--kinds files,shapes] [--trace]

Ranks without torch write what agents write, by the recorder and into event files, at full speed:
shapes, files, all-to-alls, call sites, groups, models, … that never come twice. The records are
read and judged as a monitor does. At the end ranks contradict each other, race and drift apart.
Exits with 1 if one of these is not found, if there is any other alarm, or if memory has passed
256 MiB.
"""

from __future__ import annotations

import argparse
import gc
import mmap
import sys
import tempfile
import time
import tracemalloc
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from distdiag.checks import load_checks
from distdiag.engine import Engine
from distdiag.events.base import CallSite, Frame
from distdiag.events.collectives import GroupCreated, ProcessGroup, Signature
from distdiag.events.data import EpochFed, MetricGiven, ModelFed, SamplerState, ScheduleState
from distdiag.events.files import FileAction, FileClosed, StoreCall
from distdiag.events.gradients import GradientSum, GradientSums
from distdiag.events.lifecycle import RankStarted, StepEnd
from distdiag.events.logged import Logged, LossNumbers, MemoryUse
from distdiag.events.losses import LossPass, LossWeights
from distdiag.events.models import (
    Content,
    ModelPlan,
    ModelState,
    Moment,
    OptimizerState,
    ReplicaEvidence,
    TensorPlan,
)
from distdiag.events.ranks import RankSet
from distdiag.events.routing import AuxLoss, Choice, Routing, TokensExchanged
from distdiag.findings.finding import Severity
from distdiag.record.event_file import ISSUED, WAITED
from distdiag.record.event_reader import EventReader
from distdiag.record.recorder import Recorder
from distdiag.record.status_page import StatusPage
from distdiag.record.wire import EventDecoder, Interner

MOST_BYTES: Final = 256 << 20
"""What the monitor may take, whatever a run does."""
MOST_SHOWN: Final = 25
PLANTED: Final = frozenset({"BAR001", "COL003", "REP003"})
FILE: Final = "/home/user/train.py"
LIBRARY: Final = Frame("/site-packages/torch/distributed/distributed_c10d.py", 10, "all", False)

Kind = Callable[["Week", int], None]


def site(line: int, function: str = "train") -> CallSite:
    """Return a place of the program."""
    return CallSite((LIBRARY, Frame(FILE, line, function)))


class Rank:
    """One rank that writes its records, and the part of a monitor that reads them."""

    def __init__(self, folder: Path, rank: int, interner: Interner) -> None:
        self.rank = rank
        self.recorder = Recorder(folder, rank, StatusPage(folder / f"rank-{rank}.status"))
        self.decoder = EventDecoder(rank, interner)
        self.reader = EventReader(folder, rank)
        self.calls: dict[str, int] = {}

    def call(self, group: ProcessGroup, signature: Signature, line: int) -> int:
        """Issue a collective or message, and wait for it."""
        recorder = self.recorder
        number = -1
        if signature.peer is None:
            number = self.calls.pop(group.name, 0)
            self.calls[group.name] = number + 1
            if len(self.calls) > 4:
                del self.calls[next(iter(self.calls))]  # that group is destroyed
        tables = recorder.tables
        # As the tap does: what repeats is written once.
        known_group = tables.groups.get(group.name)
        if known_group is None:
            known_group = recorder.define_group(group.name, group)
        known_signature = tables.signatures.get(signature)
        if known_signature is None:
            known_signature = recorder.define_signature(signature, signature)
        event = recorder.call(
            known_group, number, known_signature, self.site(line), False, None, signature.op
        )
        recorder.mark(event, ISSUED)
        recorder.mark(event, WAITED)
        return event

    def site(self, line: int) -> int:
        """Return the number of a place."""
        known = self.recorder.tables.sites.get(line)
        if known is None:
            known = self.recorder.define_site(
                line, site(line), api=None, is_own_call=True, kept_alive=None
            )
        return known.number

    def access(self, action: FileAction, path: str, line: int, *more: object) -> int:
        """Do something with a file."""
        return self.recorder.access(action, path, path, self.site(line), *more)

    def write(self, path: str, line: int) -> None:
        """Write a file and close it."""
        number = self.access(FileAction.WRITE, path, line, "open", "", True, False, None, True)
        self.recorder.event(FileClosed, access=number)

    def read(self, path: str, line: int) -> None:
        """Read a file and close it."""
        number = self.access(FileAction.READ, path, line, "open", "", True, False, None, True)
        self.recorder.event(FileClosed, access=number)


class Week:
    """A run of several ranks that goes on and on, and what a monitor makes of it."""

    def __init__(self, folder: Path, num_ranks: int, kinds: Sequence[str]) -> None:
        """Begin; each step does all of the `kinds`."""
        self.interner = Interner()
        self.ranks = [Rank(folder, rank, self.interner) for rank in range(num_ranks)]
        members = tuple(range(num_ranks))
        self.world = ProcessGroup("0", "default_pg", members, "gloo")
        checks = load_checks()
        self.engine = Engine([check() for check in checks.values()], RankSet(members))
        self.kinds = [KINDS[kind] for kind in kinds]
        self.num_records = self.num_steps = 0
        for rank in self.ranks:
            rank.recorder.event(
                RankStarted,
                local_rank=rank.rank,
                world_size=num_ranks,
                hostname="node",
                pid=1000 + rank.rank,
                python="3.12",
                command=("train.py",),
                unix_ns=time.time_ns(),
            )
            for done in (False, True):
                rank.recorder.event(
                    GroupCreated,
                    api="init_process_group",
                    ordinal=0,
                    scope=members,
                    ranks=members,
                    desc="default_pg",
                    generation=0,
                    site=site(1),
                    done=done,
                    backend="gloo",
                )

    def step(self) -> None:
        """Let all ranks take one step, read what they wrote, and look."""
        step = self.num_steps
        for kind in self.kinds:
            kind(self, step)
        for rank in self.ranks:
            rank.call(self.world, _ALL_REDUCE, 20)
            rank.recorder.event(StepEnd, duration_s=0.1, num_backwards=1)
            rank.recorder.step += 1
        self.num_steps += 1
        self.read()

    def read(self) -> None:
        """Take in what was written since."""
        for rank in self.ranks:
            for payload in rank.reader.payloads():
                self.num_records += 1
                event = rank.decoder.decode(payload)
                if event is not None:
                    self.engine.feed(event)
        self.engine.tick(time.monotonic_ns())

    def alarms(self) -> dict[str, str]:
        """Return what was found of warning or above, by code."""
        return {
            each.code: each.message
            for each in self.engine.findings
            if each.severity is not Severity.INFO
        }

    def plant(self) -> dict[str, str]:
        """Let ranks race, drift apart and contradict each other; return the new findings."""
        before = self.alarms()
        first, second = self.ranks[0], self.ranks[1]
        first.write("/data/planted.pt", 901)
        second.read("/data/planted.pt", 902)
        for rank in self.ranks:
            rank.call(self.world, _ALL_REDUCE, 20)
        self.read()
        for moment, digest in ((Moment.START, "c0"), (Moment.STEP, None), (Moment.STEP, None)):
            for rank in self.ranks:
                self._model(rank, "Planted", moment, digest or f"c{int(rank is second)}")
                rank.recorder.step += moment is Moment.STEP
        self.read()
        for rank in self.ranks:
            sizes = ((7 if rank is second else 8, 4),)
            signature = Signature("all_reduce", sizes, sizes, ("torch.float32",), "SUM")
            rank.call(self.world, signature, 903)
        self.read()
        self.engine.finish()
        return {code: text for code, text in self.alarms().items() if code not in before}

    def _model(self, rank: Rank, model: str, moment: Moment, digest: str) -> None:
        members = self.world.ranks
        plan = TensorPlan(
            "weight",
            (64, 64),
            "float32",
            requires_grad=True,
            wrapper="DDP",
            replicas=members,
            evidence=ReplicaEvidence.WRAPPER,
            owners=("SGD",),
        )
        place = {"model": model, "moment": moment, "first": 0, "total": 1, "site": site(30)}
        if moment is Moment.START:
            rank.recorder.event(ModelPlan, tensors=(plan,), **place)
        value = 1.0 + int(digest[1:], 16) % 97
        content = Content(digest, 4096, -value, value, value / 7)
        rank.recorder.event(ModelState, contents=(content,), **place)


_ALL_REDUCE: Final = Signature("all_reduce", ((8, 4),), ((8, 4),), ("torch.float32",), "SUM")


def _shapes(week: Week, step: int) -> None:
    """Call collectives of shapes that never come twice, alike on all ranks."""
    for rank in week.ranks:
        for more in range(3):
            sizes = ((step + 1, 3 + more),)
            rank.call(week.world, Signature("all_reduce", sizes, sizes, ("torch.float32",)), 40)


def _exchanges(week: Week, step: int) -> None:
    """All-to-alls of tokens whose splits are ragged, and other ones each time."""
    size = len(week.ranks)
    rows = [
        [(step * 7919 + a * 104729 + b * 1299709) % 997 for b in range(size)] for a in range(size)
    ]
    for rank in week.ranks:
        sent = tuple(rows[rank.rank])
        got = tuple(row[rank.rank] for row in rows)
        sizes = ((sum(sent), 64),), ((sum(got), 64),)
        signature = Signature(
            "all_to_all_single",
            *sizes,
            ("torch.float32",),
            input_splits=sent,
            output_splits=got,
        )
        call = rank.call(week.world, signature, 50)
        rank.recorder.event(
            TokensExchanged,
            model="MoE",
            layer="layers.0.mlp",
            ordinal=0,
            is_recompute=False,
            call=call,
            num_tokens=sum(sent),
            num_experts=8,
            k=1,
        )
        rank.recorder.event(
            Routing,
            model="MoE",
            layer="layers.0.mlp",
            members=(),
            call=0,
            number=0,
            is_recompute=False,
            is_random=False,
            choice=Choice("topk", sum(sent), 8, 1, "float32"),
            given=f"g{step}-{rank.rank}",
            scores=f"s{step}-{rank.rank}",
            chosen=f"c{step}-{rank.rank}",
            tie_share=0.0,
            near_share=0.0,
            load=None,
            site=site(51),
        )
        rank.recorder.event(
            AuxLoss,
            model="MoE",
            layer="layers.0.mlp",
            num_passes=1,
            num_computed=1,
            num_injected=0,
            num_used=1,
            coefficient="0.01",
            site=site(52),
        )


def _files(week: Week, step: int) -> None:
    """Files that are written, renamed, tested, locked, read and removed, each once."""
    for rank in week.ranks:
        own = f"/data/own/rank-{rank.rank}"
        rank.write(f"{own}/part-{step}.tmp", 60)
        target = f"{own}/part-{step}.pt"
        rank.access(FileAction.RENAME, target, 61, "os.replace", f"{own}/part-{step}.tmp", True)
        rank.read(f"/data/samples/{step}.bin", 62)
        rank.access(
            FileAction.TEST, f"/data/samples/{step}.idx", 63, "exists", "", True, False, True
        )
        lock = f"/data/locks/{step}.lock"
        rank.access(FileAction.LOCK, lock, 64, "flock", "", True)
        rank.access(FileAction.UNLOCK, lock, 65, "flock", "", True)
        rank.access(FileAction.LIST, f"/data/folders/{step}", 66, "listdir", "", True)
    first = week.ranks[0]
    folder = f"/data/checkpoints/step-{step}"
    number = first.access(
        FileAction.MAKE_DIR, folder, 67, "os.makedirs", "", True, False, None, True
    )
    first.recorder.event(FileClosed, access=number)
    first.write(f"{folder}/model.pt", 68)
    for rank in week.ranks:
        rank.call(week.world, _ALL_REDUCE, 69)
    for rank in week.ranks:
        rank.access(FileAction.TEST, f"{folder}/model.pt", 70, "exists", "", True, False, True)
        rank.read(f"{folder}/model.pt", 71)
    for rank in week.ranks:
        rank.call(week.world, _ALL_REDUCE, 72)
    if step > 2:
        gone = f"/data/checkpoints/step-{step - 2}"
        first.access(FileAction.REMOVE_TREE, gone, 73, "rmtree", "", True)


def _lonely_files(week: Week, step: int) -> None:
    """Files of ranks that never hear of one another in between: their order is never known."""
    for rank in week.ranks:
        own = f"/data/lonely/rank-{rank.rank}/{step}"
        rank.access(FileAction.TEST, own, 75, "exists", "", True, False, False)
        rank.write(own, 76)
        rank.access(FileAction.WRITE, f"{own}.lock", 77, "open", "", True, True)
        rank.access(FileAction.REMOVE, f"{own}.lock", 78, "unlink", "", True)


def _sites(week: Week, step: int) -> None:
    """Call from places that never come twice, as code that is made while it runs has."""
    for rank in week.ranks:
        rank.call(week.world, _ALL_REDUCE, 10_000 + step)
        rank.read("/data/vocabulary.json", 10_000_000 + step)


def _groups(week: Week, step: int) -> None:
    """Process groups that are made, used once and destroyed."""
    members = week.world.ranks
    group = ProcessGroup(f"g{step}", f"group {step}", members, "gloo")
    for rank in week.ranks:
        for done in (False, True):
            rank.recorder.event(
                GroupCreated,
                api="new_group",
                ordinal=step + 1,
                scope=members,
                ranks=members,
                desc=group.desc,
                generation=0,
                site=site(80),
                done=done,
                backend="gloo",
            )
        rank.call(group, _ALL_REDUCE, 81)


def _store(week: Week, step: int) -> None:
    """Keys of the store that are set by one rank and read by the others."""
    key = (f"key-{step}",)
    for rank in week.ranks:
        if rank.rank == 0:
            rank.recorder.event(StoreCall, action="set", store="job", keys=key, value=f"v{step}")
    for rank in week.ranks[1:]:
        call = {"action": "get", "store": "job", "keys": key, "value": f"v{step}", "done": True}
        rank.recorder.event(StoreCall, **call)


def _messages(week: Week, step: int) -> None:
    """Messages with tags that never come twice."""
    sizes = ((4,),)
    for rank in week.ranks[:2]:
        op = "send" if rank.rank == 0 else "recv"
        signature = Signature(op, sizes, sizes, ("torch.float32",), peer=1 - rank.rank, tag=step)
        rank.call(week.world, signature, 90)


def _models(week: Week, step: int) -> None:
    """Models, optimizers and their states that are begun anew again and again."""
    if step % 4:
        return
    for rank in week.ranks:
        model, optimizer = f"Net#{step}", f"SGD#{step}"
        for moment in (Moment.START, Moment.STEP):
            week._model(rank, model, moment, f"c{step:x}")
        for number in range(2):
            rank.recorder.event(OptimizerState, step=number, **_optimizer(optimizer, week))
        rank.recorder.event(
            GradientSums,
            model=model,
            gradients=(
                GradientSum(
                    "weight", 4096, (), 0, 1.0, ((1.0, 2.0),), (3.0,), (), (1.0, 2.0), 1e-7
                ),
            ),
            nodes=(),
            site=site(31),
        )
        rank.recorder.event(
            LossWeights,
            optimizer=optimizer,
            members=week.world.ranks,
            divisor=float(len(week.ranks)),
            passes=(LossPass("nll", "mean", 8, 8, 8, 1 / 8),),
            site=site(32),
        )


def _optimizer(name: str, week: Week) -> dict[str, Any]:
    return {
        "optimizer": name,
        "members": week.world.ranks,
        "num_backwards": 1,
        "num_gradients": 1,
        "num_steps": 1,
        "num_zero_steps": 0,
        "num_stale_states": 0,
        "num_stateless": 0,
        "stateless": (),
        "forgotten": (),
        "num_parameters": 1,
        "num_without_gradient": 0,
        "num_foreign": 0,
        "replaced": (),
        "learning_rates": (0.1,),
        "least_count": 1,
        "greatest_count": 1,
        "site": site(33),
    }


def _data(week: Week, step: int) -> None:
    """Loaders, schedules and metrics of names that never come twice, and what models are fed."""
    for rank in week.ranks:
        begin = rank.recorder.num_events
        rank.recorder.event(
            EpochFed,
            stream=f"Data#{step}",
            number=0,
            dataset="Data",
            num_samples=64,
            sampler=SamplerState(
                ("DistributedSampler",), step, 0, True, len(week.ranks), rank.rank
            ),
            num_indices=16,
            num_batches=4,
            digest=f"d{step}-{rank.rank}",
            first=(1, 2),
            indices=b"",
            contents=(),
            is_complete=True,
            is_ascending=False,
            last_digest="",
            last_epoch=None,
            epoch_before=None,
            num_before_training=0,
            num_backwards=4,
            members=week.world.ranks,
            site=site(100),
        )
        rank.recorder.event(
            ModelFed,
            model=f"Net#{step % 8}",
            number=step,
            members=week.world.ranks,
            inputs=(f"i{step}-{rank.rank}",),
            batch_sizes=(4,),
            stream=f"Data#{step}",
            batch=f"b{step}-{rank.rank}",
            num_batch=4,
            num_samples=64,
            samples=(f"s{step}-{rank.rank}",),
            num_local_norms=0,
            draws=(),
            begin=begin,
            end=begin + 1,
            site=site(101),
        )
        rank.recorder.event(
            ScheduleState,
            name=f"Cosine#{step}",
            num_advances=10,
            num_steps=10,
            least_pace=1,
            greatest_pace=1,
            peak_rate=0.1,
            last_rate=0.05,
            settled_at=10,
            site=site(102),
        )
        rank.recorder.event(
            MetricGiven, name=f"Plateau#{step}", number=0, value=1.0, site=site(103)
        )


def _numbers(week: Week, step: int) -> None:
    """Log names, and losses from lines, that never come twice, and samples of memory."""
    for rank in week.ranks:
        rank.recorder.event(
            Logged,
            logger="wandb.log",
            values=((f"loss/{step}", 1.0), ("loss", 2.0)),
            site=site(110),
        )
        rank.recorder.event(
            LossNumbers, loss=2.0, is_coarse=False, rate=0.1, site=site(200_000 + step)
        )
        rank.recorder.event(
            MemoryUse, memory="host", used_bytes=1 << 30, limit_bytes=1 << 36, num_batches=step
        )


KINDS: Final[dict[str, Kind]] = {
    "shapes": _shapes,
    "exchanges": _exchanges,
    "files": _files,
    "lonely-files": _lonely_files,
    "sites": _sites,
    "groups": _groups,
    "store": _store,
    "messages": _messages,
    "models": _models,
    "data": _data,
    "numbers": _numbers,
}


# What the monitor holds, table by table.


_FIXED: Final = (str, bytes, bytearray, tuple, mmap.mmap)
"""What has the length that it was made with."""


def tables(root: object, name: str) -> dict[str, int]:
    """Return how many entries each table holds that can be reached from an object, by its path.

    Tables of one attribute of many alike objects count as one. A deque that has a greatest length
    is none: it is full sooner or later.
    """
    found: dict[str, int] = {}
    seen: set[int] = set()
    pending: list[tuple[object, str]] = [(root, name)]
    while pending:
        value, path = pending.pop()
        if id(value) in seen or isinstance(value, msgspec.Struct):
            continue  # what events hold is bounded by the tables in which they are
        seen.add(id(value))
        is_table = isinstance(value, Collection) and not isinstance(value, _FIXED)
        if is_table and getattr(value, "maxlen", None) is None:
            found[path] = found.get(path, 0) + len(value)
        pending += [(child, path + more) for child, more in _parts(value)]
    return found


def _parts(value: object) -> Iterator[tuple[object, str]]:
    """Yield what an object of ours, or a table, holds."""
    if isinstance(value, Mapping):
        yield from ((each, "[]") for each in value.values())
    elif isinstance(value, (list, tuple, deque)):
        yield from (
            (each, f"[{type(each).__name__}]" if hasattr(each, "feed") else "[]") for each in value
        )
    if not type(value).__module__.startswith(("distdiag.", "__main__", __name__)):
        return
    for cls in type(value).__mro__:
        for slot in getattr(cls, "__slots__", ()):
            if hasattr(value, slot):
                yield getattr(value, slot), f".{slot}"
    yield from ((each, f".{key}") for key, each in getattr(value, "__dict__", {}).items())


def resident() -> int:
    """Return how much memory this process takes, in bytes."""
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * 4096


def main() -> int:
    """Simulate, and print how memory grows."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--records", type=int, default=2_000_000)
    parser.add_argument("--every", type=int, default=250_000, help="records between two lines")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--trace", action="store_true", help="say which lines allocate most")
    parser.add_argument("--tables", action="store_true", help="say which tables grow most")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="distdiag-week-") as folder:
        return run(given, Path(folder))


class Meter:
    """Prints now and then how much memory the process takes, and what has grown since."""

    def __init__(self, week: Week, *, shows_tables: bool, shows_lines: bool) -> None:
        self._week = week
        self._began_s = time.monotonic()
        self._tables = tables(week, "week") if shows_tables else None
        self._taken: tracemalloc.Snapshot | None = None
        if shows_lines:
            tracemalloc.start()
            self._taken = tracemalloc.take_snapshot()

    def show(self) -> None:
        """Print how it is now."""
        seconds = time.monotonic() - self._began_s
        print(
            f"{self._week.num_records:>10,} records {self._week.num_steps:>8,} steps "
            f"{seconds:6.0f} s {resident() / (1 << 20):7.0f} MiB",
            flush=True,
        )
        if self._tables is not None:
            before, self._tables = self._tables, tables(self._week, "week")
            growth = {path: size - before.get(path, 0) for path, size in self._tables.items()}
            for path in sorted(growth, key=lambda path: -growth[path])[:MOST_SHOWN]:
                if growth[path] > 0:
                    print(f"    +{growth[path]:>8,} = {self._tables[path]:>8,}  {path}")
        if self._taken is not None:
            gc.collect()
            before_lines, self._taken = self._taken, tracemalloc.take_snapshot()
            for each in self._taken.compare_to(before_lines, "lineno")[:MOST_SHOWN]:
                print(f"    {each}")


def run(given: argparse.Namespace, folder: Path) -> int:
    """Simulate in a folder; return the exit status."""
    week = Week(folder, given.ranks, given.kinds.split(","))
    meter = Meter(week, shows_tables=given.tables, shows_lines=given.trace)
    next_look = given.every
    while week.num_records < given.records:
        week.step()
        if week.num_records >= next_look:
            next_look += given.every
            meter.show()
    return judge(week)


def judge(week: Week) -> int:
    """Plant faults at the end, and print what was found; return the exit status."""
    size = resident()
    early = week.alarms()
    found = week.plant()
    for code, text in early.items():
        print(f"FALSE ALARM {code}: {text}")
    for code, text in found.items():
        print(f"found {code}: {text}")
    for what, why in sorted(week.engine.not_checked.items()):
        if "forgotten" in why:
            print(f"not checked {what}: {why}")
    print(f"resident: {size / (1 << 20):.0f} MiB")
    missed = PLANTED - found.keys()
    if missed:
        print(f"NOT FOUND: {', '.join(sorted(missed))}")
    return int(bool(missed or early or size > MOST_BYTES))


if __name__ == "__main__":
    sys.exit(main())
