"""Logs put together at random from prefixes, launchers, encodings and cuts: the fault is found."""

import json

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from distdiag.dumps.log_text import plain
from distdiag.dumps.ranks import resolve_ranks
from distdiag.dumps.reading import Dump, load_readers
from distdiag.events.lifecycle import Raised
from tests.analysis.failed_logs import AGENT, BAR, CLOSING, FAULT, PEER_GONE, summary

RANK = 2
READERS = load_readers()

# What stands before each line, with the rank, and whether it names the rank or the process.
PREFIXES = {
    "torch": ("[rank{rank}]: ", True),
    "tee": ("[default{rank}]:[rank{rank}]: ", True),
    "rank style": ("[Rank {rank}] ", True),
    "label": ("{rank}: ", True),
    "mpi": ("[1,{rank}]<stderr>:", True),
    "prte": ("[prterun-node0-77@1,{rank}]<stderr>: ", True),
    "ray": ("(Trainer pid=3{rank}, ip=10.0.0.{rank}, rank={rank}) ", True),
    "vllm": ("(VllmWorker rank={rank} pid=3{rank}) ERROR 07-23 19:34:51 [multiproc.py:487] ", True),
    "times": ("2025-01-01T10:00:0{rank}.000Z [rank{rank}]: ", True),
    "logger": ("2025-01-01 10:00:0{rank},000 ERROR rank={rank} train.py:40 | ", True),
    "pods": ("[pod/llm-{rank}/pytorch] ", True),
    "compose": ("worker-{rank}  | ", True),
    "host and rank": ("node1: [rank{rank}]: ", True),
    "nothing": ("", False),
    "times only": ("2025-01-01T10:00:00.000Z ", False),
}
ENDS = {
    "nothing": (),
    "torchrun": (CLOSING, *summary(RANK, 1)),
    "torchrun at once": (
        CLOSING,
        f"{AGENT} failed (exitcode: 1) local_rank: {RANK} (pid: 31) of binary: /opt/python",
    ),
    "srun": (f"srun: error: node1: task {RANK}: Exited with exit code 1",),
    "deepspeed": (
        "[2025-01-01 10:00:00,000] [INFO] [launch.py:319:sigkill_handler] Killing subprocess 31",
        "[2025-01-01 10:00:01,000] [ERROR] [launch.py:325:sigkill_handler] ['/opt/python', "
        f"'t.py', '--local_rank={RANK}'] exits with return code = 1",
    ),
}
BEFORE = {
    "nothing": (),
    "a preamble": ("+ module load cuda", "Loading cuda/12.4", "step 1 of 100"),
    "bars": (f"{BAR}\r{BAR}\r{BAR}",),
}


def encoded(lines, encoding):
    text = "\n".join(lines) + "\n"
    match encoding:
        case "crlf":
            return text.replace("\n", "\r\n").encode()
        case "colours":
            return "".join(f"\x1b[31m{line}\x1b[0m\n" for line in lines).encode()
        case "json":
            return "".join(json.dumps({"log": f"{line}\n"}) + "\n" for line in lines).encode()
        case _:
            return text.encode(encoding)


def found(data):
    """Return the exceptions of the main thread by rank, and the names of what has no rank."""
    dump = plain(Dump(path="logs/train.log", data=data))
    dumps = [each for r in READERS if r.recognises(dump) for each in r.read(dump)]
    resolved = resolve_ranks(dumps)
    return {
        (each.rank if each.rank not in resolved.labels else None, event.type): event
        for each in resolved.dumps
        for event in each.events
        if isinstance(event, Raised)
    }


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    prefix=st.sampled_from(sorted(PREFIXES)),
    end=st.sampled_from(sorted(ENDS)),
    before=st.sampled_from(sorted(BEFORE)),
    encoding=st.sampled_from(
        ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "crlf", "colours", "json"]
    ),
    victim=st.booleans(),
    cut=st.integers(0, 6),
)
@example(
    prefix="times only", end="torchrun", before="bars", encoding="utf-16-le", victim=False, cut=0
)
@example(prefix="pods", end="nothing", before="a preamble", encoding="json", victim=True, cut=0)
def test_the_fault_is_found_whatever_stands_around_it(prefix, end, before, encoding, victim, cut):
    pattern, names_rank = PREFIXES[prefix]
    victim = victim and names_rank
    ranks = range(4) if prefix in ("pods", "compose") else range(0)
    ending = ENDS[end][: len(ENDS[end]) - cut] if cut else ENDS[end]
    lines = [
        *BEFORE[before],
        *(f"{pattern.format(rank=rank)}step 1" for rank in ranks),
        *(pattern.format(rank=RANK) + line for line in FAULT),
        *(pattern.format(rank=0) + line for line in (PEER_GONE if victim else ())),
        *ending,
    ]
    exceptions = found(encoded(lines, encoding))
    ranks_of_fault = [rank for rank, kind in exceptions if kind == "ValueError"]
    event = next(e for (_, kind), e in exceptions.items() if kind == "ValueError")
    assert event.message == "shard 7 has 0 rows"
    assert [(f.file, f.line) for f in event.frames if f.user] == [("/data/train.py", 9)]
    is_told = names_rank or (end != "nothing" and not cut)
    assert ranks_of_fault == ([RANK] if is_told else [None]) or (
        not names_rank and ranks_of_fault == [RANK]
    )
    assert victim == any(rank == 0 for rank, _ in exceptions)


@pytest.mark.parametrize("prefix", sorted(PREFIXES))
def test_cuts_within_lines_break_nothing(prefix):
    data = encoded([PREFIXES[prefix][0].format(rank=RANK) + line for line in FAULT], "utf-16")
    for length in range(0, len(data), 7):
        assert all("ValueError".startswith(kind) for _, kind in found(data[:length]))
