"""Processes that a rank starts and that end badly are written down when the rank notices."""

import multiprocessing
import multiprocessing.popen_fork
import os
import signal
import sys

from distdiag.events.lifecycle import ChildEnded
from tests.probes.conftest import Observed

FORK = multiprocessing.get_context("fork")


def die(number: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def start_another(status: int) -> None:
    child = FORK.Process(target=sys.exit, args=(status,))
    child.start()
    child.join()


def ends(observed: Observed) -> list[int]:
    return [event.status for event in observed.events(ChildEnded)]


def test_how_a_process_ended_badly(observed: Observed) -> None:
    observed.install("child-processes")
    children = [FORK.Process(target=sys.exit, args=(status,)) for status in (0, 3)]
    for child in children:
        child.start()
        child.join()
        assert child.exitcode is not None

    (event,) = observed.events(ChildEnded)
    assert (event.pid, event.status) == (children[1].pid, 3)


def test_a_worker_that_its_pool_has_replaced(observed: Observed) -> None:
    observed.install("child-processes")
    with FORK.Pool(1) as pool:
        pool.map_async(die, [1])
        while not ends(observed):
            pass

    assert ends(observed)[0] == -signal.SIGKILL


def test_what_a_child_starts_is_its_own_affair(observed: Observed) -> None:
    observed.install("child-processes")
    child = FORK.Process(target=start_another, args=(5,))
    child.start()
    child.join()

    assert child.exitcode == 0
    assert ends(observed) == []
