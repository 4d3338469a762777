"""What curves tell, where nothing explains it better."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from distdiag.diagnosis.causes import FITS, SAID, SHOWN, Clue, Issue
from distdiag.diagnosis.facts import Facts
from distdiag.findings.finding import Severity
from distdiag.metrics.judging import Kind, Observation

_CODE: Final = ("model_code", "the training loop and the loss: which mistake would look like this")
_CONFIG: Final = ("config", "learning rate, warm-up, clipping, precision and batch size")
_ERRORS: Final = ("error_messages", "warnings and errors of the time at which it began")

_DIVERGENCE: Final = Issue(
    id="divergence",
    title="training diverges",
    severity=Severity.ERROR,
    fix="Go back to the last checkpoint before it, clip gradients (max_norm=1.0), divide the"
    " learning rate by 2 to 10, and look at the batches of the step at which the gradient grew.",
    quick="clip gradients at 1.0 and lower the learning rate",
    wants=(_CONFIG, _CODE),
    explains=("not-finite", "spike"),
)
_EXPLOSION: Final = Issue(
    id="gradient-explosion",
    title="gradients explode",
    severity=Severity.ERROR,
    fix="Clip gradients (torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)), lower the"
    " learning rate or lengthen its warm-up; look at normalisation, initialisation, and recurrent"
    " parts.",
    quick="clip gradients at 1.0",
    wants=(_CONFIG, _CODE),
    explains=("divergence", "not-finite", "spike"),
)
_ISSUES: Final = {
    Kind.DIVERGENCE: _DIVERGENCE,
    Kind.EXPLOSION: _EXPLOSION,
    Kind.NOT_FINITE: Issue(
        id="not-finite",
        title="a value is NaN or infinite",
        severity=Severity.ERROR,
        fix="Run up to this step with torch.autograd.set_detect_anomaly(True), which names the"
        " operation, or under distdiag check, which names the first tensor and rank.",
        quick="run with torch.autograd.set_detect_anomaly(True)",
        wants=(_ERRORS, _CODE, _CONFIG),
    ),
    Kind.SPIKE: Issue(
        id="spike",
        title="a value spikes, and comes back",
        severity=Severity.WARNING,
        fix="Look at the batch of this step; clip gradients.",
        wants=(_CONFIG,),
    ),
    Kind.STUCK: Issue(
        id="stuck",
        title="the loss stays the same to the last digit: the weights do not change",
        severity=Severity.ERROR,
        fix="See that the optimizer holds the parameters that the model uses, that they require"
        " gradients, that the loss is not detached, and that the learning rate is not 0.",
        quick="print one weight before and after optimizer.step()",
        wants=(_CODE, _CONFIG),
        explains=("plateau", "zero-gradient"),
    ),
    Kind.ZERO_GRADIENT: Issue(
        id="zero-gradient",
        title="gradients are exactly 0",
        severity=Severity.ERROR,
        fix="Find where the graph is cut (detach, no_grad, argmax), or what is saturated.",
        wants=(_CODE,),
        explains=("plateau",),
    ),
    Kind.PLATEAU: Issue(
        id="plateau",
        title="the loss no longer falls",
        severity=Severity.WARNING,
        fix="Compare the level to that of guessing by frequency; change the learning rate by 3, and"
        " see whether a few samples can be learned by heart.",
        wants=(_CODE, _CONFIG),
    ),
    Kind.OVERFITTING: Issue(
        id="overfitting",
        title="the validation loss rises while the training loss falls",
        severity=Severity.WARNING,
        fix="Keep the checkpoint of the minimum; stop there, or use more data, dropout or weight"
        " decay.",
        quick="stop at the minimum of the validation loss",
        wants=(_CODE,),
    ),
    Kind.RATE_JUMP: Issue(
        id="learning-rate-jump",
        title="the learning rate jumps",
        severity=Severity.WARNING,
        fix="See whether the schedule was made anew, or stepped twice, at this step.",
        wants=(_CODE,),
    ),
    Kind.RATE_ZERO: Issue(
        id="learning-rate-zero",
        title="the learning rate is 0: nothing is learned any more",
        severity=Severity.WARNING,
        fix="Make the schedule as long as the run, and count steps, not epochs or micro-batches.",
        wants=(_CONFIG, _CODE),
        explains=("plateau", "stuck"),
    ),
    Kind.RESTART_LOSS: Issue(
        id="restart-loss",
        title="the loss jumps at a restart: something was not restored",
        severity=Severity.WARNING,
        fix="Save and load weights, optimizer, schedule, scaler, sampler and random states.",
        wants=(_CODE,),
    ),
    Kind.RESTART_RATE: Issue(
        id="restart-learning-rate",
        title="the learning rate starts anew at a restart",
        severity=Severity.WARNING,
        fix="Save and load the schedule's state_dict with the checkpoint.",
        wants=(_CODE,),
        explains=("restart-loss",),
    ),
    Kind.RANKS_PART: Issue(
        id="ranks-part",
        title="ranks of one run log different curves",
        severity=Severity.WARNING,
        fix="Run a few steps under distdiag check: it names the parameter or batch that differs.",
        wants=(_CODE,),
    ),
    Kind.ENTROPY_COLLAPSE: Issue(
        id="entropy-collapse",
        title="the entropy of the output falls to 0: the model always gives the same",
        severity=Severity.ERROR,
        fix="Raise the entropy bonus or the KL penalty, lower the learning rate, and look at the"
        " reward.",
        wants=(_CONFIG,),
    ),
    Kind.REWARD_COLLAPSE: Issue(
        id="reward-collapse",
        title="the reward falls and does not come back",
        severity=Severity.ERROR,
        fix="Go back to the checkpoint before it; lower the learning rate, raise the KL penalty.",
        wants=(_CONFIG,),
    ),
    Kind.STRAGGLER: Issue(
        id="straggler",
        title="one rank is slower than the others, which wait for it",
        severity=Severity.WARNING,
        fix="Compare clocks, temperature, data loading and batch sizes of this rank to the others.",
        wants=(),
    ),
    Kind.SLOWER: Issue(
        id="slower",
        title="steps take longer and longer",
        severity=Severity.WARNING,
        fix="Look for lists that grow, graphs that are kept (loss without item()), slow storage.",
        wants=(_CODE,),
    ),
}
_WEAK: Final = (Kind.SPIKE, Kind.PLATEAU)
"""They fit many things, most of them harmless."""


def observations(facts: Facts) -> Iterator[Clue]:
    """Yield what was observed at warning or above, the first of each kind."""
    seen: set[Kind] = set()
    for observation in facts.measured.judgement.observations:
        kind = observation.kind
        if kind in seen or kind not in _ISSUES or observation.severity is Severity.INFO:
            continue
        seen.add(kind)
        yield from _clues(facts, observation)


def _clues(facts: Facts, observation: Observation) -> Iterator[Clue]:
    issue = _ISSUES[observation.kind]
    is_over = observation.kind is Kind.NOT_FINITE and observation.severity is Severity.WARNING
    weight = FITS if observation.kind in _WEAK or is_over else SHOWN
    evidence = facts.measured.evidence(observation)
    yield Clue(issue, weight, evidence, observation.message.rstrip("."))
    meanings = {
        Kind.DIVERGENCE: "diverges",
        Kind.EXPLOSION: "diverges",
        Kind.NOT_FINITE: "nan",
        Kind.STUCK: "stuck",
        Kind.PLATEAU: "stuck",
        Kind.OVERFITTING: "overfits",
        Kind.ENTROPY_COLLAPSE: "collapse",
    }
    meaning = meanings.get(observation.kind)
    said = facts.said(meaning) if meaning else ()
    if said:
        yield Clue(issue, SAID, said)


RULES: Final = (observations,)
