"""Who a process is when it calls `init_process_group`, and which job it belongs to."""

import inspect
import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from distdiag.agent.children import VARIABLE, told_of
from distdiag.agent.joining import Member, _enter, _given, _launch, _member
from distdiag.agent.launch import read_launch
from distdiag.record.run_dir import Job, RunDir
from distdiag.record.status_page import FINISHED, StatusPage

REPOSITORY = Path(__file__).parents[2]
SIGNATURE = inspect.signature(dist.init_process_group)


def told(monkeypatch, *args, environ=(), **kwargs):
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in dict(environ).items():
        monkeypatch.setenv(name, value)
    given = _given(SIGNATURE, args, kwargs)
    return _member(given) if given else None


def member(rank, world_size=2, place="29500"):
    return Member(rank=rank, job=Job(world_size=world_size, place=place))


LAUNCHED = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("args", "kwargs", "environ"),
    [
        (("gloo",), {}, LAUNCHED),
        ((), {"init_method": "env://"}, LAUNCHED),
        ((), {"init_method": "env://?rank=1&world_size=2"}, {"MASTER_PORT": "29500"}),
        ((), {"init_method": "tcp://node:29500", "rank": 1, "world_size": 2}, {}),
        ((), {"init_method": "tcp://node:29500?rank=1&world_size=2"}, {}),
        (("gloo", "tcp://10.0.0.1:29500", None, 2, 1), {}, {"RANK": "7", "WORLD_SIZE": "9"}),
    ],
)
def test_a_rank_is_found_where_torch_finds_it(monkeypatch, args, kwargs, environ):
    assert told(monkeypatch, *args, environ=environ, **kwargs) == member(1)


def test_ranks_that_meet_in_a_file_or_a_store_are_told_by_it(monkeypatch, tmp_path):
    path = str(tmp_path / "meet")
    who = {"rank": 0, "world_size": 2}
    assert told(monkeypatch, init_method=f"file://{path}", **who) == member(0, place=path)
    store = dist.PrefixStore("a", dist.FileStore(path, 2))
    assert told(monkeypatch, store=store, **who) == member(0, place=path)
    served = dist.TCPStore("127.0.0.1", 0, 1, True, timedelta(seconds=10))
    assert told(monkeypatch, store=served, **who) == member(0, place=str(served.port))


@pytest.mark.parametrize(
    ("kwargs", "environ"),
    [
        ({}, {}),
        ({"rank": 2, "world_size": 2}, {}),
        ({"backend": "fake", "rank": 0, "world_size": 8}, {}),
        ({"wrong": 1}, LAUNCHED),
        ({"init_method": "tcp://node:29500"}, LAUNCHED),
    ],
)
def test_whoever_does_not_say_that_it_is_a_rank_is_none(monkeypatch, kwargs, environ):
    assert told(monkeypatch, environ=environ, **kwargs) is None


def begin(run_dir, rank):
    run_dir.create()
    return StatusPage(run_dir.status(rank))


def test_the_ranks_of_a_job_share_an_attempt_that_its_first_one_opens(tmp_path):
    begin(RunDir(tmp_path, 0), 0)  # the process that starts them
    first, is_first = _enter(tmp_path, member(1))
    assert (first.attempt, is_first) == (1, True)
    begin(first, 1)
    second, is_first = _enter(tmp_path, member(0))
    assert (second.attempt, is_first) == (1, False)


def test_another_job_is_refused_while_one_runs_and_follows_it_afterwards(tmp_path):
    run_dir, _ = _enter(tmp_path, member(0))
    page = begin(run_dir, 0)
    assert _enter(tmp_path, member(0, place="30000")) is None
    assert _enter(tmp_path, member(0, world_size=4)) is None
    assert _enter(tmp_path, member(0)) is None  # two processes take themselves for one rank
    page.raise_flag(FINISHED)
    following, is_first = _enter(tmp_path, member(0, place="30000"))
    assert (following.attempt, is_first) == (2, True)
    assert following.gives_way is False
    assert run_dir.gives_way is False


def test_a_job_that_is_started_again_where_it_was_is_a_new_attempt(tmp_path):
    run_dir, _ = _enter(tmp_path, member(0))
    begin(run_dir, 0).raise_flag(FINISHED)
    again, is_first = _enter(tmp_path, member(0))
    assert (again.attempt, is_first) == (2, True)


def test_ranks_are_on_one_node_unless_the_environment_tells_of_more(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    inviting = read_launch({})
    launch = _launch(inviting, member(3, world_size=4), 1)
    assert (launch.rank, launch.local_rank, launch.local_ranks) == (3, 3, range(4))
    assert (launch.identity, launch.is_alone) == (inviting.identity, False)
    environ = {"RANK": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    launch = _launch(inviting, member(3, world_size=4), 1)
    assert (launch.local_rank, launch.local_ranks) == (1, range(2, 4))
    launch = _launch(inviting, member(0, world_size=4), 1)  # LOCAL_RANK is that of another one
    assert launch.local_ranks == range(4)


STARTS = """
import json, os, subprocess, sys
from pathlib import Path
from distdiag.agent.children import Children

before = dict(os.environ)
children = Children(Path("/run"))
children.start()
code = (
    "import json, os, sys; told = os.environ.get('DISTDIAG_JOIN'), os.environ.get('OWN');"
    "print(json.dumps([*told, sys.path, 'distdiag' in sys.modules]))"
)
def told(**more):
    return json.loads(subprocess.check_output([sys.executable, "-c", code], **more))
found = [told(), told(env={"OWN": "1"}), told(env={"DISTDIAG_JOIN": ""})]
assert dict(os.environ) == before
children.stop()
print(json.dumps([*found, told()]))
"""


def test_what_a_process_starts_is_told_of_the_run_and_its_own_environment_stays():
    environ = {n: v for n, v in os.environ.items() if n != VARIABLE}
    done = subprocess.run(
        [sys.executable, "-c", STARTS],
        env=environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    with_all, with_own, refused, stopped = json.loads(done.stdout)
    assert with_all[:2] == ["/run", None]
    assert with_own[:2] == ["/run", "1"]
    assert refused[0] == ""
    assert stopped[0] is None
    for path, is_loaded in (each[2:] for each in (with_all, with_own, refused, stopped)):
        assert not [each for each in path if each.endswith("startup")]
        assert not is_loaded


def test_a_sitecustomize_of_the_user_runs_as_without_us(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.own = __name__, __file__\n")
    environ = told_of(Path("/run"), {"PYTHONPATH": str(tmp_path)})
    code = "import sys, sitecustomize; print(*sys.own, sitecustomize.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environ,
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    own = str(tmp_path / "sitecustomize.py")
    assert done.stdout.split() == ["sitecustomize", own, own]
    assert done.stderr == ""
