"""Who has what a rank waits for, from what was seen of it and what it recorded."""

import pytest

from distdiag.checks.shared.activities import Activity, doing_by_stack, doing_of
from distdiag.checks.shared.holders import holder_of
from distdiag.events.base import Frame
from distdiag.events.files import StoreAsked, StoreCall
from distdiag.events.lifecycle import ChildEnded
from distdiag.events.stacks import Observed, ProcessSeen, Stacks, ThreadStack
from distdiag.views.rank_states import RankState, RankStatus
from tests.checks.races import access
from tests.checks.streams import Program, event_of, kernel, library, plain_site, stacks

PATH = "/data/cache.lock"
MINE = Frame("train.py", 12, "main")
POLL = library("filelock/_api.py", "acquire")


def outside(what, name=PATH, *processes, **values):
    seen = event_of(
        Observed,
        1,
        source="holders",
        values={"waits_for": what, "name": name, **values},
        processes=processes,
    )
    return {"holders": seen}


def process(pid=77, command="python prepare.py", doing="sleeping in futex", **values):
    return ProcessSeen(pid, command, doing, **values)


def thread(*frames, name="MainThread"):
    return ThreadStack(name, frames)


def rank(*frames, observed=None, **values):
    return RankState(
        1,
        RankStatus.RUNNING,
        idle_s=31.0,
        stacks=stacks(1, *(frames or (MINE,))),
        observed=observed or {},
        **values,
    )


def told(state, *others):
    states = {each.rank: each for each in (*others, state)}
    return holder_of(state, states)


# Files


def test_a_lock_of_a_stranger():
    seen = outside("lock", PATH, process(has_it=True, threads=(thread(Frame("prep.py", 3, "f")),)))
    found = told(rank(observed=seen))
    assert found.text == (
        f"{PATH} is locked by process 77 `python prepare.py`, which is sleeping in futex at "
        "prep.py:3"
    )
    assert found.fix.startswith("Let process 77 release the lock, or end it")
    assert found.evidence[0].location.line == 3


def test_a_lock_of_a_rank():
    holder = RankState(0, RankStatus.RUNNING, stacks=stacks(0, Frame("train.py", 40, "main")))
    found = told(rank(observed=outside("lock", PATH, process(rank=0, has_it=True))), holder)
    assert found.text == f"{PATH} is locked by rank 0, which is at train.py:40 in phase starting"
    assert "Release the lock before the collective" in found.fix


def test_a_lock_that_was_inherited():
    seen = outside("lock", PATH, process(has_it=True, parent_rank=0), locked_by_pid=70)
    found = told(rank(observed=seen))
    assert "process 77 `python prepare.py` (started by rank 0), which is sleeping" in found.text
    assert found.text.endswith("; it inherited the open file from process 70")
    assert "`spawn`" in found.fix


def test_a_lock_of_another_node():
    found = told(rank(observed=outside("lock")))
    assert "no process of this node that can be seen" in found.text


BY = "\n".join(f"{frame.file}:{frame.function}" for frame in (POLL, MINE))
HERE = {"asked_file": "train.py", "asked_line": 12, "asked_by": BY}


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({}, f"the lock file {PATH} is there since 3 h, and no process of this node has it locked"),
        (
            {"owner_pid": 9, "owner_host": "node-7"},
            f"the lock file {PATH} is there since 3 h, and was made by process 9 on node-7, which "
            "does not run on this node",
        ),
    ],
)
def test_a_lock_file_that_was_left(values, text):
    seen = outside("lock-file", PATH, age_s=11_000, **HERE, **values)
    found = told(rank(POLL, MINE, observed=seen))
    assert found.text == text
    assert found.fix.endswith(f"remove the file: rm {PATH}")


def test_a_lock_file_whose_owner_lives():
    seen = outside("lock-file", PATH, process(has_it=True), age_s=5, owner_pid=77, **HERE)
    found = told(rank(POLL, MINE, observed=seen))
    assert "names process 77 `python prepare.py`" in found.text
    assert "rm " not in found.fix


