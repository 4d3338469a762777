"""Where ranks call from: what `Join` calls for a rank without inputs comes from anywhere."""

import msgspec

from distdiag.engine.collectives.calls import CollectiveStreams
from distdiag.events.base import CallSite, Frame
from distdiag.events.ranks import RankSet
from tests.engine.collectives.test_lost_calls import GROUP, SUM, call

JOIN = Frame("/torch/distributed/algorithms/join.py", 300, "__exit__", user=False)


def site(line, *inner):
    return CallSite((*inner, Frame("train.py", line, "main")))


def test_a_stand_in_call_parts_no_ranks():
    stream = CollectiveStreams(RankSet((0, 1))).stream(GROUP)
    for number in range(3):
        stream.add(msgspec.structs.replace(call(0, number), site=site(22)))
        done = msgspec.structs.replace(call(1, number), site=site(20, JOIN))
        assert stream.add(done) is None
    assert stream.parted is None
    stream.add(msgspec.structs.replace(call(0, 3, SUM), site=site(22)))
    assert stream.add(msgspec.structs.replace(call(1, 3, SUM), site=site(20))) is not None
    assert stream.parted is not None
