"""Which lock a line takes, and whether a stack stands inside of it, by the program's source."""

import pytest

from distdiag.checks.shared.lock_blocks import awaited_lock, frame_with_lock
from tests.checks.streams import Program, library

SOURCE = """
def run(self):
    with self.lock:
        work = self.items.pop()
        send(work)
    rest()

def explicit(lock):
    lock.acquire()
    compute()
    lock.release()
    after()

def nested(images):
    with open("x") as file, images.lock:
        fetch(file)
    queue.get()
"""


@pytest.fixture
def program(tmp_path):
    return Program(tmp_path, SOURCE)


@pytest.mark.parametrize(
    ("line", "lock"),
    [
        ("with self.lock:", "self.lock"),
        ("lock.acquire()", "lock"),
        ('with open("x")', "images.lock"),
        ("send(work)", ""),
        ("queue.get()", ""),
    ],
)
def test_the_lock_that_a_line_takes(program, line, lock):
    assert awaited_lock((program.frame(line),)) == lock


def test_a_wait_with_a_frame_of_python_inside_is_for_no_such_lock(program):
    inner = library("multiprocessing/synchronize.py", "__enter__")
    assert awaited_lock((inner, program.frame("with self.lock:"))) == ""
    assert awaited_lock(()) == ""


@pytest.mark.parametrize(
    ("line", "lock", "is_held"),
    [
        ("send(work)", "self.lock", True),
        ("send(work)", "images.lock", True),
        ("send(work)", "self.other", False),
        ("send(work)", "lock", False),
        ("with self.lock:", "self.lock", False),
        ("rest()", "self.lock", False),
        ("compute()", "lock", True),
        ("after()", "lock", False),
        ("fetch(file)", "images.lock", True),
    ],
)
def test_the_frame_that_stands_inside(program, line, lock, is_held):
    frame = program.frame(line)
    inner = library("queue.py", "get")
    assert frame_with_lock((inner, frame), lock, frame.file) == (frame if is_held else None)
    assert frame_with_lock((inner, frame), lock, "other.py") is None
