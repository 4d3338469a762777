"""Who has what a rank waits for: a process, a file that was left, a key, a thread, a person."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from distdiag.checks.shared.lock_blocks import awaited_lock, frame_with_lock
from distdiag.events.base import Frame
from distdiag.events.files import StoreCall
from distdiag.events.ranks import RankSet
from distdiag.events.stacks import Observed, ProcessSeen, ThreadStack
from distdiag.findings.descriptions import (
    at,
    exit_phrase,
    main_stack,
    user_location,
    whereabouts,
)
from distdiag.findings.finding import Evidence, Location
from distdiag.findings.source import location_of, loop_lines
from distdiag.views.rank_states import RankState, States

HOLDERS: Final = "holders"
"""The source of `Observed` that has who holds what a rank waits for, and the rank's children."""

MOST_KEYS: Final = 3
MOST_SHOWN: Final = 4
_MAIN: Final = "MainThread"


@dataclass(frozen=True, slots=True)
class Holder:
    """`text` says in a sentence without an end who has what is waited for; `fix` what to do."""

    text: str
    fix: str
    evidence: tuple[Evidence, ...] = ()


def holder_of(state: RankState, states: States) -> Holder | None:
    """Say who has what a rank waits for, or None if that is not known."""
    seen = state.observed.get(HOLDERS)
    outside = _by_kernel(state, states, seen) if seen is not None else None
    outside = outside or _unopened_pipe(state)
    found = unset_key(state, states) or outside or _by_thread(state)
    if found is None:
        found = _by_child(state, seen.processes if seen is not None else ())
    return found


def holding_ranks(state: RankState) -> RankSet:
    """Return the ranks that have, or started a process that has, what a rank waits for."""
    seen = state.observed.get(HOLDERS)
    if seen is None or ("asked_file" in seen.values and not _is_asking_here(state, seen)):
        return RankSet()
    owners = ((p.rank, p.parent_rank) for p in seen.processes if p.has_it)
    return RankSet(rank for pair in owners for rank in pair if rank not in (None, state.rank))


# The job's store

_NUMBER: Final = re.compile(r"\d+")


def is_in_store(state: RankState) -> bool:
    """Say whether a rank's main thread waits for a key where it last asked for one."""
    if state.asked is None:
        return False
    frames, stack = state.asked.frames, main_stack(state.stacks)
    here = user_location(stack)
    if here is None or not frames:
        return not stack
    return (here.file, here.line) == (frames[0].file, frames[0].line)


def unset_key(state: RankState, states: States) -> Holder | None:
    """Say for which key of the store a rank waits, and which keys like it were set, and where."""
    asked = state.asked
    if asked is None or not is_in_store(state):
        return None
    calls = [c for other in states.values() for c in other.published if c.store == asked.store]
    set_keys = {key for call in calls if call.action != "delete_key" for key in call.keys}
    missing = [key for key in asked.keys if key not in set_keys]
    where = f"the key {_quoted(missing or asked.keys)} of the store {asked.store}"
    if not missing:
        setter = next(c for c in reversed(calls) if set(c.keys) & set(asked.keys))
        place = _first_location(setter.frames)
        text = f"it waits for {where}, which rank {setter.rank} last touched{at(place)}"
        return Holder(
            text, f"Look whether a rank deleted the key, or set it in a different store{at(place)}."
        )
    alike = _alike(missing[0], calls)
    text = f"it waits for {where}, which no rank has set"
    evidence: tuple[Evidence, ...] = ()
    fix = (
        f"Call `store.set` for {_quoted(missing)} on the rank that has the value, on every path "
        "that leads to this wait."
    )
    if alike is not None:
        place = _first_location(alike.frames)
        text += f"; rank {alike.rank} set {_quoted(alike.keys)}{at(place)}"
        evidence = (_key_evidence(alike, place),)
        fix = (
            f"Use the same key in the line that sets such keys{at(place)} and in the line that "
            "waits."
        )
    return Holder(text, fix, evidence)


