"""Builds what the engine would show to a check, from the calls that each rank made."""

import re
from collections import Counter
from dataclasses import replace
from itertools import count
from textwrap import dedent

from distdiag.events.base import CallSite, Frame, Phase
from distdiag.events.checkpoints import (
    LoadWasted,
    StateRestored,
    StateSaved,
    TrainingResumed,
    WeightsLoaded,
)
from distdiag.events.collectives import Collective, GroupCreated, ProcessGroup, Signature
from distdiag.events.data import EpochFed, RowsGathered, ScheduleState
from distdiag.events.files import FileAccess
from distdiag.events.lifecycle import Raised, SteppedAlone
from distdiag.events.models import OptimizerState, SliceSaved
from distdiag.events.random import RandomDraw, RandomState
from distdiag.events.ranks import RankSet
from distdiag.events.sequences import TokenTrace
from distdiag.events.stacks import Observed, Stacks, ThreadStack
from distdiag.views.alignment import (
    Alignment,
    CollectiveView,
    FileTestView,
    GatheredRowsView,
    GroupView,
    LoadWastedView,
    LoneStepsView,
    OpenCollective,
    OpenGroup,
    OptimizerView,
    RandomView,
    RankStateView,
    ResumeView,
    SampledEpochView,
    ScheduleView,
    SliceSaveView,
    TokenTraceView,
    WeightsLoadedView,
)
from distdiag.views.rank_states import JobView, RankState, RankStatus

TORCH = Frame("/site-packages/torch/distributed/distributed_c10d.py", 1, "all_reduce", user=False)


_SEQS = count(1)


def event_of(kind, rank=0, **values):
    """An event of a rank, whose number and time say nothing unless they are given."""
    return kind(**{"rank": rank, "seq": next(_SEQS), "time_ns": 0, **values})


class Program:
    """A user's script on disk, whose lines are named by a piece of their text."""

    def __init__(self, folder, code):
        self.lines = dedent(code).strip("\n").splitlines()
        self.path = folder / "train.py"
        self.path.write_text("\n".join(self.lines) + "\n")

    def line(self, text):
        (number,) = [n for n, line in enumerate(self.lines, 1) if text in line]
        return number

    def frame(self, text):
        number = self.line(text)
        names = [re.match(r"\s*def (\w+)", line) for line in self.lines[: number - 1]]
        return Frame(str(self.path), number, next((m[1] for m in reversed(names) if m), "<module>"))

    def site(self, *texts, module=None):
        """The call site with these lines, innermost first."""
        return CallSite((TORCH, *(self.frame(text) for text in texts)), module)


def plain_site(line, file="train.py", function="main", module=None):
    """A call site in a file that cannot be read."""
    return CallSite((TORCH, Frame(file, line, function)), module)


def signature(op="all_reduce", numel=4, **values):
    values.setdefault("dtypes", ("float32",))
    values.setdefault("input_sizes", ((numel,),))
    return Signature(op, **values)


