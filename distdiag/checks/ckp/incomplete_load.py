"""CKP003: weights keep their initial values although a checkpoint was loaded into the model."""

from collections.abc import Iterator
from typing import Final, NamedTuple

from distdiag.checks.base import Check
from distdiag.checks.shared.replicas import first_and_more
from distdiag.events.checkpoints import WeightsLoaded
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.alignment import WeightsLoadedView

_MUCH: Final = 0.2
"""A renamed part with this share of a model's bytes is no exchanged head any more."""

_MEBIBYTE: Final = 1 << 20


class _Reason(NamedTuple):
    text: str
    fix: str
    grade: Grade
    confidence: float


class IncompleteLoad(Check[WeightsLoadedView]):
    """Weights keep their initial values although a checkpoint was loaded into the model.

    ## What you see
    The run trains with, or freezes, weights that are random numbers; the loss is higher than it
    should be, and no error says why. With `strict=False`, or when the program catches the error, a
    load skips tensors that the checkpoint does not name.

    ## Example
        # wrong: the file was saved from DDP, so all names begin with `module.` and none fits
        model.load_state_dict(torch.load(path), strict=False)

        # right: change the names, and let a mismatch fail
        state = torch.load(path)
        state = {name.removeprefix("module."): value for name, value in state.items()}
        model.load_state_dict(state)

    ## How to fix
    Load with `strict=True`. Or print `missing_keys` of what `load_state_dict(state, strict=False)`
    returns, and make sure that each of these tensors is intended to be new.

    Changes: The weights that training begins with.

    Leaves: Results of runs that began with these weights.

    ## When it is not a defect
    The named tensors are intended to be new (a head, an adapter), or were filled from a different
    source.

    To silence it, set `ignore = ["CKP003"]` in `distdiag.toml`.

    ## References
    - https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/6032
    - https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html
    """

    code = "CKP003"
    name = "incomplete-load"
    severity = Severity.WARNING

    def check(self, alignment: WeightsLoadedView) -> Iterator[Finding]:
        """Judge what each rank has left out, once for ranks that left out the same."""
        same: dict[tuple[object, ...], dict[int, WeightsLoaded]] = {}
        for rank, event in alignment.by_rank.items():
            key = (event.missing, event.given_prefix, event.num_renamed, event.is_refused)
            same.setdefault(key, {})[rank] = event
        for by_rank in same.values():
            yield from self._judge(by_rank)

    def _judge(self, by_rank: dict[int, WeightsLoaded]) -> Iterator[Finding]:
        ranks, event = RankSet(by_rank), by_rank[min(by_rank)]
        reason = _reason(event)
        if reason is None:
            return
        location = user_location(event.site.frames)
        yield self.finding(
            f"{event.num_missing} of {event.num_tensors} tensors of {event.target} "
            f"({_size(event.missing_bytes)} of {_size(event.num_bytes)}) were not loaded and keep "
            f"their initial values: {reason.text}",
            ranks=ranks,
            step=event.step,
            location=location,
            subjects=event.missing,
            grade=reason.grade,
            confidence=reason.confidence,
            fix=reason.fix,
            evidence=(
                Evidence(
                    ranks=ranks,
                    summary=f"load of {event.num_given} tensors; missing: "
                    f"{first_and_more(event.missing)}",
                    location=location,
                ),
                Evidence(ranks=ranks, summary=_rest(event)),
            ),
        )


def _reason(event: WeightsLoaded) -> _Reason | None:
    grade = Grade.PROVEN if event.num_untouched == event.num_missing else Grade.LIKELY
    is_nothing = event.num_loaded == 0
    if event.at_step == 0 and event.num_renamed > 1:
        change = f"the checkpoint has them under {_prefix(event.given_prefix)} and the model "
        change += f"under {_prefix(event.wanted_prefix)}"
        fix = f"Before the load, replace the prefix {_prefix(event.given_prefix)} of the names in "
        fix += f"the checkpoint by {_prefix(event.wanted_prefix)}."
        if is_nothing or event.renamed_bytes >= _MUCH * event.num_bytes:
            return _Reason(change, fix, grade, 0.95)
        if not event.is_refused:
            return _Reason(change, fix, Grade.NOTE, 0.5)
    fix = IncompleteLoad.fix
    if is_nothing and event.num_given:
        text = f"the model has no tensor with the name of one of the {event.num_given} in the "
        text += "checkpoint"
        return _Reason(text, fix, Grade.LIKELY, 0.85)
    if event.at_step:
        return None  # what is missing may be trained by now
    if event.is_refused:
        text = "a strict load failed, and the program caught the error and went on"
        return _Reason(
            text,
            "Do not catch the error of the strict load: let it end the run.",
            Grade.LIKELY,
            0.8,
        )
    if event.holes:
        text = f"{first_and_more(event.holes)} are missing although their neighbours were loaded"
        return _Reason(text, fix, Grade.LIKELY, 0.8)
    if 2 * event.missing_bytes > event.num_bytes:
        return None  # an adapter, or a part of a larger model
    return _Reason(
        "they are new, or the names in the checkpoint are different", fix, Grade.NOTE, 0.4
    )


def _rest(event: WeightsLoaded) -> str:
    seen = f"{event.num_untouched} of them still have the values that they had at the load"
    if event.num_unknown:
        seen += f", {event.num_unknown} can no longer be compared"
    if not event.num_unexpected:
        return f"{seen}; all tensors of the checkpoint were used"
    return f"{seen}; not in the model: {first_and_more(event.unexpected)}"


def _prefix(prefix: str) -> str:
    return f"`{prefix}`" if prefix else "no prefix"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / _MEBIBYTE:.1f} MiB" if num_bytes >= _MEBIBYTE else f"{num_bytes} bytes"