def _alike(key: str, calls: Iterable[StoreCall]) -> StoreCall | None:
    """Return the last call that sets a key which differs in its numbers only."""
    form = _NUMBER.sub("#", key)
    found = [c for c in calls if any(_NUMBER.sub("#", each) == form for each in c.keys)]
    return max(found, key=lambda call: call.time_ns, default=None)


def _key_evidence(call: StoreCall, place: Location | None) -> Evidence:
    summary = f"{call.action} of {_quoted(call.keys)}"
    return Evidence(ranks=RankSet([call.rank]), summary=summary, location=place)


def _quoted(keys: Iterable[str]) -> str:
    names = [f'"{key}"' for key in keys]
    more = f" and {len(names) - MOST_KEYS} more" if len(names) > MOST_KEYS else ""
    return ", ".join(names[:MOST_KEYS]) + more


def _first_location(frames: tuple[Frame, ...]) -> Location | None:
    return location_of(frames[0]) if frames else None


# Locks on files, files, pipes and terminals


def _by_kernel(state: RankState, states: States, seen: Observed) -> Holder | None:
    what, name = str(seen.values.get("waits_for", "")), str(seen.values.get("name", ""))
    if "asked_file" in seen.values and not _is_asking_here(state, seen):
        return None
    match what:
        case "lock":
            return _locked(seen, states, name)
        case "lock-file":
            return _left_file(seen, states, name)
        case "file":
            return _absent_file(state, states, name)
        case "folder":
            return _listed_folder(state, states, name)
        case "terminal":
            return Holder(
                f"it asks a person, and nobody answers at the terminal {name}",
                "Take the answer from a command-line option: nobody sees what a rank asks. Or "
                "answer at that terminal.",
            )
        case "input":
            return _input(seen, states, name)
        case "pipe":
            return _pipe(state, seen, states)
        case _:
            return None


def _is_asking_here(state: RankState, seen: Observed) -> bool:
    """Say whether the function that sleeps is the one that asks, at the same line or in its loop.

    Whoever has used a file and sleeps for another reason does so in another function.
    """
    stack = main_stack(state.stacks)
    here = next((frame for frame in stack if frame.user), None)
    asked = seen.values.get("asked_file"), seen.values.get("asked_line")
    if here is None or asked[0] != here.file or not isinstance(asked[1], int):
        return False
    line = Frame(here.file, asked[1], here.function, user=True)
    loops = loop_lines(here, with_head=True) & loop_lines(line, with_head=True)
    if here.line != line.line and not loops:
        return False
    by = str(seen.values.get("asked_by", "")).splitlines()
    # One that is awake is looked at in the middle of asking: its innermost frame may be any.
    frames = stack if _is_awake(state) else stack[:1]
    return any(f"{frame.file}:{frame.function}" in by for frame in frames)


def _is_awake(state: RankState) -> bool:
    threads = state.stacks.threads if state.stacks is not None else ()
    return any(thread.active for thread in threads if thread.name == _MAIN)


def _locked(seen: Observed, states: States, path: str) -> Holder:
    who = [each for each in seen.processes if each.has_it]
    evidence = tuple(_process_evidence(seen.rank, each) for each in who[:MOST_SHOWN])
    taker = seen.values.get("locked_by_pid")
    if not who:
        return Holder(
            f"{path} is locked, and no process of this node that can be seen has the lock",
            f"Run `lslocks` on the other nodes that mount {path} to find the process that has the "
            "lock.",
        )
    first = who[0]
    text = f"{path} is locked by {_described(first, states)}"
    if taker:
        text += f"; it inherited the open file from {_by_pid(int(taker), states)}"
        return Holder(
            text,
            "Close or unlock the file before the program starts processes, or start them with the "
            "method `spawn`: the lock lives as long as any of these processes has the file open.",
            evidence,
        )
    if first.rank is not None:
        fix = (
            "Release the lock before the collective: a rank that waits for other ranks must not "
            "hold a lock that they need."
        )
    else:
        fix = f"Let process {first.pid} release the lock, or end it. Give the wait a timeout."
    return Holder(text, fix, evidence)


