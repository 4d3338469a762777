"""What a monitor saw is read back, also when the last record was cut off."""

import os

import pytest

from distdiag.events.base import Frame, Phase
from distdiag.events.errors import DamagedFileError
from distdiag.events.lifecycle import Exited, Heartbeat, Monitored
from distdiag.events.stacks import Stacks, ThreadStack
from distdiag.record.wire import Interner
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


def beat(time_s, *, batches=0):
    return Heartbeat(
        rank=2,
        seq=-1,
        time_ns=int(time_s * 1e9),
        phase=Phase.SCRIPT,
        beat_ns=0,
        num_batches=batches,
    )


def looked(time_s):
    return Monitored(rank=2, seq=-1, time_ns=int(time_s * 1e9), act="looked")


def test_events_come_back_in_order(tmp_path):
    path = written(tmp_path / "journal", STACKS, EXITED)
    assert list(read_journal(path, Interner())) == [STACKS, EXITED]
    assert path.stat().st_mode & 0o777 == 0o600


def test_looks_and_heartbeats_that_nothing_follows_are_not_written(tmp_path):
    path = written(tmp_path / "journal", beat(1), looked(1), beat(2), looked(2))
    assert list(read_journal(path, Interner())) == []


def test_an_event_comes_with_the_last_look_and_what_ranks_did_since_they_moved(tmp_path):
    before = [beat(1), looked(1), beat(2, batches=1), beat(3, batches=1), beat(3.1, batches=1)]
    path = written(tmp_path / "journal", *before, beat(3.2, batches=1), looked(3.3), STACKS)
    reported = [beat(2, batches=1), beat(3, batches=1), beat(3.2, batches=1), looked(3.3), STACKS]
    assert list(read_journal(path, Interner())) == reported


def test_what_follows_an_event_is_written_for_a_while(tmp_path):
    later = [beat(2), looked(2), beat(3), looked(3), beat(9), looked(9)]
    path = written(tmp_path / "journal", looked(1), STACKS, *later)
    assert list(read_journal(path, Interner())) == [looked(1), STACKS, *later[:4]]


def test_a_second_journal_goes_on_where_the_first_ended(tmp_path):
    written(tmp_path / "journal", STACKS)
    path = written(tmp_path / "journal", EXITED)
    assert list(read_journal(path, Interner())) == [STACKS, EXITED]


@pytest.mark.parametrize("num_bytes", [1, 3, 20])
def test_a_record_that_was_cut_off_is_left_out(tmp_path, num_bytes):
    path = written(tmp_path / "journal", STACKS, EXITED)
    os.truncate(path, path.stat().st_size - num_bytes)
    assert list(read_journal(path, Interner())) == [STACKS]


@pytest.mark.parametrize("data", [b"\xff\xff\xff\xff", b"\x02\x00\x00\x00\xc1\xc1"])
def test_a_foreign_file_is_reported_with_its_path(tmp_path, data):
    path = tmp_path / "journal"
    path.write_bytes(data)
    with pytest.raises(DamagedFileError, match=str(path)):
        list(read_journal(path, Interner()))


def test_a_place_that_cannot_be_written_loses_the_journal_and_nothing_else(tmp_path):
    journal = Journal(tmp_path / "no" / "journal")
    journal.write(STACKS)
    assert isinstance(journal.stopped, FileNotFoundError)
