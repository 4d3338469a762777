"""One rank is stuck at a line and another waits for it: one check says where, and no other does."""

from dataclasses import replace

import msgspec
import pytest

from distdiag.checks import load_checks
from distdiag.checks.hng.held_gil import HeldGil
from distdiag.checks.hng.rank_in_dataloader import RankInDataloader
from distdiag.checks.hng.stuck_teardown import StuckTeardown
from distdiag.checks.shared.activities import will_come
from distdiag.events.base import Phase
from distdiag.events.files import StoreAsked
from distdiag.events.ranks import RankSet
from distdiag.events.stacks import Observed, ProcessSeen, Stacks, ThreadStack
from distdiag.findings.finding import Severity
from distdiag.views.alignment import Trigger
from distdiag.views.rank_states import Help, RankState, RankStatus
from tests.checks.streams import Job, Program, event_of, kernel, library, stacks
from tests.checks.verdicts import all_findings, findings, serious

SOURCE = "def main():\n    answer = ask()\n    loss.backward()"

LOADER = library("torch/utils/data/dataloader.py", "_get_data")
DESTROY = library("torch/distributed/distributed_c10d.py", "destroy_process_group")
REQUEST = library("ssl.py", "read"), library("http/client.py", "getresponse")
POOL = library("threading.py", "wait"), library("multiprocessing/pool.py", "get")


def stuck_job(tmp_path, *inner, **state):
    """Rank 1 is at `ask()` with these frames inside it; rank 0 waits for it in an all_reduce."""
    p = Program(tmp_path, SOURCE)
    job = Job()
    job.every(p.site("backward"))
    job.call(0, p.site("backward"))
    job.set(0, idle_s=31.0)
    job.set(1, idle_s=31.0, stacks=stacks(1, *inner, p.frame("ask()")), **state)
    return job


def said(job, say=serious):
    return say(job.alignment(trigger=Trigger.STALLED))


def named(job, code):
    """The whole catalogue says one thing: this code, rank 1, the line where it stands."""
    (finding,) = said(job)
    assert (finding.code, finding.ranks, finding.location.line) == (code, RankSet([1]), 2)
    assert finding.evidence
    return finding


def blocked(*where, **state):
    return {"observed": kernel(1, *where, **state)}


def with_child(doing):
    seen = kernel(1, "futex")["kernel"]
    values = seen.values | {"num_children": 1, "child 77": f"python: {doing}"}
    return {"observed": {"kernel": msgspec.structs.replace(seen, values=values)}}


def frame(file, function):
    return (library(file, function),)


STUCK = {
    "the queue of a data loader": ("HNG004", (library("queue.py", "get"), LOADER), {}),
    "a sample that is loaded": ("HNG004", (library("torch/serialization.py", "load"), LOADER), {}),
    "a file": ("HNG005", (), blocked("openat")),
    "a named pipe": ("HNG005", (), blocked("read", "/tmp/a.fifo")),
    "uninterruptible sleep": ("HNG005", (), blocked(state="D")),
    "a checkpoint": ("HNG007", frame("torch/serialization.py", "save"), {}),
    "a compilation": ("HNG008", frame("torch/utils/file_baton.py", "wait"), {}),
    "a rendezvous": ("HNG009", frame("torch/distributed/rendezvous.py", "next_rendezvous"), {}),
    "the end of a group": ("HNG010", (DESTROY,), {}),
    "a queue": ("HNG011", frame("queue.py", "get"), {}),
    "a lock in C": ("HNG011", (), blocked("futex")),
    "a thread that is joined": ("HNG011", frame("threading.py", "join"), {}),
    "a prompt": ("HNG012", frame("pdb.py", "interaction"), {}),
    "a child process": ("HNG013", frame("subprocess.py", "_wait"), {}),
    "a pipe to a child": ("HNG013", (), {"gil_held": False} | blocked("read", "pipe:[1]")),
    "workers that sleep": (
        "HNG013", POOL, {"is_working": True} | with_child("sleeping in read of pipe:[9]")
    ),
    "a request": ("HNG014", REQUEST, {}),
    "a process that sleeps": ("COL001", (), blocked(state="S")),
    "compiled code": ("COL001", frame("torch/_dynamo/eval_frame.py", "compile_wrapper"), {}),
    "another function of torch": (
        "COL001", frame("torch/distributed/distributed_c10d.py", "get_rank"), {}
    ),
}  # fmt: skip