def _by_pid(pid: int, states: States) -> str:
    started = (state.started for state in states.values())
    ranks = [each.rank for each in started if each is not None and each.pid == pid]
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"process {pid}"


def _left_file(seen: Observed, states: States, path: str) -> Holder:
    age_s, pid = seen.values.get("age_s"), seen.values.get("owner_pid")
    age = f" since {_duration(age_s)}" if isinstance(age_s, int | float) else ""
    host = str(seen.values.get("owner_host", ""))
    owner = next((each for each in seen.processes if each.has_it), None)
    text = f"the lock file {path} is there{age}, and "
    if owner is not None:
        text += f"names {_described(owner, states)}"
        evidence = (_process_evidence(seen.rank, owner),)
        return Holder(text, f"Let process {owner.pid} end, or end it.", evidence)
    if not pid:
        text += "no process of this node has it locked"
    else:
        place = f" on {host}" if host else ""
        text += f"was made by process {pid}{place}, which does not run on this node"
    return Holder(
        text,
        f"Make sure that no process on any node still uses this lock, and remove the file: "
        f"rm {path}",
    )


def _absent_file(state: RankState, states: States, path: str) -> Holder:
    text = f"it asks again and again for {path}, which is not there"
    fix = f"Find out which process should create {path}, and whether it uses this path."
    others = [m for each in states.values() if each.rank != state.rank for m in each.made]
    name, form = path.rpartition("/")[2], _NUMBER.sub("#", path)
    alike = [m for m in others if m.path.rpartition("/")[2] == name]
    alike = alike or [m for m in others if _NUMBER.sub("#", m.path) == form]
    if not alike:
        return Holder(text, fix)
    made = max(alike, key=lambda each: each.time_ns)
    place = user_location(made.site.frames)
    if made.path == path:
        return Holder(f"{text}, though rank {made.rank} made it{at(place)}", fix)
    fix = f"Let the line that makes such files{at(place)} and the one that waits use one name."
    evidence = Evidence(ranks=RankSet([made.rank]), summary=f"made {made.path}", location=place)
    return Holder(f"{text}; rank {made.rank} made {made.path}{at(place)}", fix, (evidence,))


def _listed_folder(state: RankState, states: States, path: str) -> Holder:
    text = f"it lists {path} again and again"
    fix = f"Find out what should come into {path}, and who should put it there."
    for other in states.values():
        seen = other.observed.get(HOLDERS)
        values = seen.values if seen is not None else {}
        listed = str(values.get("name", ""))
        if values.get("waits_for") == "folder" and listed != path and other.rank != state.rank:
            text += f", while rank {other.rank} lists {listed}"
            fix = "Let one rank choose the name of the folder, and give it to the others."
            break
    return Holder(text, fix)


def _duration(seconds: float) -> str:
    units = ((86_400, "d"), (3600, "h"), (60, "min"))
    size, unit = next(((s, u) for s, u in units if seconds >= 2 * s), (1, "s"))
    return f"{seconds // size:.0f} {unit}"


def _input(seen: Observed, states: States, name: str) -> Holder:
    who = next((each for each in seen.processes if each.has_it), None)
    whose = f", which {_described(who, states)} writes to" if who is not None else ""
    return Holder(
        f"it waits for an answer on its standard input ({name}){whose}",
        "Take the answer from a command-line option. Or start the job with `< /dev/null`, so that "
        "the question becomes an error with a line.",
        (_process_evidence(seen.rank, who),) if who is not None else (),
    )


def _pipe(state: RankState, seen: Observed, states: States) -> Holder | None:
    who = [each for each in seen.processes if each.has_it]
    dead = _dead_child(state, seen.processes)
    verb = "write to" if seen.values.get("way") == "read" else "read from"
    if dead is not None:
        return dead
    if not who:
        return Holder(
            f"no other process has the other end of the pipe that it waits for: nobody will {verb} "
            "it",
            "Find out why the process at the other end has ended. After the start of that process, "
            "close the rank's copy of its end of the pipe, so that the rank notices when it ends.",
        )
    evidence = tuple(_process_evidence(seen.rank, each) for each in who[:MOST_SHOWN])
    first = min(who, key=lambda each: not each.threads)
    text = f"{_described(first, states)} has the other end of the pipe that it waits for"
    return Holder(text, _fix_of_full_pipe(first) or _fix_of_child(first), evidence)


