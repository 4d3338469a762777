"""The address of the reporter travels through a real store, without anybody waiting for it."""

import os
import sys
import threading
import time
from datetime import timedelta

import msgspec
import pytest
from torch.distributed import TCPStore

from distdiag.agent import rendezvous
from distdiag.agent.rendezvous import Rendezvous, is_needed
from distdiag.record.run_dir import Launch, ReporterAddress, RunDir, read_reporter_address

ADDRESS = ReporterAddress(host="10.0.0.1", port=1234, token="secret")


def launch(rank, *, local_rank=0, local=2, world=4, attempt=0):
    return Launch(
        rank=rank,
        local_rank=local_rank,
        world_size=world,
        local_world_size=local,
        attempt=attempt,
        max_attempts=1,
        parent_pid=1,
        identity="x",
        started_s=0.0,
    )


@pytest.fixture
def store(monkeypatch):
    """Stand for the store that torchrun has before its ranks begin."""
    store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=10), wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    return store


class Passing:
    """A thread of one rank that passes the address on."""

    def __init__(self, folder, which):
        self.run_dir = RunDir(folder, which.attempt)
        self.run_dir.folder.mkdir(parents=True)
        self.stopping = threading.Event()
        self.error = None
        self.point = Rendezvous(self.run_dir, which, self.stopping)
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self):
        try:
            self.point.pass_address_on()
        except RuntimeError as error:
            self.error = error

    def stop(self):
        self.stopping.set()
        self.thread.join(60)
        assert not self.thread.is_alive()


@pytest.mark.parametrize(
    ("which", "needed"),
    [
        (launch(0), True),
        (launch(2), True),
        (launch(1, local_rank=1), False),
        (launch(0, local=4), False),
    ],
)
def test_one_rank_of_each_node_passes_it_on_if_there_are_several(which, needed):
    assert is_needed(which) is needed


def test_the_address_comes_from_the_file_of_one_node_to_that_of_another(tmp_path, store):
    passing = [Passing(tmp_path / str(rank), launch(rank)) for rank in (0, 2)]
    time.sleep(0.5)
    assert read_reporter_address(passing[1].run_dir) is None
    passing[0].run_dir.reporter.write_bytes(msgspec.json.encode(ADDRESS))
    for each in passing:
        each.thread.join(20)
        assert not each.thread.is_alive()
    assert read_reporter_address(passing[1].run_dir) == ADDRESS
    assert passing[1].run_dir.reporter.stat().st_mode & 0o777 == 0o600


def test_each_attempt_has_its_own_address(tmp_path, store):
    first = Passing(tmp_path / "0", launch(0))
    later = Passing(tmp_path / "2", launch(2, attempt=1))
    first.run_dir.reporter.write_bytes(msgspec.json.encode(ADDRESS))
    first.thread.join(20)
    time.sleep(0.5)
    assert read_reporter_address(later.run_dir) is None
    later.stop()


def test_it_ends_when_told_to(tmp_path, store):
    passing = Passing(tmp_path, launch(2))
    time.sleep(0.3)
    passing.stop()
    assert passing.error is None


def test_a_store_that_is_not_there_is_reported(tmp_path, store, monkeypatch):
    monkeypatch.setattr(rendezvous, "PATIENCE", timedelta(seconds=1))
    monkeypatch.setenv("MASTER_ADDR", "256.0.0.1")
    passing = Passing(tmp_path, launch(2))
    passing.thread.join(100)
    assert passing.error is not None


@pytest.mark.parametrize("value", [b"", b"\xff", b"[1]", b'{"host": 1, "port": 2, "token": "t"}'])
def test_what_somebody_else_has_written_into_the_store_is_reported(tmp_path, store, value):
    store.set("distdiag/reporter/0", value)
    passing = Passing(tmp_path, launch(2))
    passing.thread.join(60)
    assert "holds no address of the reporter" in str(passing.error)
    assert not passing.run_dir.reporter.exists()


def test_a_rank_that_raised_waits_for_the_address_if_it_can_come(tmp_path, store):
    # It may not have come to the store yet.
    passing = [Passing(tmp_path / str(rank), launch(rank)) for rank in (2, 0)]
    late = threading.Timer(
        0.5, passing[1].run_dir.reporter.write_bytes, [msgspec.json.encode(ADDRESS)]
    )
    late.start()
    passing[0].point.wait(60)
    assert read_reporter_address(passing[0].run_dir) == ADDRESS
    for each in (late, passing[1].thread):
        each.join(20)


def test_nobody_waits_where_there_is_no_store(tmp_path):
    run_dir = RunDir(tmp_path, 0)
    # The time limit of the test is what ends it otherwise.
    Rendezvous(run_dir, launch(2), threading.Event()).wait(3600)
    assert read_reporter_address(run_dir) is None


def test_torch_is_left_for_the_script_to_import(tmp_path):
    code = (
        "import sys, threading\nfrom pathlib import Path\n"
        "from distdiag.agent.rendezvous import _open_store\n"
        "assert _open_store() is None\nassert 'torch' not in sys.modules\n"
    )
    assert os.spawnl(os.P_WAIT, sys.executable, sys.executable, "-c", code) == 0
