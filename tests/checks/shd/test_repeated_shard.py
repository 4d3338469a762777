"""SHD027: the words in which shards that are the same are reported."""

from distdiag.checks.shd.repeated_shard import RepeatedShard, RepeatedSums
from distdiag.events.base import CallSite
from distdiag.events.models import PartsSummed
from tests.checks.verdicts import findings


def test_the_weights_the_layer_and_the_ranks_are_named():
    event = PartsSummed(
        rank=0,
        seq=1,
        time_ns=1,
        step=1,
        module="Net/mlp",
        number=0,
        members=(0, 1),
        digest="a",
        weights=(("mlp.up.weight", "w"),),
        site=CallSite(()),
    )
    (finding,) = findings(RepeatedShard, RepeatedSums({0: event, 1: event}, (0, 1)))
    assert finding.message == (
        "ranks 0-1 hold equal shards of mlp.up.weight of Net and add up the results of mlp, "
        "so that the sum is one part times 2; shards should differ"
    )
    assert finding.step == 1
    assert "steps 0 and 1" in finding.evidence[0].summary