_FULL_PIPE: Final = re.compile(r"in write of pipe:")


def _fix_of_full_pipe(process: ProcessSeen) -> str:
    """Return what to do about a process that cannot answer, since nobody reads what it writes."""
    if not _FULL_PIPE.search(process.doing):
        return ""
    return (
        f"Process {process.pid} cannot go on: it writes into a second pipe, which is full, and "
        "nobody reads that pipe. If the rank started it with `stdout=PIPE` and `stderr=PIPE`, read "
        "both at the same time (`communicate()`, or a thread for each). Or send the output that "
        "you do not need to `DEVNULL`."
    )


_WAIT_FOR_PARTNER: Final = "wait_for_partner"
"""The function of the Linux kernel in which the opening of a named pipe waits (``fs/pipe.c``)."""


def _unopened_pipe(state: RankState) -> Holder | None:
    kernel = state.observed.get("kernel")
    if kernel is None or kernel.values.get("wchan") != _WAIT_FOR_PARTNER:
        return None
    path = kernel.values.get("blocked_on", "")
    return Holder(
        f"{path or 'what it opens'} is a named pipe, and no process has its other end open",
        "Start the process that should open the other end of the pipe. If you expect a normal file "
        "here, replace the pipe by that file: `ls -l` marks a pipe with a `p`.",
    )


# Threads


def _by_thread(state: RankState) -> Holder | None:
    stack = main_stack(state.stacks)
    lock = awaited_lock(stack)
    threads = state.stacks.threads if state.stacks is not None else ()
    others = [thread for thread in threads if thread.name != _MAIN]
    if not lock or not others:
        return None
    for thread in others:
        frame = frame_with_lock(thread.frames, lock, stack[0].file)
        if frame is not None:
            here = user_location(thread.frames)
            inside = location_of(frame)
            where = "" if here == inside else f", inside the block at {inside}"
            return Holder(
                f"its thread {thread.name} has the lock `{lock}`, and is{at(here)}{where}",
                f"Release `{lock}` before the thread {thread.name} waits{at(here)}, or take the "
                "locks in the same order in all threads.",
                (
                    Evidence(
                        ranks=RankSet([state.rank]),
                        summary=f"thread {thread.name} holds `{lock}`",
                        values={"stack": stack_text(thread)},
                        location=here,
                    ),
                ),
            )
    return None


# Child processes

_OF_CHILDREN: Final = (
    "multiprocessing/",
    "concurrent/futures/process.py",
    "/subprocess.py",
    "torch/utils/data/",
)
_HELPERS: Final = ("multiprocessing.resource_tracker", "multiprocessing.semaphore_tracker")
"""What the interpreter starts for itself, which waits for all others."""


def _by_child(state: RankState, processes: Iterable[ProcessSeen]) -> Holder | None:
    stack = main_stack(state.stacks)
    if not any(not f.user and any(part in f.file for part in _OF_CHILDREN) for f in stack):
        return None
    dead = _dead_child(state, processes)
    if dead is not None:
        return dead
    children = [
        each
        for each in processes
        if each.parent_rank == state.rank and not any(name in each.command for name in _HELPERS)
    ]
    if not children:
        return None
    children.sort(key=lambda each: (not _inherited_lock(each), not each.threads))
    first = children[0]
    evidence = tuple(_process_evidence(state.rank, each) for each in children[:MOST_SHOWN])
    more = f" (one of {len(children)} child processes)" if len(children) > 1 else ""
    text = f"its child process {_name_of(first)}{more} is {_what_it_does(first)}"
    return Holder(text, _fix_of_child(first), evidence)


