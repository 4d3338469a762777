"""Who has a lock or a pipe, by the kernel's own tables."""

import fcntl
import os

import pytest

from distdiag.dumps.process.kernel import read_blocked_call
from distdiag.dumps.process.locks import (
    FileLock,
    has_lock,
    has_pipe,
    lock_of_descriptor,
    parse_locks,
    read_locks,
)
from tests.dumps.programs import running, until

TABLE = """\
1: POSIX  ADVISORY  WRITE 2071 fe:00:2147081 0 EOF
1: -> POSIX  ADVISORY  WRITE 2088 fe:00:2147081 0 EOF
2: FLOCK  ADVISORY  READ  20996 00:2b:77 0 EOF
3: OFDLCK ADVISORY  WRITE -1 103:05:8 0 7
4: LEASE  ACTIVE    READ  311 fe:00:12 0 EOF
something else
"""

WAITER = """
import fcntl, os, sys
file = os.open(sys.argv[1], os.O_RDWR)
print("ready", flush=True)
fcntl.{call}(file, fcntl.LOCK_EX)
"""


def test_the_table_of_locks_is_read():
    locks = parse_locks(TABLE)
    assert locks[:2] == (
        FileLock(False, "POSIX", "WRITE", 2071, "fe:00:2147081"),
        FileLock(True, "POSIX", "WRITE", 2088, "fe:00:2147081"),
    )
    assert [(lock.kind, lock.pid) for lock in locks[2:]] == [
        ("FLOCK", 20996),
        ("OFDLCK", -1),
        ("LEASE", 311),
    ]


@pytest.mark.parametrize("call", ["flock", "lockf"])
def test_who_waits_and_who_has_the_lock(tmp_path, call):
    with (tmp_path / "cache.lock").open("w") as file:
        getattr(fcntl, call)(file, fcntl.LOCK_EX)
        with running(WAITER.format(call=call), file.name) as process:
            blocked = until(lambda: read_blocked_call(process.pid), lambda seen: seen.name)
            awaited = until(
                lambda: lock_of_descriptor(process.pid, blocked.descriptor, read_locks()), bool
            )
            assert awaited.file.endswith(f":{os.fstat(file.fileno()).st_ino}")
            assert has_lock(os.getpid(), awaited.file)
            assert not has_lock(process.pid, awaited.file)


def test_a_process_that_inherited_the_file_has_its_lock(tmp_path):
    with (tmp_path / "cache.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        (lock,) = [lock for lock in read_locks() if lock.pid == os.getpid()]
        code = "print('ready', flush=True); import time; time.sleep(100)"
        with running(code, pass_fds=[file.fileno()]) as process:
            file.close()
            assert has_lock(process.pid, lock.file)
            assert not has_lock(os.getpid(), lock.file)


def test_the_ends_of_a_pipe():
    reader, writer = os.pipe()
    pipe = os.readlink(f"/proc/self/fd/{reader}")
    code = "print('ready', flush=True); import time; time.sleep(100)"
    with running(code, pass_fds=[reader]) as process:
        os.close(reader)
        me = os.getpid()
        assert has_pipe(process.pid, pipe, writes=False)
        assert not has_pipe(process.pid, pipe, writes=True)
        assert (has_pipe(me, pipe, writes=True), has_pipe(me, pipe, writes=False)) == (True, False)
    os.close(writer)


def test_of_a_process_that_is_gone_nothing_is_known():
    assert not has_lock(1 << 22, "fe:00:1")
    assert not has_pipe(1 << 22, "pipe:[1]", writes=True)
    assert lock_of_descriptor(1 << 22, 3, parse_locks(TABLE.replace("->", ""))) is None
