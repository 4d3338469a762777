"""Events from a list."""

from distdiag.events.lifecycle import Finished
from distdiag.transports.memory import MemorySource


def test_every_event_is_yielded_once_and_in_order():
    first, second = (Finished(rank=rank, seq=0, time_ns=0, exit_status=0) for rank in (1, 0))
    with MemorySource([first]) as source:
        assert list(source.poll()) == [first]
        source.add(second, first)
        assert list(source.poll()) == [second, first]
        assert list(source.poll()) == []
