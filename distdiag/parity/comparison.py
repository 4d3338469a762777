"""Puts a recorded run and its reference side by side, and finds what differs first."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec
import numpy as np

from distdiag.config.tasks import RankSummary
from distdiag.events.base import Frame
from distdiag.events.comparisons import Difference, Divergence, Reason, Subject
from distdiag.events.ranks import RankSet
from distdiag.parity.batches import are_alike, differing_data, shared_samples
from distdiag.parity.explanations import (
    NOTHING,
    Pair,
    Weights,
    common_factor,
    explain,
    gradients_of,
    is_mean_of,
    is_multiple,
    weights_of,
)
from distdiag.parity.losses import loss_pairs, share_of, total_loss
from distdiag.parity.outputs import differing_ranks, is_reordered, is_that_of_alone, output_pairs
from distdiag.parity.parts import compare_parts, experts_of, find_spots, num_parts
from distdiag.parity.recorded_run import RecordedRun
from distdiag.parity.tensors import ACCURACY, MOST_EXPLAINED, Rates, Tensors, kept, norm_pairs
from distdiag.parity.tolerance import compare
from distdiag.record.recording import Kind

SHOWN: Final = 8


@dataclass(frozen=True, slots=True)
class StepRow:
    """One step of the comparison: the losses, and the worst ratio to the bound of each kind."""

    step: int
    reference_loss: float
    candidate_loss: float
    ratios: dict[Subject, float]


@dataclass(slots=True)
class Result:
    """What a comparison found: at most one divergence, since the rest would follow from it."""

    divergence: Divergence | None = None
    rows: list[StepRow] = field(default_factory=list)
    not_compared: dict[str, str] = field(default_factory=dict)
    pairs: list[Pair] = field(default_factory=list)
    drawn_anew: list[str] = field(default_factory=list)
    """Parameters that each rank draws its part of, so that no two runs train the same model."""


class Comparison:
    """Compares one run with its reference."""

    def __init__(
        self,
        reference: RecordedRun,
        repeats: Sequence[RecordedRun],
        candidate: RecordedRun,
        *,
        is_replayed: bool,
    ) -> None:
        """Compare `candidate` with `reference`, as far apart as its `repeats` allow.

        `is_replayed`: both got the same batches in the same order.
        """
        self._reference = reference
        self._repeats = repeats
        spots = find_spots(reference, candidate)
        self._num_parts, self._experts = num_parts(spots), experts_of(reference, spots)
        self._candidate = candidate = candidate.with_parts_at(spots) if spots else candidate
        self._is_replayed = is_replayed
        self._is_aligned = is_replayed or are_alike(reference, candidate)
        self._result = Result()
        self._tensors = Tensors(reference, repeats, candidate, self._result.not_compared)
        self._rates = Rates(reference, candidate)

    def run(self) -> Result:
        """Go through the steps until something differs."""
        result = self._result
        result.divergence = self._data() or self._start()
        if result.divergence is not None or result.drawn_anew:
            return result
        num_steps = min(run.num_steps for run in (self._reference, self._candidate, *self._repeats))
        for step in range(num_steps):
            row = StepRow(step, *self._losses(step), {})
            result.rows.append(row)
            result.divergence = self._step(step, row)
            if result.divergence is not None:
                break
        return result

    def _step(self, step: int, row: StepRow) -> Divergence | None:
        stages = (
            (Subject.OUTPUT, self._outputs(step)),
            (
                Subject.LOSS,
                loss_pairs(self._reference, self._repeats, self._candidate, step),
            ),
            (Subject.GRADIENT, self._tensors.pairs(Kind.GRADIENT, step)),
            (Subject.UPDATE, self._updates(step)),
        )
        for subject, found in stages:
            pairs = list(found)
            row.ratios[subject] = max((pair.difference.ratio for pair in pairs), default=0.0)
            differing = [pair for pair in pairs if pair.difference.ratio > 1]
            if (
                subject is Subject.LOSS
                and differing
                and self._is_left_to_gradients(step, differing)
            ):
                continue
            if differing:
                self._result.pairs = differing
                return self._divergence(subject, step, differing, len(pairs))
        return self._copies(step)

    def _is_left_to_gradients(self, step: int, losses: Sequence[Pair]) -> bool:
        """Say whether losses have a factor of the layout that the gradients do not have.

        A loss that is multiplied by the ranks that share a sequence, since gradients are divided by
        their number, is right; if gradients differ otherwise, they tell more.
        """
        if not is_multiple(losses, self.sizes(step)):
            return False
        gradients = list(self._tensors.pairs(Kind.GRADIENT, step))
        differing = [pair for pair in gradients if pair.difference.ratio > 1]
        return bool(gradients) and (
            not differing or not is_multiple(differing[:MOST_EXPLAINED], self.sizes(step))
        )

    def _copies(self, step: int) -> Divergence | None:
        """Find parameters of which a wrapper should keep all copies alike, to the bit."""
        before = self._candidate.differing_replicas(Kind.START, 0)
        found = self._candidate.differing_replicas(Kind.PARAMETER, step, is_kept=True)
        unlike = {name: groups for name, groups in found.items() if name not in before}
        if not unlike:
            return None
        # What the first rank holds is what was compared with the reference, and agrees.
        groups = next(iter(unlike.values())).values()
        first = min(min(ranks) for ranks in groups)
        others = RankSet(rank for ranks in groups if first not in ranks for rank in ranks)
        differences = [
            Difference(name=name, measured=math.nan, bound=0.0, ratio=math.inf, factor=math.nan)
            for name in unlike
        ]
        pairs = [Pair(each, np.empty(0), np.empty(0)) for each in differences]
        num_compared = len(self._candidate.names(Kind.PARAMETER, step))
        return msgspec.structs.replace(
            self._divergence(Subject.UPDATE, step, pairs, num_compared),
            explanation=f"that of {'ranks' if len(others) > 1 else 'rank'} {others} is no longer "
            "what the others hold, though the wrapper keeps them alike",
            culprits=others,
        )

    def _divergence(
        self, subject: Subject, step: int, pairs: Sequence[Pair], num_compared: int
    ) -> Divergence:
        explanation = NOTHING
        if subject is not Subject.OUTPUT:
            explanation = explain(pairs[:MOST_EXPLAINED], self.sizes(step))
        found = Divergence(
            rank=0,
            seq=0,
            time_ns=0,
            step=step,
            subject=subject,
            candidate=self._candidate.label,
            reference=self._reference.label,
            differences=tuple(pair.difference for pair in pairs[:SHOWN]),
            num_compared=num_compared,
            explanation=explanation.text,
            fix=explanation.fix,
            culprits=self._holders(subject, step, pairs[0].difference.name, explanation.parts),
            padded=self._padded(step),
            is_filled=any(each.is_filled for each in self._summaries()),
        )
        match subject:
            case Subject.OUTPUT:
                culprits = differing_ranks(pairs[0], self._candidate.coordinates)
                return msgspec.structs.replace(found, culprits=culprits)
            case Subject.LOSS:
                return self._of_share(self._by_function(found, step), step)
            case Subject.GRADIENT:
                details = tuple(self._unlike_replicas(step))
                found = msgspec.structs.replace(found, details=details)
                return self._of_axis(self._by_function(found, step), pairs)
            case Subject.UPDATE:
                details = tuple(self._rates.details(step))
                found = msgspec.structs.replace(found, details=details)
                return self._of_shards(found, pairs)
            case _:
                return found

    def _holders(self, subject: Subject, step: int, name: str, parts: Sequence[float]) -> RankSet:
        """Return the ranks that hold these parts of a parameter, if not all do."""
        kind = Kind.GRADIENT if subject is Subject.GRADIENT else Kind.PARAMETER
        records = self._candidate.by_rank(kind, step, 0, name)
        return RankSet(
            rank
            for rank, record in records.items()
            if record.part != record.shape and record.at[0] / record.shape[0] in parts
        )

    # Reasons

    def _of_share(self, found: Divergence, step: int) -> Divergence:
        """Say which part of a loss differs, if it is one."""
        gradients = [pair.difference for pair in self._tensors.pairs(Kind.GRADIENT, step)]
        is_open = found.reason is Reason.UNKNOWN and not found.explanation
        share = share_of(gradients) if is_open else None
        if share is None:
            return found
        return msgspec.structs.replace(
            found,
            explanation=share.explanation,
            differences=(*found.differences, *share.differing)[:SHOWN],
            is_share=True,
        )

    def _by_function(self, found: Divergence, step: int) -> Divergence:
        """Name the first function of the program that returns something else.

        If that is the same in another order, it is the reason.
        """
        runs = (self._reference, self._repeats, self._candidate)
        functions = output_pairs(*runs, step, self._experts, Kind.FUNCTION)
        differing = (pair for pair in functions if pair.difference.ratio > 1)
        first = next(differing, None) if self._is_aligned else None
        if first is None:
            return found
        records = self._candidate.by_rank(Kind.FUNCTION, step, 0, first.difference.name)
        site = next((each.site for each in records.values()), None)
        if is_reordered(first):
            return msgspec.structs.replace(
                found,
                reason=Reason.ORDER,
                differences=(first.difference, *found.differences)[:SHOWN],
                explanation="",
                fix="",
                site=site,
            )
        where = f", line {site.line}" if site is not None else ""
        name = first.difference.name.partition("#")[0]
        detail = f"the first function of the program that returns something else is {name}{where}"
        return msgspec.structs.replace(found, details=(*found.details, detail))

    def _of_axis(self, found: Divergence, pairs: Sequence[Pair]) -> Divergence:
        """Tell gradients that are off by the number of the ranks that share a parameter."""
        num_sharing = len(self._candidate.summaries) // len(self._candidate.coordinates)
        factor = common_factor(pairs)
        is_some = len(pairs) < found.num_compared
        if factor is None or num_sharing < 2 or not is_some or found.reason is Reason.ORDER:
            return found
        if not any(abs(factor / k - 1) < ACCURACY for k in (num_sharing, 1 / num_sharing)):
            return found
        if any(self._is_part(Kind.GRADIENT, found.step, pair) for pair in pairs):
            return found
        return msgspec.structs.replace(found, reason=Reason.AXIS, fix="")

    def _of_shards(self, found: Divergence, pairs: Sequence[Pair]) -> Divergence:
        """Tell an optimizer that makes something of a part that it would not of the whole.

        Then all parameters that differ are spread over ranks, with no factor in common, and one
        that is not, or that another optimizer holds, agrees.
        """
        if found.explanation or not all(
            self._is_part(Kind.PARAMETER, found.step, pair) for pair in pairs
        ):
            return found
        holders: dict[str, str] = {}
        sites: dict[str, Frame] = {}
        for summary in self._summaries():
            holders.update(summary.optimizers)
            sites.update(summary.optimizer_sites)
        holding = {holders.get(pair.difference.name, "") for pair in pairs}
        kind = holding.pop() if len(holding) == 1 else ""
        is_only_some = len(pairs) < found.num_compared
        if not kind or not is_only_some:
            return found
        return msgspec.structs.replace(
            found, reason=Reason.SHARDS, explanation=kind, site=sites.get(kind)
        )

    def _is_part(self, kind: Kind, step: int, pair: Pair) -> bool:
        """Say whether each rank of the candidate holds a part of a parameter."""
        records = self._candidate.by_rank(kind, step, 0, pair.difference.name).values()
        return bool(records) and all(each.part != each.shape for each in records)

    def _summaries(self) -> list[RankSummary]:
        runs = (self._reference, *self._repeats, self._candidate)
        return [each for run in runs for each in run.summaries.values()]

    def _padded(self, step: int) -> tuple[str, ...]:
        """Return what was filled up in the batches of a run until a step."""
        summaries = self._summaries()
        found = [name for each in summaries if each.padded_at <= step for name in each.padded]
        return tuple(dict.fromkeys(found))

    def sizes(self, step: int) -> dict[str, int]:
        """Return the numbers that may stand behind a factor."""
        summaries = self._candidate.summaries.values()
        sizes = {"the number of ranks": len(self._candidate.summaries)}
        sizes["the number of data coordinates"] = len(self._candidate.coordinates)
        for summary in summaries:
            sizes.update({f"the size of mesh axis {k}": n for k, n in summary.mesh_sizes.items()})
        sizes["the number of parts of what is spread by hand"] = self._num_parts
        micro = self._candidate.num_micro(step)
        sizes["the number of accumulation steps"] = micro
        if micro > 1:
            sizes["accumulation steps and ranks together"] = micro * len(summaries)
        return {name: size for name, size in sizes.items() if size > 1}

    # Data and the beginning

    def _data(self) -> Divergence | None:
        if self._is_replayed:
            text, ranks = shared_samples(self._candidate)
        else:
            text, ranks = differing_data(self._reference, self._candidate), RankSet()
        return self._of_all(Subject.DATA, text, ranks) if text else None

    def _of_all(self, subject: Subject, text: str, ranks: RankSet) -> Divergence:
        return Divergence(
            rank=0,
            seq=0,
            time_ns=0,
            step=0,
            subject=subject,
            candidate=self._candidate.label,
            reference=self._reference.label,
            differences=(),
            num_compared=0,
            explanation=text,
            culprits=ranks,
        )

    def _start(self) -> Divergence | None:
        differing, names = [], self._reference.names(Kind.START, 0)
        for name in names:
            ours = self._reference.as_recorded(Kind.START, 0, name)
            theirs = self._candidate.as_recorded(Kind.START, 0, name)
            if ours is None or theirs is None or ours.shape != theirs.shape:
                loose = self._loose_parts(name)
                differing += [Pair(loose, np.empty(0), np.empty(0))] if loose is not None else []
            elif not np.array_equal(ours, theirs, equal_nan=True):
                unit = self._reference.unit(Kind.START, 0, name)
                found = compare(name, ours, theirs, (), unit)
                if found is not None and found.ratio > 1:
                    differing.append(kept(found, ours, theirs))
        if not differing:
            return None
        return self._divergence(Subject.START, 0, differing, len(names))

    def _loose_parts(self, name: str) -> Difference | None:
        """Return in which scale a parameter begins whose parts no mesh puts together."""
        parts = compare_parts(self._reference, self._candidate, name)
        if parts is None or parts.are_same:
            self._result.not_compared[name] = self._why_not(name)
        elif parts.difference is None:
            self._result.drawn_anew.append(name)
            self._result.not_compared[name] = "its parts begin with other values, as large as these"
        return None if parts is None else parts.difference

    def _why_not(self, name: str) -> str:
        for summary in self._candidate.summaries.values():
            if name in summary.unreadable:
                return summary.unreadable[name]
        theirs = self._candidate.by_rank(Kind.START, 0, 0, name)
        if not theirs:
            return f"no parameter of {self._candidate.label} has this name"
        shapes = {str(tuple(record.shape)) for record in theirs.values()}
        return (
            f"its parts have the shapes {', '.join(sorted(shapes))}, and no mesh says how they "
            "make up the whole"
        )

    # One step

    def _losses(self, step: int) -> tuple[float, float]:
        num = self._reference.num_micro(step)
        return total_loss(self._reference, step, num), total_loss(self._candidate, step, num)

    def _outputs(self, step: int) -> Iterator[Pair]:
        if self._is_aligned:
            runs = (self._reference, self._repeats, self._candidate)
            yield from output_pairs(*runs, step, self._experts)

    def _updates(self, step: int) -> Iterator[Pair]:
        """Yield the changes of parameters; the learning rates if rounding hides what they do."""
        yield from norm_pairs(self._reference, self._candidate, step)
        pairs = list(self._tensors.pairs(Kind.PARAMETER, step))
        yield from pairs
        if all(pair.difference.ratio <= 1 for pair in pairs):
            yield from self._rates.pairs(step)

    # Details

    def _unlike_replicas(self, step: int) -> list[str]:
        found = self._candidate.differing_replicas(Kind.GRADIENT, step)
        return [
            f"the ranks hold unlike gradients of {name}: {' | '.join(map(str, groups.values()))}"
            for name, groups in list(found.items())[:SHOWN]
        ]

    @property
    def num_coordinates(self) -> int:
        """How many data coordinates the candidate has."""
        return len(self._candidate.coordinates)

    def gradient_pairs(self, step: int) -> list[Pair]:
        """Return the gradients of a step that are no larger than can be explained."""
        return self._tensors.gradients(step)

    def weights(self, pairs: Sequence[Pair], alone: Sequence[RecordedRun]) -> Weights | None:
        """Find the weights of the coordinates' data, from runs on the data of each alone."""
        kept, parts = gradients_of(pairs, alone)
        return weights_of(kept, parts) if kept else None

    def beside_alone(self, found: Divergence, alone: Sequence[RecordedRun]) -> Divergence:
        """Look behind a module whose output depends on the batch.

        Each rank returned what a run on its data alone returns. Then the gradients should be the
        means of those of these runs, and what is not is what differs.
        """
        name = found.differences[0].name
        if not is_that_of_alone(self._candidate, alone, found.step, name):
            return found
        pairs: list[Pair] = []
        for pair in self._tensors.pairs(Kind.GRADIENT, found.step):
            parts = [run.whole(Kind.GRADIENT, found.step, pair.difference.name) for run in alone]
            theirs = self._candidate.whole(Kind.GRADIENT, found.step, pair.difference.name)
            known = [part for part in parts if part is not None]
            if theirs is None or len(known) < len(parts):
                continue
            mean, bound = np.mean(known, axis=0), pair.difference.bound
            difference = compare(pair.difference.name, mean, theirs, (), bound)
            if difference is not None and difference.measured > bound:
                ratio = difference.measured / bound
                difference = msgspec.structs.replace(difference, bound=bound, ratio=ratio)
                pairs.append(Pair(difference, mean, theirs))
        if not pairs:
            return found
        num_compared = len(self._reference.names(Kind.GRADIENT, found.step))
        weights = self.weights(pairs[:MOST_EXPLAINED], alone)
        return msgspec.structs.replace(
            self._divergence(Subject.GRADIENT, found.step, pairs, num_compared),
            **(weights.fields if weights is not None else {}),
            reference=f"the mean of runs of {self._reference.label} on the data of each",
        )

    def is_mean(self, pairs: Sequence[Pair], alone: Sequence[RecordedRun]) -> bool:
        """Say whether the gradients are the means of what each coordinate's data gives alone."""
        return is_mean_of(*gradients_of(pairs, alone))
