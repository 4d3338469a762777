"""A run directory as real ranks leave it, of any number of ranks, with times that are made up."""

import json
import math
from pathlib import Path

from distdiag.events.base import CallSite, Frame, Phase
from distdiag.events.collectives import ProcessGroup, Signature
from distdiag.events.data import MetricGiven
from distdiag.events.lifecycle import Exited, Finished, Heartbeat, RankStarted, StepEnd, TorchLoaded
from distdiag.events.ranks import RankSet
from distdiag.events.routing import Choice, Load, Routing
from distdiag.events.stacks import Observed, Stacks, ThreadStack
from distdiag.findings.finding import (
    Evidence,
    Finding,
    Grade,
    Location,
    Outcome,
    RankInfo,
    Report,
    Run,
    Severity,
)
from distdiag.findings.report_json import encode_report
from distdiag.record.event_file import EventWriter
from distdiag.record.wire import (
    CallRecord,
    DefineFrame,
    DefineGroup,
    DefineSignature,
    DefineSite,
    StateRecord,
    encode,
)
from distdiag.transports.journal import Journal

STEP_NS = 100_000_000
PLACE = Frame("train.py", 41, "train_step")
MAIN = Frame("train.py", 90, "main")


class SyntheticRank:
    """Writes the event file of one rank."""

    def __init__(self, folder: Path, rank: int, world: int, text: str = "", **options):
        self.rank, self.world, self.text = rank, world, text
        self.folder = folder
        self.writer = EventWriter(folder, rank, on_forget=lambda: None, **options)
        self.seq = 0
        self.number = 0
        group = ProcessGroup("0", f"default_pg{text}", tuple(range(world)), "gloo")
        self.writer.define(encode(DefineGroup(0, group)))
        frames = [PLACE, Frame("train.py", 60, f"evaluate{text}"), MAIN]
        for number, frame in enumerate(frames):
            self.writer.define(encode(DefineFrame(number, frame)))
        for number, name in enumerate(["all_reduce", "barrier"]):
            sizes = ((1024, 8),) if name == "all_reduce" else ()
            signature = Signature(f"{name}{text}", sizes, (), ("float32",), None)
            self.writer.define(encode(DefineSignature(number, signature)))
            self.writer.define(encode(DefineSite(number, (number, 2), None)))
        self.event(
            RankStarted,
            0,
            local_rank=rank % 8,
            world_size=world,
            hostname=f"node{rank // 8}{text}",
            pid=1000 + rank,
            python="3.11",
            command=("train.py",),
            unix_ns=1_800_000_000_000_000_000,
        )
        self.event(TorchLoaded, 1000, torch="2.13.0", tap="dispatcher")

    def event(self, kind, time_ns, step=0, **fields):
        made = kind(rank=self.rank, seq=self.seq, time_ns=time_ns, step=step, **fields)
        self.seq += 1
        self.writer.append(encode(made))

    def call(self, time_ns, step, what=0, done_ns=0):
        number, self.number = self.seq, self.number + 1
        self.seq += 1
        record = CallRecord(
            number, time_ns, step, 0, self.number, what, what, bool(done_ns), None, None
        )
        self.writer.append(encode(record))
        self._state(time_ns + 1000, step, number, 0)
        if done_ns:
            self._state(done_ns, step, number, 1)

    def _state(self, time_ns, step, call, state):
        self.writer.append(encode(StateRecord(self.seq, time_ns, step, call, state)))
        self.seq += 1

    def step(self, step, calls):
        begin = 1_000_000_000 + step * STEP_NS + self.rank * 10_000
        for number in range(calls):
            at = begin + number * STEP_NS // (calls + 2)
            self.call(at, step, done_ns=at + STEP_NS // (calls + 3))
        end = begin + STEP_NS * 9 // 10
        loss = 2.0 * math.exp(-step / 50) + 0.01 * math.sin(step * 7 + self.rank)
        site = CallSite((PLACE, MAIN))
        self.event(
            MetricGiven, end, step, name=f"loss{self.text}", number=step, value=loss, site=site
        )
        if step % 10 == 0:
            self.event(Routing, end, step, **routing(step, site, self.text))
        self.event(StepEnd, end, step, duration_s=STEP_NS * 0.9 / 1e9, num_backwards=1)

    def close(self):
        """Give back the room that was set aside: hundreds of ranks would fill a small disk."""
        for path in self.folder.glob(f"rank-{self.rank}.*.events"):
            data = path.read_bytes().rstrip(b"\0")
            path.write_bytes(data + bytes(8))


def routing(step, site, text):
    return {
        "model": "model",
        "layer": f"layers.0.router{text}",
        "members": (),
        "call": 0,
        "number": 0,
        "is_recompute": False,
        "is_random": False,
        "choice": Choice("topk", 64, 8, 2, "float32"),
        "given": "",
        "scores": "",
        "chosen": "",
        "tie_share": 0.0,
        "near_share": 0.0,
        "load": Load(1.5 + step / 100, 0.1),
        "site": site,
    }


def write_run(root: Path, world: int, steps: int, *, calls: int = 4, text: str = "") -> Report:
    """Write a run whose last rank goes to a barrier a step too early, so that all stand still."""
    folder = root / "attempt-0"
    folder.mkdir(parents=True)
    for rank in range(world):
        writer = SyntheticRank(folder, rank, world, text)
        is_odd = rank == world - 1
        for step in range(steps - 1 if is_odd else steps):
            writer.step(step, calls)
        end = 1_000_000_000 + steps * STEP_NS
        writer.call(end, steps, what=1 if is_odd else 0)
        writer.close()
    _write_journal(folder, world, steps, text)
    report = make_report(world, steps, text)
    (root / "report.json").write_bytes(encode_report(report))
    return report


def write_healthy(root: Path, world: int, steps: int) -> Report:
    folder = root / "attempt-0"
    folder.mkdir(parents=True)
    for rank in range(world):
        writer = SyntheticRank(folder, rank, world)
        for step in range(steps):
            writer.step(step, 2)
        writer.event(Finished, 1_000_000_000 + steps * STEP_NS, steps, exit_status=0)
        writer.close()
    run = make_run(world, Outcome.FINISHED, fate="finished")
    return Report(complete=True, run=run, checked=("COL001", "COL011"))


def _write_journal(folder, world, steps, text):
    journal = Journal(folder / "monitor.journal")
    end = 1_000_000_000 + steps * STEP_NS
    for rank in range(world):
        fields = {"rank": rank, "seq": -1}
        for beat in range(3):
            at = end + beat * 1_000_000_000
            journal.write(
                Heartbeat(**fields, time_ns=at, step=steps, phase=Phase.SCRIPT, beat_ns=at)
            )
        place = Frame("train.py", 60, "evaluate") if rank == world - 1 else PLACE
        library = Frame("/x/site-packages/torch/distributed.py", 5, f"wait{text}", False)
        threads = (ThreadStack("MainThread", (library, place, MAIN)),)
        journal.write(Stacks(**fields, time_ns=end, source="py-spy", threads=threads))
        values = {"rss_bytes": (300 + rank) << 20}
        journal.write(Observed(**fields, time_ns=end, source="kernel", values=values))
        journal.write(Exited(**fields, time_ns=end + 3_000_000_000))


def make_run(world, outcome, *, fate="running", text=""):
    infos = tuple(
        RankInfo(
            rank=rank,
            local_rank=rank % 8,
            world_size=world,
            hostname=f"node{rank // 8}",
            pid=1000 + rank,
            fate=fate,
            last=f"all_reduce #9 in default_pg at train.py:41{text}",
        )
        for rank in range(world)
    )
    return Run(
        id="r1",
        command=("train.py", f"--epochs=3{text}"),
        world_size=world,
        ranks=infos,
        torch=f"2.13.0{text}",
        started="2026-01-01T12:00:00.000+00:00",
        ended="2026-01-01T12:00:07.000+00:00",
        outcome=outcome,
    )


def make_finding(world=2, steps=10, text="", **changes):
    location = Location(f"train.py{text}", 60, f"evaluate{text}", f"dist.barrier(){text}")
    everyone = RankSet(range(world - 1))
    fields = {
        "code": "COL011",
        "name": f"uneven-iterations{text}",
        "severity": Severity.ERROR,
        "grade": Grade.PROVEN,
        "confidence": 0.9,
        "message": f"rank {world - 1} left the loop early: it is in barrier{text}",
        "ranks": RankSet({world - 1}),
        "step": steps,
        "location": location,
        "subjects": (f"default_pg{text}",),
        "evidence": (
            Evidence(ranks=RankSet({world - 1}), summary=f"in barrier{text}", location=location),
            Evidence(ranks=everyone, summary="in all_reduce", values={f"step{text}": f"3{text}"}),
        ),
        "why": f"The extra pass has no partner.{text}",
        "fix": f"Decide together.{text}",
        "fix_changes": f"Ranks see other numbers of samples.{text}",
        "fix_leaves": f"Metrics.{text}",
        "disproof": f"Equally many calls.{text}",
    }
    return Finding(**(fields | changes))


def make_report(world, steps, text=""):
    findings = (
        make_finding(world, steps, text),
        make_finding(
            code="DAT001",
            name="repeated-data",
            severity=Severity.WARNING,
            message="all ranks read the same samples",
            ranks=RankSet(range(world)),
        ),
        make_finding(
            code="ENV001",
            name="versions",
            severity=Severity.INFO,
            grade=Grade.NOTE,
            message="a note about versions",
            ranks=RankSet(),
            location=None,
        ),
    )
    return Report(
        complete=True,
        run=make_run(world, Outcome.HUNG, text=text),
        findings=findings,
        checked=("COL001", "COL011", "DAT001"),
        not_checked={f"MOE001{text}": f"no router{text}"},
    )


def main():
    """Write a run for a person to look at: ``python -m tests.reports.synthetic_run DIR 64 100``."""
    import sys

    root, world, steps = sys.argv[1:]
    write_run(Path(root), int(world), int(steps))
    print(json.dumps({"ranks": int(world), "steps": int(steps)}))


if __name__ == "__main__":
    main()
