"""What a monitor saw is read back, also when the last record was cut off."""

import os

import pytest

from distdiag.events.base import Frame, Phase
from distdiag.events.errors import DamagedFileError
from distdiag.events.lifecycle import Exited, Heartbeat
from distdiag.events.stacks import Stacks, ThreadStack
from distdiag.record.wire import Canon
from distdiag.transports.journal import Journal, read_journal

STACKS = Stacks(
    rank=3,
    seq=-1,
    time_ns=5,
    source="py-spy",
    threads=(ThreadStack("MainThread", (Frame("train.py", 3, "main"),)),),
)
EXITED = Exited(rank=2, seq=-1, time_ns=6, reason="the process is gone")


def written(path, *events):
    journal = Journal(path)
    for event in events:
        journal.write(event)
    assert journal.stopped is None
    return path


def test_events_come_back_in_order_without_heartbeats(tmp_path):
    beat = Heartbeat(rank=2, seq=-1, time_ns=1, phase=Phase.SCRIPT, beat_ns=1)
    path = written(tmp_path / "journal", STACKS, beat, EXITED)
    assert list(read_journal(path, Canon())) == [STACKS, EXITED]
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_second_journal_goes_on_where_the_first_ended(tmp_path):
    written(tmp_path / "journal", STACKS)
    path = written(tmp_path / "journal", EXITED)
    assert list(read_journal(path, Canon())) == [STACKS, EXITED]


@pytest.mark.parametrize("num_bytes", [1, 3, 20])
def test_a_record_that_was_cut_off_is_left_out(tmp_path, num_bytes):
    path = written(tmp_path / "journal", STACKS, EXITED)
    os.truncate(path, path.stat().st_size - num_bytes)
    assert list(read_journal(path, Canon())) == [STACKS]


@pytest.mark.parametrize("data", [b"\xff\xff\xff\xff", b"\x02\x00\x00\x00\xc1\xc1"])
def test_a_foreign_file_is_told_with_its_path(tmp_path, data):
    path = tmp_path / "journal"
    path.write_bytes(data)
    with pytest.raises(DamagedFileError, match=str(path)):
        list(read_journal(path, Canon()))


def test_a_place_that_cannot_be_written_loses_the_journal_and_nothing_else(tmp_path):
    journal = Journal(tmp_path / "no" / "journal")
    journal.write(STACKS)
    assert isinstance(journal.stopped, FileNotFoundError)
