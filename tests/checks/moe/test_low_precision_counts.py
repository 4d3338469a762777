from distdiag.checks.moe.low_precision_counts import LowPrecisionCounts
from distdiag.events.ranks import RankSet
from distdiag.events.routing import CountsHeld
from distdiag.findings.finding import Severity
from tests.checks.streams import event_of, plain_site
from tests.checks.verdicts import findings


def judged(**values):
    fields = {
        "model": "Net",
        "layer": "layers.0.moe",
        "how": "added up",
        "dtype": "bfloat16",
        "greatest": 300.0,
        "site": plain_site(12),
    }
    event = event_of(CountsHeld, 1, step=3, **{**fields, **values})
    return findings(LowPrecisionCounts, event)


def test_counts_beyond_the_significand_are_reported_with_the_limit():
    (finding,) = judged()
    assert (finding.severity, finding.ranks) == (Severity.WARNING, RankSet([1]))
    assert finding.subjects == ("layers.0.moe",)
    assert (
        "added up in bfloat16, which holds whole numbers exactly only up to 256" in finding.message
    )
    assert judged(dtype="float16", greatest=2049.0, how="all-reduced")


def test_counts_that_the_type_holds_are_silent():
    assert not judged(greatest=256.0)
    assert not judged(dtype="float16", greatest=2048.0)
    assert not judged(dtype="float32", greatest=1e6)
