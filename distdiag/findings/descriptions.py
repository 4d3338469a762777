"""How calls, places and the states of ranks read in the message of a finding."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from signal import Signals

from distdiag.events.base import Frame, Phase
from distdiag.events.collectives import UNNUMBERED, Collective
from distdiag.events.models import ObjectKind
from distdiag.events.ranks import RankSet
from distdiag.events.stacks import Stacks
from distdiag.findings.finding import Location
from distdiag.findings.source import location_of
from distdiag.views.rank_states import Help, RankState, RankStatus, was_asked_to_end

LAST_ERROR = "Last error:"
TRACEBACK_HEAD = "Traceback (most recent call last):"
"""NCCL's own words for what went wrong come after it, on a line of their own."""
MENTIONED_S = 0.1
MENTIONED_BYTES = 1 << 20
"""Less than this would show as 0.0 in a message, and is left out."""

MOST_NAMED = 4
"""Of processes that have names only, so many are named."""
MOST_GROUPS = 3
"""So many groups are named in which a rank has come to some call."""

_PLURALS = {
    "is": "are",
    "was": "were",
    "has": "have",
    "waits": "wait",
    "holds": "hold",
    "trains": "train",
}


def agree(words: str, ranks: RankSet) -> str:
    """Put the verb that the words begin with into the plural for several ranks."""
    verb, _, rest = words.partition(" ")
    several = _PLURALS.get(verb, verb) if len(ranks) > 1 else verb
    return f"{several} {rest}" if rest else several


def who(ranks: Iterable[int], states: Mapping[int, RankState]) -> str:
    """Return ``rank 3`` or ``ranks 0-2``, with the names of processes whose ranks are not known."""
    named = {rank: states[rank].label for rank in ranks if rank in states and states[rank].label}
    known = RankSet(set(ranks) - named.keys())
    names = [*([known.phrase()] if known else []), *sorted(named.values())[:MOST_NAMED]]
    more = len(named) - MOST_NAMED
    return ", ".join(names) + (f" and {more} more processes" if more > 0 else "")


def call_phrase(call: Collective) -> str:
    """Return ``all_reduce #12 in group dp``, or ``send to rank 1 with tag 0 in group dp``."""
    signature = call.signature
    if signature.peer is None:
        return f"{signature.op}{number_phrase(call)} in group {call.group.label}"
    way = "from" if "recv" in signature.op else "to"
    tag = f" with tag {signature.tag}" if signature.tag else ""
    return f"{signature.op} {way} rank {signature.peer}{tag} in group {call.group.label}"


def number_phrase(call: Collective) -> str:
    """Return `` #12``, or nothing where nobody told the number of the call in its group."""
    return "" if call.collective_seq_id == UNNUMBERED else f" #{call.collective_seq_id}"


def sizes_phrase(call: Collective) -> str:
    """Return the sizes and dtypes that a call asks for, without those that it has not."""
    signature = call.signature
    parts = []
    if signature.input_sizes:
        parts.append(f"input sizes {_sizes(signature.input_sizes)}")
    if signature.output_sizes:
        parts.append(f"output sizes {_sizes(signature.output_sizes)}")
    if signature.input_splits or signature.output_splits:
        parts.append(
            f"splits {list(signature.input_splits)} in, {list(signature.output_splits)} out"
        )
    if signature.dtypes:
        parts.append("dtype " + "/".join(dict.fromkeys(signature.dtypes)))
    return ", ".join(parts) or "no tensors"


def call_location(call: Collective) -> Location | None:
    """Return the innermost line of the user's code that made the call."""
    frame = call.site.location
    return location_of(frame) if frame is not None else None


def at(location: Location | None) -> str:
    """Return `` at train.py:12``, or nothing where the place is not known."""
    return f" at {location}" if location is not None else ""


def made_here(kind: ObjectKind, name: str) -> str:
    """Return the summary of evidence whose location is the line that made what a finding names."""
    return f"{kind} {name}: made here"


def main_stack(stacks: Stacks | None) -> tuple[Frame, ...]:
    """Return the frames of the thread that runs the script, innermost first.

    Of a process that `multiprocessing` has forked they are its own, without those of its parent.
    """
    threads = stacks.threads if stacks is not None else ()
    main = [thread for thread in threads if thread.name == "MainThread"]
    with_user = [t for t in threads if any(frame.user for frame in t.frames)]
    frames = next((thread.frames for thread in [*main, *with_user]), ())
    begins = (n for n, frame in enumerate(frames, 1) if _begins_process(frame))
    return frames[: next(begins, len(frames))]


def _begins_process(frame: Frame) -> bool:
    return frame.function == "_bootstrap" and frame.file.endswith("multiprocessing/process.py")


def other_threads(state: RankState) -> list[tuple[str, Location]]:
    """Return the threads beside the main one that run the user's code, with the line."""
    threads = state.stacks.threads if state.stacks is not None else ()
    places = [(t.name, user_location(t.frames)) for t in threads if t.name != "MainThread"]
    return [(name, place) for name, place in places if place is not None]


def blocking_call(state: RankState) -> Collective | None:
    """Return the call that keeps the rank's host from going on, if one does."""
    if state.status is not RankStatus.RUNNING:
        return None
    held = [call for call in state.waiting if state.is_known_in(call)]
    if held:
        return held[0]
    last = state.last_call or (state.waiting[-1] if state.waiting else None)
    if last is None or last.is_async or last.seq not in {call.seq for call in state.waiting}:
        return None
    return last if state.last_call_state in ("", "scheduled", "issued") else None