def _dead_child(state: RankState, processes: Iterable[ProcessSeen]) -> Holder | None:
    """Say which child has ended badly, so that its answer will not come."""
    zombies = [p for p in processes if p.exit_status and p.parent_rank == state.rank]
    if zombies:
        first = zombies[0]
        who, status = _name_of(first), first.exit_status
    elif state.dead_children:
        who, status = str(state.dead_children[-1].pid), state.dead_children[-1].status
    else:
        return None
    ending = "was ended" if status is not None and status < 0 else "has ended"
    text = (
        f"its child process {who} {ending}{exit_phrase(status)}, and what it had to answer is lost"
    )
    return Holder(
        text,
        "Find out what ended the process (SIGKILL mostly comes from the kernel when memory runs "
        "out). Use the pools of `concurrent.futures`, which raise when a worker dies, or give the "
        "wait a timeout.",
        (
            Evidence(
                ranks=RankSet([state.rank]),
                summary=f"child process {who} {ending}{exit_phrase(status)}",
            ),
        ),
    )


def _inherited_lock(process: ProcessSeen) -> str:
    """Return the lock that a forked process waits for and that none of its threads has."""
    stack = next((t.frames for t in process.threads if t.name == _MAIN), ())
    lock = awaited_lock(stack) if process.is_forked else ""
    others = (t.frames for t in process.threads if t.name != _MAIN)
    if not lock or any(frame_with_lock(frames, lock, stack[0].file) for frames in others):
        return ""
    return lock


def _what_it_does(process: ProcessSeen) -> str:
    place = _place_of(process)
    lock = _inherited_lock(process)
    if lock:
        return (
            f"waiting for the lock `{lock}`{at(place)}, which no thread of that process has: a "
            "thread of the rank had it when the process was forked"
        )
    return f"{process.doing}{at(place)}"


def _fix_of_child(process: ProcessSeen) -> str:
    if _inherited_lock(process):
        return (
            "Start processes before threads, or by spawn instead of fork: a forked process gets a "
            "held lock, but not the thread that would release it."
        )
    return (
        f"Find out what process {process.pid} waits for{at(_place_of(process))}, and give the wait "
        "for it a timeout."
    )


# What is said of a process


def _described(process: ProcessSeen, states: States) -> str:
    """Return who a process is and what it does."""
    if process.rank is not None and process.rank in states:
        return f"rank {process.rank}, which {whereabouts(states[process.rank])}"
    way = "forked from" if process.is_forked else "started by"
    whose = f" ({way} rank {process.parent_rank})" if process.parent_rank is not None else ""
    return (
        f"process {_name_of(process, _LONGEST_COMMAND)}{whose}, which is {_what_it_does(process)}"
    )


_LONGEST_COMMAND: Final = 60
"""A message has so many characters of a command; its evidence has the rest."""


def _name_of(process: ProcessSeen, longest: int | None = None) -> str:
    """Return the pid and the command; a fork has that of its rank, which says nothing."""
    command = process.command
    if longest is not None and len(command) > longest:
        command = f"{command[:longest].rpartition(' ')[0] or command[:longest]} …"
    return str(process.pid) if process.is_forked else f"{process.pid} `{command}`"


def _process_evidence(rank: int, process: ProcessSeen) -> Evidence:
    what = "holds what the rank waits for" if process.has_it else "is a child process"
    stacks = {f"stack of {thread.name}": stack_text(thread) for thread in process.threads}
    return Evidence(
        ranks=RankSet([rank]),
        summary=f"process {_name_of(process)} {what}: {process.doing}",
        values={"pid": process.pid, "command": process.command, **stacks},
        location=_place_of(process),
    )


def _place_of(process: ProcessSeen) -> Location | None:
    threads = sorted(process.threads, key=lambda thread: thread.name != _MAIN)
    places: Iterator[Location | None] = (user_location(thread.frames) for thread in threads)
    return next((place for place in places if place is not None), None)


def stack_text(thread: ThreadStack) -> str:
    """Return the frames of a thread in one line, innermost first."""
    return " < ".join(f"{frame.function} {frame.file}:{frame.line}" for frame in thread.frames)