class Job:
    """The calls and states of all ranks; `parted` is kept as the engine keeps it."""

    def __init__(self, num_ranks=2):
        self.world = RankSet(range(num_ranks))
        self.calls = {rank: [] for rank in self.world}
        self.states = {
            r: RankState(r, status=RankStatus.RUNNING, phase=Phase.SCRIPT) for r in self.world
        }
        self.trigger = None

    def group(self, ranks=None, name="default_pg"):
        return ProcessGroup(name, name, tuple(ranks or self.world), "gloo")

    def call(self, rank, site=None, op="all_reduce", *, group=None, sign=None, **values):
        """Let one rank make a call."""
        group = group or self.group()
        sign = sign or signature(op)
        earlier = [c for c in self.calls[rank] if c.group.name == group.name]
        is_message = sign.peer is not None
        call = event_of(
            Collective,
            rank,
            seq=len(self.calls[rank]),
            time_ns=len(self.calls[rank]) * 1000,
            step=values.pop("step", 0),
            group=group,
            collective_seq_id=-1 if is_message else len(earlier),
            signature=sign,
            site=site or plain_site(10),
            **values,
        )
        self.calls[rank].append(call)
        return call

    def every(self, site=None, op="all_reduce", **values):
        """Let all ranks make the same call."""
        for rank in self.world:
            self.call(rank, site, op, **values)

    def set(self, *ranks, **values):
        for rank in ranks:
            self.states[rank] = replace(self.states[rank], **values)

    def fail(self, rank, left_ns=1, *frames, kind="ValueError", message="bad", traceback=""):
        """Let a rank raise at these frames, the innermost first."""
        text = traceback or f"Traceback …\n{kind}: {message}"
        values = {"type": kind, "message": message, "frames": frames, "traceback": text}
        failed = event_of(Raised, rank, **values)
        self.set(rank, status=RankStatus.RAISED, raised=failed, left_ns=left_ns)

    def lose_peer(self, rank, left_ns, message="Connection closed by peer"):
        """Let a rank raise what a collective raises when another rank is gone."""
        self.fail(rank, left_ns, TORCH, kind="RuntimeError", message=message)

    def view(self, waiting=None):
        """The job as it is now. By default a rank waits in its last unmatched call."""
        return JobView({rank: self._state(rank, waiting) for rank in self.world})

    def _state(self, rank, waiting):
        calls = self.calls[rank]
        mine = tuple(c for c in calls if not self._is_complete(c)) if waiting is None else waiting
        given = self.states[rank]
        left = given.status is not RankStatus.RUNNING
        return replace(
            given,
            last_call=calls[-1] if calls else None,
            last_call_state=given.last_call_state or ("issued" if calls else ""),
            recent=tuple(calls[-64:]),
            waiting=() if left else tuple(c for c in mine if c.rank == rank),
            site_counts=Counter(call.site for call in calls),
        )

    def _is_complete(self, call):
        ranks = [r for r in call.group.ranks if self._at(r, call.group, call.collective_seq_id)]
        return call.collective_seq_id >= 0 and len(ranks) == len(call.group.ranks)

    def _at(self, rank, group, seq_id):
        calls = [c for c in self.calls[rank] if c.group.name == group.name]
        return next((c for c in calls if c.collective_seq_id == seq_id), None)

    def alignment(self, seq_id=None, *, group=None, trigger=None):
        """The point of a group with this number, by default the last one."""
        group = group or self.group()
        if seq_id is None:
            seq_id = max(c.collective_seq_id for cs in self.calls.values() for c in cs)
        parted = None
        for number in range(seq_id + 1):
            here = {r: self._at(r, group, number) for r in group.ranks}
            by_rank = {rank: call for rank, call in here.items() if call is not None}
            sites = {(c.site.user_frames, c.site.module) for c in by_rank.values()}
            point = Alignment("collective", (group.label, number), by_rank, RankSet(group.ranks))
            parted = None if len(sites) < 2 and all(here.values()) else parted
            if len(sites) > 1:
                parted = parted or point
        return self._shown(replace(point, parted=parted), trigger)

    def message(self, *calls, expected=(0, 1), trigger=None):
        """A send and its receive, or one of them."""
        by_rank = {call.rank: call for call in calls}
        key = ("default_pg", *expected, 0, 0)
        return self._shown(Alignment("message", key, by_rank, RankSet(expected)), trigger)

    def creation(self, calls, trigger=None):
        """A call that creates a group, by rank: (ranks asked for, site) and optionally more."""
        by_rank = {}
        for rank, (ranks, site, *more) in calls.items():
            values = {"desc": "", "api": "new_group"} | (more[0] if more else {})
            by_rank[rank] = event_of(
                GroupCreated,
                rank,
                ordinal=0,
                scope=tuple(self.world),
                ranks=tuple(ranks),
                generation=0,
                site=site,
                **values,
            )
        return self._shown(Alignment("group", (0,), by_rank, self.world), trigger)

    def _shown(self, point, trigger):
        """The view of a point: an open one has a trigger, and no other has one."""
        assert bool(point.missing_ranks) == (trigger is not None)
        complete, opened = {
            "collective": (CollectiveView, OpenCollective),
            "message": (CollectiveView, OpenCollective),
            "group": (GroupView, OpenGroup),
        }[point.kind]
        return point.show_as(opened if trigger else complete, self.view().states, trigger)


MOMENTS = {
    EpochFed: (SampledEpochView, "data"),
    FileAccess: (FileTestView, "test"),
    LoadWasted: (LoadWastedView, "load"),
    OptimizerState: (OptimizerView, "optimizer"),
    RandomDraw: (RandomView, "random"),
    RandomState: (RandomView, "random"),
    RowsGathered: (GatheredRowsView, "data"),
    ScheduleState: (ScheduleView, "data"),
    SliceSaved: (SliceSaveView, "save"),
    StateRestored: (RankStateView, "load"),
    StateSaved: (RankStateView, "load"),
    SteppedAlone: (LoneStepsView, "step"),
    TokenTrace: (TokenTraceView, "data"),
    TrainingResumed: (ResumeView, "load"),
    WeightsLoaded: (WeightsLoadedView, "load"),
}


def together(*events, expected=None, **values):
    """The same moment on these ranks, as the view that checks are shown of such events."""
    view, kind = MOMENTS[type(events[0])]
    by_rank = {event.rank: event for event in events}
    return view(kind, ("x",), by_rank, RankSet(expected or by_rank), **values)


def stacks(rank, *frames):
    thread = ThreadStack("MainThread", frames)
    return event_of(Stacks, rank, source="py-spy", threads=(thread,))


def kernel(rank, syscall="", blocked_on="", state="S"):
    """What the kernel says of a rank's main thread."""
    values = {"state": state, "syscall": syscall, "blocked_on": blocked_on}
    values["doing"] = f"sleeping in {syscall} of {blocked_on}"
    seen = event_of(Observed, rank, source="kernel", summary="", values=values)
    return {"kernel": seen}


def library(file, function, line=1):
    """A frame of a library's or of Python's own file."""
    return Frame(f"/usr/lib/python3/site-packages/{file}", line, function, user=False)