def frames_of(state: RankState) -> tuple[Frame, ...]:
    """Return where a rank is now or was last seen, innermost frame first; empty if unknown."""
    if state.raised is not None:
        return state.raised.frames
    if state.status in (RankStatus.FINISHED, RankStatus.SILENT):
        return ()
    call = blocking_call(state)
    return call.site.frames if call is not None else main_stack(state.stacks)


def user_location(frames: tuple[Frame, ...]) -> Location | None:
    """Return the innermost line of the user's own code among frames."""
    return next((location_of(frame) for frame in frames if frame.user), None)


def whereabouts(state: RankState) -> str:
    """Return what a rank does or what became of it, as the end of ``rank 3 …``."""
    status = state.exit_status
    match state.status:
        case RankStatus.SILENT:
            return "recorded no events"
        case RankStatus.FINISHED:
            return f"exited{exit_phrase(status)}" if status else "has finished its script"
        case RankStatus.RAISED:
            return f"raised {raised_phrase(state)}"
        case RankStatus.DIED:
            return _end(status) + exit_phrase(status)
        case RankStatus.RUNNING:
            return _activity(state)


def _end(status: int | None) -> str:
    if was_asked_to_end(status):
        return "was ended"
    return "exited" if status is not None and status > 0 else "died"


def idle_phrase(state: RankState) -> str:
    """Return `` for 31 s``, or nothing where nobody knows how long the rank stood still."""
    return "" if state.is_idle_assumed else f" for {state.idle_s:.0f} s"


def each_whereabouts(states: Sequence[RankState]) -> str:
    """Return ``rank 1 has finished its script; rank 2 died``, for not more than three ranks."""
    parts = [f"rank {state.rank} {whereabouts(state)}" for state in states[:3]]
    return "; ".join(parts) + (f"; and {len(states) - 3} more" if len(states) > 3 else "")


def raised_phrase(state: RankState) -> str:
    """Return ``ValueError: bad batch``: the first line of what a rank raised, shortened."""
    if state.raised is None:
        return "an exception"
    first_line = cause_line(state.raised.message)
    text = f"{state.raised.type}: {first_line}" if first_line else state.raised.type
    return text if len(text) <= 200 else text[:199] + "…"


def cause_line(message: str) -> str:
    """Return the line of a message that says what was wrong: the first, or NCCL's last error.

    Where the message carries the traceback of a worker or of another rank, its exception is added.
    """
    raw = message.strip().split("\n")
    lines = [line.strip() for line in raw]
    if LAST_ERROR in lines[:-1]:
        return lines[lines.index(LAST_ERROR) + 1]
    head = next((n for n, line in enumerate(lines) if TRACEBACK_HEAD in line), len(lines))
    carried = next((line for line in raw[head + 1 :] if line.strip() and not line[0].isspace()), "")
    return f"{lines[0]} ({carried.strip()})" if carried else lines[0]


def exit_phrase(status: int | None) -> str:
    """Return `` by SIGKILL`` or `` with status 1``, or nothing where it is not known."""
    if status is None or status == 0:
        return ""
    return f" by {signal_name(-status)}" if status < 0 else f" with status {status}"


def signal_name(number: int) -> str:
    """Return ``SIGUSR1``, or ``signal 99`` for a number without a name."""
    try:
        return Signals(number).name
    except ValueError:
        return f"signal {number}"


def _activity(state: RankState) -> str:
    call = blocking_call(state)
    if call is not None:
        return f"waits in {call_phrase(call)}{at(call_location(call))}"
    place = user_location(main_stack(state.stacks))
    reached = _reached(state)
    if place is None and reached:
        return f"had come no further than {reached}"
    if state.gil_held:
        return f"holds the GIL and runs no Python thread{at(place)}"
    doing = "computes" if state.is_working else "is"
    phase = "" if state.phase is Phase.SCRIPT else f" in phase {state.phase}"
    helped = f", while {help_phrase(state.help)}" if state.help is not None else ""
    if place is not None or phase:
        return f"{doing}{at(place)}{phase}{helped}"
    return f"{doing} somewhere outside of collectives{helped}"


def _reached(state: RankState) -> str:
    """Return ``#40 in group dp``: the last call of a rank in each group that told it."""
    known = [(p.enqueued, p.group) for p in state.progress.values() if p.enqueued is not None]
    parts = [f"#{number} in group {group.label}" for number, group in known if number < UNNUMBERED]
    return ", ".join(parts[:MOST_GROUPS])


def help_phrase(help_: Help) -> str:
    """Return ``its 8 child processes used 14.0 s of processor time in the last 15 s``."""
    parts = []
    if help_.children_cpu_s >= MENTIONED_S:
        count = f"{help_.num_children} " if help_.num_children else ""
        children = "child process" if help_.num_children == 1 else "child processes"
        parts.append(f"its {count}{children} used {help_.children_cpu_s:.1f} s of processor time")
    who = "it and its children" if help_.num_children else "it"
    if help_.io_bytes >= MENTIONED_BYTES or not parts:
        parts.append(f"{who} read and wrote {help_.io_bytes / (1 << 20):.1f} MiB")
    return f"{' and '.join(parts)} in the last {help_.seconds:.0f} s"


def _sizes(sizes: tuple[tuple[int, ...], ...]) -> str:
    shown = ", ".join(str(list(size)) for size in sizes[:4])
    return shown + (f", … ({len(sizes)} tensors)" if len(sizes) > 4 else "")