@pytest.mark.parametrize(("code", "inner", "state"), STUCK.values(), ids=STUCK)
def test_what_a_rank_is_stuck_in_is_named_with_its_line(tmp_path, code, inner, state):
    (finding,) = said(stuck_job(tmp_path, *inner, **state))
    assert (finding.code, finding.ranks) == (code, RankSet([1]))
    if code != "COL001":
        assert finding.location.line == 2
        assert finding.evidence


def test_the_message_says_what_it_is_stuck_in(tmp_path):
    finding = named(stuck_job(tmp_path, **blocked("read", "/mnt/data/shard-1.tar")), "HNG005")
    assert "/mnt/data/shard-1.tar" in finding.message
    assert any(e.values.get("blocked_on") == "/mnt/data/shard-1.tar" for e in finding.evidence)
    finding = named(stuck_job(tmp_path, **blocked(state="T")), "HNG012")
    assert "by a signal" in finding.message
    finding = named(stuck_job(tmp_path, *frame("torch/utils/file_baton.py", "wait")), "HNG008")
    assert "torch/utils/file_baton.py" in finding.message
    # The wait for such a lock is a known fault, whose row says what to do.
    assert "torch_extensions" in finding.fix and "killed while it built" in finding.why


@pytest.mark.parametrize(
    ("inner", "state"),
    [((), {"is_working": True} | blocked("read", "/data/x")), (POOL, with_child("running"))],
    ids=["system calls", "a pool whose workers run"],
)
def test_a_rank_that_works_or_has_others_work_is_late(tmp_path, inner, state):
    assert not said(stuck_job(tmp_path, *inner, **state))


def test_a_named_pipe_that_nobody_opens_at_the_other_end_is_said_to_be_one(tmp_path):
    seen = kernel(1, "openat", "/mnt/shards/0")["kernel"]
    values = seen.values | {"wchan": "wait_for_partner"}
    state = {"observed": {"kernel": msgspec.structs.replace(seen, values=values)}}
    finding = named(stuck_job(tmp_path, **state), "HNG005")
    assert "/mnt/shards/0 is a named pipe, and no process has its other end open" in finding.message
    assert finding.fix.startswith("Start the process that should open the other end")


def test_a_child_that_cannot_write_its_second_pipe_is_to_be_read(tmp_path):
    child = ProcessSeen(77, "ffmpeg", "sleeping in write of pipe:[9]", has_it=True, parent_rank=1)
    values = {"waits_for": "pipe", "name": "pipe:[8]", "way": "read"}
    seen = event_of(Observed, 1, source="holders", values=values, processes=(child,))
    observed = kernel(1, "read", "pipe:[8]") | {"holders": seen}
    finding = named(stuck_job(tmp_path, observed=observed), "HNG013")
    assert finding.fix.startswith("Process 77 cannot go on: it writes into a second pipe")
    assert "communicate()" in finding.fix


def test_the_holder_of_a_lock_is_named_and_the_fix_is_about_it(tmp_path):
    holder = ProcessSeen(77, "python prepare.py", "sleeping in futex", has_it=True)
    values = {"waits_for": "lock", "name": "/data/cache.lock"}
    seen = event_of(Observed, 1, source="holders", values=values, processes=(holder,))
    job = stuck_job(tmp_path, observed=kernel(1, "flock", "/data/cache.lock") | {"holders": seen})
    finding = named(job, "HNG005")
    assert "; /data/cache.lock is locked by process 77 `python prepare.py`" in finding.message
    assert finding.fix.startswith("Let process 77 release the lock")
    assert finding.evidence[0].values["pid"] == 77