def test_a_file_that_was_asked_for_elsewhere_is_not_waited_for():
    seen = outside("lock-file", PATH, age_s=5, asked_file="train.py", asked_line=3)
    assert told(rank(POLL, MINE, observed=seen)) is None
    elsewhere = outside("lock-file", PATH, age_s=5, **HERE)
    sleeping = library("botocore/retry.py", "sleep")
    assert told(rank(sleeping, MINE, observed=elsewhere)) is None


def test_a_rank_that_is_seen_in_the_middle_of_asking():
    seen = outside("lock-file", PATH, age_s=5, **HERE)
    asking = ThreadStack("MainThread", (library("posixpath.py", "join"), POLL, MINE), active=True)
    both = event_of(Stacks, 1, source="py-spy", threads=(asking,))
    assert told(RankState(1, RankStatus.RUNNING, stacks=both, observed=seen)) is not None


def test_a_file_that_nobody_makes():
    found = told(rank(observed=outside("file", "/data/go", **HERE)))
    assert "/data/go, which is not there" in found.text


def wrote(path, line=30):
    """Rank 0, which has put a file there."""
    made = access(0, "rename", plain_site(line), path).event
    return RankState(0, RankStatus.RUNNING, made=(made,))


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("/data/step1/rank_0.pt", "; rank 0 made /data/step1/rank_0.pt at train.py:30"),
        ("/other/rank_1.pt", "; rank 0 made /other/rank_1.pt at train.py:30"),
        ("/data/step1/rank_1.pt", ", though rank 0 made it at train.py:30"),
        ("/data/model.pt", ""),
    ],
)
def test_a_file_that_another_rank_made_under_another_name(path, text):
    found = told(rank(observed=outside("file", "/data/step1/rank_1.pt", **HERE)), wrote(path))
    assert found.text.endswith(f"which is not there{text}")


LOOP = "import time\nwhile not path.exists():\n    time.sleep(1)\ntime.sleep(2)\n"


@pytest.mark.parametrize(("line", "is_told"), [("time.sleep(1)", True), ("time.sleep(2)", False)])
def test_who_sleeps_in_the_loop_that_asks_waits_for_the_file(tmp_path, line, is_told):
    program = Program(tmp_path, LOOP)
    here, asked = program.site(line).location, program.site("while not").location
    values = {"asked_file": asked.file, "asked_line": asked.line}
    by = f"{asked.file}:{asked.function}"
    seen = outside("file", "/data/go", **values, asked_by=by)
    assert (told(rank(here, observed=seen)) is not None) is is_told


def test_folders_that_ranks_list_again_and_again():
    other = RankState(0, RankStatus.RUNNING, observed=outside("folder", "/shm/a1"))
    found = told(rank(observed=outside("folder", "/shm/b2", **HERE)), other)
    assert found.text == "it lists /shm/b2 again and again, while rank 0 lists /shm/a1"


# Terminals and pipes


def test_a_person_is_asked():
    seen = kernel(1, "read", "/dev/pts/3") | outside("terminal", "/dev/pts/3")
    state = rank(observed=seen)
    assert doing_of(state).activity is Activity.PERSON
    assert "asks a person" in told(state).text
    assert "/dev/pts/3" in told(state).text


def test_the_standard_input():
    seen = kernel(1, "read", "pipe:[7]")
    seen["kernel"].values["descriptor"] = 0
    state = rank(observed=seen | outside("input", "pipe:[7]", process(5, "bash", has_it=True)))
    assert doing_of(state).activity is Activity.PERSON
    assert (
        "standard input (pipe:[7]), which process 5 `bash`, which is sleeping" in told(state).text
    )


def test_a_pipe_that_nobody_writes_to():
    found = told(rank(observed=outside("pipe", "pipe:[7]", way="read", is_own=True)))
    assert found.text.startswith("no other process has the other end of the pipe")
    assert "write to" in found.text


# Child processes

JOIN = library("multiprocessing/popen_fork.py", "poll")


def test_a_child_is_named_with_its_command_and_line():
    child = process(9, "sleep 987", "sleeping in clock_nanosleep", parent_rank=1)
    tracker = process(
        8, "python -c from multiprocessing.resource_tracker import main", parent_rank=1
    )
    seen = outside("", "", tracker, child)
    found = told(rank(library("subprocess.py", "_try_wait"), MINE, observed=seen))
    assert found.text == ("its child process 9 `sleep 987` is sleeping in clock_nanosleep")


