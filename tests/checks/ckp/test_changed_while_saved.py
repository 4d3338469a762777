from distdiag.checks.ckp.changed_while_saved import ChangedWhileSaved
from distdiag.events.checkpoints import ChangedWhileSaved as Event
from distdiag.findings.finding import Severity
from tests.checks.streams import event_of, plain_site
from tests.checks.verdicts import findings


def test_what_was_changed_is_named_with_the_line_that_saves():
    event = event_of(
        Event,
        names=("model.0.weight", "model.0.bias", "model.2.weight"),
        num_changed=9,
        num_saved=12,
        thread="ThreadPoolExecutor-0_0",
        site=plain_site(22),
    )
    (finding,) = findings(ChangedWhileSaved, event)
    assert (finding.severity, finding.location.line) == (Severity.WARNING, 22)
    assert finding.message.startswith("model.0.weight and 8 more tensors were changed while thread")
    assert finding.subjects == event.names