def test_a_rank_that_waits_for_the_lock_of_a_busy_rank_is_late(tmp_path):
    holder = ProcessSeen(77, "python train.py", has_it=True, rank=2)
    values = {"waits_for": "lock", "name": "/data/cache.lock"}
    seen = event_of(Observed, 1, source="holders", values=values, processes=(holder,))
    job = stuck_job(tmp_path, observed=kernel(1, "flock", "/data/cache.lock") | {"holders": seen})
    states = job.alignment(trigger=Trigger.STALLED).states
    busy = RankState(2, RankStatus.RUNNING, is_working=True)
    assert will_come(states[1], {**states, 2: busy})
    assert not will_come(states[1], {**states, 2: replace(busy, is_working=False)})


def test_a_key_of_the_store_that_nobody_sets(tmp_path):
    line = Program(tmp_path, SOURCE).frame("ask()")
    asked = event_of(StoreAsked, 1, action="get", store="host:1", keys=("a",), frames=(line,))
    finding = named(stuck_job(tmp_path, asked=asked, **blocked("poll")), "HNG020")
    assert 'it waits for the key "a" of the store host:1, which no rank has set' in finding.message


@pytest.mark.parametrize("terminal", ["/dev/pts/3", "/dev/tty"])
def test_a_question_that_nobody_answers(tmp_path, terminal):
    finding = named(stuck_job(tmp_path, **blocked("read", terminal)), "HNG021")
    assert f"in read of {terminal}" in finding.message


# Data loaders and checkpoints


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_rank_in_its_loader_replaces_the_missing_rank(num_ranks):
    job = Job(num_ranks)
    for rank in job.world - RankSet([1]):
        job.call(rank)
    job.set(1, phase=Phase.DATALOADER, idle_s=30.0)
    (finding,) = said(job)
    assert (finding.code, finding.severity) == ("HNG004", Severity.WARNING)
    assert finding.ranks == RankSet([1])


def test_a_stack_outside_of_the_loader_is_believed_more_than_the_phase(tmp_path):
    job = stuck_job(tmp_path, phase=Phase.DATALOADER)
    assert not findings(RankInDataloader, job.alignment(trigger=Trigger.STALLED))


@pytest.mark.parametrize(
    ("state", "severities"),
    [
        ({"phase": Phase.DATALOADER, "is_working": True}, [Severity.INFO]),
        ({"phase": Phase.FORWARD}, []),
    ],
    ids=["a loader that works", "a rank that is elsewhere"],
)
def test_a_loader_that_works_is_a_note(state, severities):
    job = Job()
    job.call(0)
    job.set(1, **state)
    found = findings(RankInDataloader, job.alignment(trigger=Trigger.STALLED))
    assert [finding.severity for finding in found] == severities


def test_the_phase_tells_of_a_checkpoint_where_there_is_no_stack(tmp_path):
    job = stuck_job(tmp_path, phase=Phase.CHECKPOINT)
    job.set(1, stacks=None)
    assert [(f.code, f.ranks) for f in said(job)] == [("HNG007", RankSet([1]))]


def test_a_rank_that_saves_after_an_inner_loop_has_not_left_it_early(tmp_path):
    p = Program(
        tmp_path,
        """
        def main():
            for epoch in range(2):
                for batch in loader:
                    loss.backward()
                save(model)
        """,
    )
    job = Job()
    job.every(p.site("backward"))
    job.call(0, p.site("backward"))
    inner = library("torch/serialization.py", "save")
    job.set(1, idle_s=31.0, stacks=stacks(1, inner, p.frame("save(model)")))
    (finding,) = said(job)
    assert (finding.code, finding.ranks, finding.location.line) == ("HNG007", RankSet([1]), 5)