def test_a_rank_that_multiprocessing_has_forked_is_not_taken_for_the_process_that_started_it():
    begin = library("multiprocessing/process.py", "_bootstrap")
    parent = library("multiprocessing/popen_fork.py", "_launch")
    assert doing_by_stack(rank(MINE, begin, parent, MINE)) is None


def test_children_of_a_rank_that_waits_for_something_else_are_not_blamed():
    seen = outside("", "", process(9, "sleep 987", parent_rank=1))
    assert told(rank(library("ssl.py", "read"), MINE, observed=seen)) is None


def test_a_fork_that_copied_a_lock(tmp_path):
    p = Program(tmp_path, "def get(self):\n    with self.lock:\n        fetch()")
    waiting = (thread(p.frame("with self.lock:")),)
    child = process(9, is_forked=True, parent_rank=1, threads=waiting)
    found = told(rank(JOIN, MINE, observed=outside("", "", child)))
    assert "waiting for the lock `self.lock`" in found.text
    assert "no thread of that process has" in found.text
    assert "by spawn instead of fork" in found.fix
    # Where a thread of the child has it, the fork is not to blame.
    both = (*waiting, thread(p.frame("fetch()"), name="fetcher"))
    child = process(9, is_forked=True, parent_rank=1, threads=both)
    assert "when it was forked" not in told(rank(JOIN, MINE, observed=outside("", "", child))).text


@pytest.mark.parametrize(
    ("processes", "dead"),
    [
        ((process(9, "python", "dead", parent_rank=1, exit_status=-9),), ()),
        ((), (event_of(ChildEnded, 1, pid=9, status=-9),)),
    ],
    ids=["not waited for", "replaced by its pool"],
)
def test_a_child_that_died(processes, dead):
    pool = library("multiprocessing/pool.py", "get")
    state = rank(pool, MINE, observed=outside("", "", *processes), dead_children=dead)
    found = told(state)
    assert found.text.startswith("its child process 9")
    assert "was ended by SIGKILL" in found.text


# Threads


def test_a_lock_of_another_thread(tmp_path):
    p = Program(tmp_path, "def f(self):\n    with self.lock:\n        queue.get()\n    done()")
    writer = thread(library("queue.py", "get"), p.frame("queue.get()"), name="writer")
    main = thread(p.frame("with self.lock:"))
    both = event_of(Stacks, 1, source="py-spy", threads=(main, writer))
    state = RankState(1, RankStatus.RUNNING, stacks=both)
    found = told(state)
    assert found.text.startswith("its thread writer has the lock `self.lock`, and is at ")
    assert found.evidence[0].location.line == 3
    elsewhere = thread(p.frame("done()"), name="writer")
    alone = event_of(Stacks, 1, source="py-spy", threads=(main, elsewhere))
    assert told(RankState(1, RankStatus.RUNNING, stacks=alone)) is None


# The store


def asked(*keys, frames=(MINE,)):
    return event_of(StoreAsked, 1, action="get", store="host:1", keys=keys, frames=frames)


def put(key, line=40, store="host:1", action="set"):
    frames = (Frame("train.py", line, "publish"),)
    return event_of(StoreCall, 0, action=action, store=store, keys=(key,), frames=frames)


def publisher(*calls):
    return RankState(0, RankStatus.RUNNING, published=calls)


def test_a_key_that_nobody_set():
    state = rank(asked=asked("server/5"))
    assert doing_of(state).activity is Activity.STORE
    found = told(state, publisher(put("ready"), put("server/4"), put("server/5", store="other:2")))
    assert found.text == (
        'it waits for the key "server/5" of the store host:1, which no rank has set; rank 0 set '
        '"server/4" at train.py:40'
    )
    assert found.evidence[0].location.line == 40
    assert told(state, publisher(put("ready"))).text.endswith("which no rank has set")


def test_a_key_that_was_set_and_deleted():
    found = told(
        rank(asked=asked("server/5")),
        publisher(put("server/5"), put("server/5", action="delete_key")),
    )
    assert "which rank 0 last touched at train.py:40" in found.text


def test_a_key_that_was_asked_for_at_another_line():
    state = rank(asked=asked("server/5", frames=(Frame("train.py", 3, "main"),)))
    assert told(state) is None
    assert doing_of(state) is None
