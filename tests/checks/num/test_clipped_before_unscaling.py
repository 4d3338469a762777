from distdiag.checks.num.clipped_before_unscaling import ClippedBeforeUnscaling
from distdiag.events.updates import ScaledClip
from distdiag.views.updates import ClipView
from tests.checks.streams import event_of, plain_site
from tests.checks.verdicts import findings


def judged(limit: float, scale: float = 65536.0):
    event = event_of(
        ScaledClip,
        api="clip_grad_norm_",
        limit=limit,
        scale=scale,
        optimizer="SGD",
        site=plain_site(27),
    )
    return findings(ClippedBeforeUnscaling, ClipView({0: event, 1: event}))


def test_a_limit_for_gradients_that_are_not_scaled_is_named():
    (finding,) = judged(1.0)
    assert (finding.location.line, list(finding.ranks)) == (27, [0, 1])
    assert "to 1 while they are still multiplied by 65536, so in effect to 1.5e-05" in (
        finding.message
    )


def test_a_limit_that_was_multiplied_by_the_scale_is_silent():
    assert not judged(0.5 * 65536.0)


def test_a_scale_of_one_is_silent():
    assert not judged(1.0, scale=1.0)
