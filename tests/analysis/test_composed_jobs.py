"""Logs composed at random of prefixes, launchers, faults, encodings and cuts: who is blamed."""

import random
from typing import NamedTuple

import pytest

from distdiag.analysis import analyze
from distdiag.findings.finding import Severity
from tests.analysis.failed_logs import AGENT, CLOSING, FAULT, PEER_GONE, summary
from tests.analysis.stuck_logs import COUNTED, dump_signal, each
from tests.dumps.test_composed_logs import BEFORE, PREFIXES, encoded

RANK = 2
"""Whose fault it is in all of them."""
ENCODINGS = ("utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "crlf", "colours", "json")
KILLED = {
    "torchrun": (CLOSING, *summary(RANK, -9, name="Signal 9 (SIGKILL)")),
    "srun": (f"srun: error: node1: task {RANK}: Killed",),
    "deepspeed": (
        "[2025-01-01 10:00:00,000] [INFO] [launch.py:319:sigkill_handler] Killing subprocess 31",
        "[2025-01-01 10:00:01,000] [ERROR] [launch.py:325:sigkill_handler] ['/opt/python', "
        f"'t.py', '--local_rank={RANK}'] exits with return code = -9",
    ),
}
FAILED = {
    "nothing": (),
    "torchrun": (CLOSING, *summary(RANK, 1)),
    "at once": (
        CLOSING,
        f"{AGENT} failed (exitcode: 1) local_rank: {RANK} (pid: 31) of binary: /opt/python",
    ),
    "srun": (f"srun: error: node1: task {RANK}: Exited with exit code 1",),
}
CONSTANT = ("", "2025-01-01T10:00:00.000Z ", "node1: ", "[job 47] ", "| ")
"""What may stand before lines that name their rank by themselves."""
LEAST_RIGHT = 0.97


class Composed(NamedTuple):
    """A log with its truth: the code, and the words that name the fault."""

    parts: tuple[str, ...]
    data: bytes
    code: str
    words: tuple[str, ...]
    is_rank_named: bool = True


def compose(chance):
    """Make one log."""
    fault = chance.choice(("raised", "killed", "behind"))
    encoding, before = chance.choice(ENCODINGS), chance.choice(sorted(BEFORE))
    steps = chance.randrange(4)
    if fault == "behind":
        prefix = chance.choice(CONSTANT)
        writer = chance.choice(COUNTED)
        lines = [*each(writer, 0, 1, 3), dump_signal(RANK)]
        chance.shuffle(lines)
        lines = [prefix + line for line in lines]
        data = encoded([*BEFORE[before], *lines], encoding)
        parts = (fault, writer.__name__, prefix, encoding, before)
        return Composed(parts, data, "COL001", ("#41",))
    if fault == "killed":
        end = chance.choice(sorted(KILLED))
        data = encoded([*BEFORE[before], *["step 1"] * steps, *KILLED[end]], encoding)
        return Composed((fault, end, encoding, before), data, "HNG002", ("SIGKILL",))
    prefix, end = chance.choice(sorted(PREFIXES)), chance.choice(sorted(FAILED))
    pattern, names_rank = PREFIXES[prefix]
    has_victim = names_rank and chance.random() < 0.5
    cut = chance.randrange(1 + len(FAILED[end]))
    # Names of pods count the ranks only where their siblings wrote, too.
    others = range(4) if prefix in ("pods", "compose") else ()
    lines = [
        *BEFORE[before],
        *(pattern.format(rank=rank) + "step 1" for rank in others),
        *(pattern.format(rank=RANK) + line for line in FAULT),
        *(pattern.format(rank=0) + line for line in (PEER_GONE if has_victim else ())),
        *FAILED[end][: len(FAILED[end]) - cut],
    ]
    parts = (fault, prefix, end, encoding, before, f"victim {has_victim}", f"cut {cut}")
    words = ("ValueError: shard 7 has 0 rows", "/data/train.py:9")
    is_named = names_rank or (end != "nothing" and not cut)
    return Composed(parts, encoded(lines, encoding), "HNG001", words, is_named)


def wrong(log, path):
    """Return what is wrong about the verdict on a log, or nothing."""
    path.write_bytes(log.data)
    report = analyze([path])
    alarms = [each for each in report.findings if each.severity is not Severity.INFO]
    if [each.code for each in alarms] != [log.code]:
        return f"says {[(each.code, each.message) for each in alarms]}"
    (finding,) = alarms
    labels = {info.rank for info in report.run.ranks if info.label}
    known = [rank for rank in finding.ranks if rank not in labels]
    if known != [RANK] and (log.is_rank_named or known):
        return f"blames {finding.ranks}: {finding.message}"
    missing = [word for word in log.words if word not in finding.message]
    return f"does not say {missing}: {finding.message}" if missing else ""


@pytest.mark.parametrize(
    "num_logs",
    [
        pytest.param(60, marks=pytest.mark.timeout(300)),
        pytest.param(2000, marks=[pytest.mark.slow, pytest.mark.timeout(3000)]),
    ],
)
def test_whoever_is_at_fault_is_blamed_whatever_stands_around_it(num_logs, tmp_path):
    chance = random.Random(num_logs)
    logs = [compose(chance) for _ in range(num_logs)]
    bad = {log.parts: said for log in logs if (said := wrong(log, tmp_path / "train.log"))}
    assert {log.code for log in logs} == {"HNG001", "HNG002", "COL001"}
    assert len(bad) <= (1 - LEAST_RIGHT) * num_logs, "\n".join(map(str, bad.items()))
    blamed = {parts: said for parts, said in bad.items() if said.startswith("blames")}
    assert not blamed