# The GIL


def holding_job(tmp_path, **state):
    job = stuck_job(tmp_path, gil_held=True, **state)
    seen = job.states[1].stacks
    threads = tuple(msgspec.structs.replace(thread, holds_gil=True) for thread in seen.threads)
    job.states[1] = replace(job.states[1], stacks=msgspec.structs.replace(seen, threads=threads))
    return job


def test_a_rank_whose_thread_holds_the_gil_is_named_with_its_line(tmp_path):
    job = holding_job(tmp_path, **blocked("read", "pipe:[1]"))
    assert "holds the GIL" in named(job, "HNG006").message


def test_a_process_that_was_stopped_while_it_held_the_gil_is_stopped(tmp_path):
    named(holding_job(tmp_path, **blocked(state="T")), "HNG012")


def test_all_ranks_can_hold_their_own_gil():
    job = Job()
    job.every()
    job.set(0, 1, idle_s=31.0, gil_held=True, last_call_state="waited")
    (finding,) = findings(HeldGil, job.view())
    assert finding.ranks == job.world


# Others that wait elsewhere


@pytest.mark.parametrize("name", [name for name in STUCK if STUCK[name][0] != "COL001"])
def test_it_is_reported_too_where_another_rank_creates_a_group_or_runs(tmp_path, name):
    code, inner, state = STUCK[name]
    p = Program(tmp_path, SOURCE)
    job = Job()
    job.set(0, idle_s=31.0, observed=kernel(0, state="R"))
    job.set(1, idle_s=31.0, stacks=stacks(1, *inner, p.frame("ask()")), **state)
    opened = job.creation({0: ((0, 1), p.site("backward"))}, Trigger.STALLED)
    for view in (opened, job.view()):
        (finding,) = findings(load_checks()[code], view)
        assert (finding.ranks, finding.location.line) == (RankSet([1]), 2)


def test_a_thread_that_keeps_the_process_alive_is_named_with_its_line(tmp_path):
    p = Program(tmp_path, "def watch():\n    sleep(1)")
    main = ThreadStack("MainThread", (library("threading.py", "_shutdown"),))
    other = ThreadStack("watcher", (p.frame("sleep"),))
    job = Job()
    job.set(0, status=RankStatus.FINISHED)
    seen = event_of(Stacks, 1, source="py-spy", threads=(main, other))
    job.set(1, idle_s=31.0, stacks=seen)
    (finding,) = findings(StuckTeardown, job.view())
    assert (finding.ranks, finding.location.line) == (RankSet([1]), 2)
    assert any("its thread watcher" in each.summary for each in finding.evidence)


# Child processes


def test_a_pool_whose_workers_used_the_processor_of_late_is_late(tmp_path):
    help_ = Help(seconds=15.0, children_cpu_s=14.0, num_children=8)
    state = with_child("sleeping in read of pipe:[9]")
    (note,) = said(stuck_job(tmp_path, *POOL, help=help_, **state), all_findings)
    assert (note.code, note.severity) == ("HNG013", Severity.INFO)
    assert "its 8 child processes used 14.0 s of processor time in the last 15 s" in note.message


@pytest.mark.parametrize(
    ("file", "function", "code"),
    [
        ("torch/utils/file_baton.py", "wait", "HNG008"),
        ("filelock/_api.py", "acquire", "HNG011"),
        ("torch/distributed/distributed_c10d.py", "new_group", "HNG009"),
        ("torch/autograd/graph.py", "_engine_run_backward", "COL001"),
    ],
)
def test_children_are_no_excuse_for_who_waits_for_somebody_else(tmp_path, file, function, code):
    help_ = Help(seconds=15.0, children_cpu_s=14.0, num_children=1)
    job = stuck_job(tmp_path, library(file, function), help=help_)
    assert [finding.code for finding in said(job)] == [code]
