"""A whole comparison: which runs are made, in which order, and what came of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from distdiag.config.tasks import Dropout, ParityTask
from distdiag.events.comparisons import Divergence, Reason, Subject
from distdiag.events.errors import DamagedFileError, UsageError
from distdiag.findings.finding import Report
from distdiag.parity.comparison import Comparison, Result
from distdiag.parity.configurations import Configuration
from distdiag.parity.launcher import RECORDS, Launcher, RunSpec, Script
from distdiag.parity.recorded_run import RecordedRun
from distdiag.parity.slots import Slot, need_of, slots_for
from distdiag.record.recording import Kind

PERTURBATION_SEED: Final = 20_240_607
"""Which weights become a unit of rounding larger and which smaller; any number does."""
PERTURBED: Final = "perturbed"
AGAIN_STEPS: Final = 3
"""What is not deterministic shows in so many steps."""
OWN_BATCHES: Final = "no DataLoader: each run made its own, and what the model was given agrees"
UNLIKE: Final = (
    "the script makes its batches itself, and not the same ones on other numbers of ranks: {}. Let "
    "the size of a rank's batch depend on their number (--per-rank), or pass batches through "
    "distdiag.parity.batch()"
)
NO_BATCHES: Final = (
    "no batch came from a DataLoader, so the runs cannot be given the same ones: pass batches that "
    "the script makes itself through distdiag.parity.batch(), or use --same-global-batch"
)
DRAWS: Final = (
    "the forward pass draws random numbers (dropout, noise), and a run on other ranks draws "
    "others: not comparable. --dropout off switches dropout off in all runs"
)
UNSEEDED: Final = (
    "{} begins with other weights each time that it runs, so nothing else can be compared: seed "
    "all generators before the model is made, and let no other thread draw from them meanwhile"
)


@dataclass(frozen=True, slots=True)
class Settings:
    """How the runs are made."""

    num_steps: int
    is_replayed: bool
    dropout: Dropout = "on"
    padding: dict[str, float] = field(default_factory=dict)
    most_at_once: int | None = None
    timeout_s: float = 1800.0


@dataclass(slots=True)
class Outcome:
    """What came of one configuration; `own_report` is what the checks found in its run alone."""

    configuration: Configuration
    result: Result
    own_report: Report | None


class Study:
    """Compares configurations of a script with the first one."""

    def __init__(
        self,
        folder: Path,
        script: Script,
        settings: Settings,
        say: Callable[[str], None],
    ) -> None:
        """Make the runs below `folder`; `say` is called with the name of each run."""
        self._folder = folder
        self._launcher = Launcher(folder, script, settings.timeout_s, read_recording)
        self._settings = settings
        self._is_replayed = settings.is_replayed
        self._say = say
        self._reference: RecordedRun | None = None
        self._repeats: list[RecordedRun] = []
        self._source: RecordedRun | None = None

    def compare(self, configurations: Sequence[Configuration]) -> list[Outcome]:
        """Run everything and compare each configuration with the first one.

        Raises:
            UsageError: a run failed, or the runs cannot be compared.

        """
        reference, *others = configurations
        first = max(others, key=lambda each: each.num_ranks)
        recorded = {first: self._record(first)}
        rest = [each for each in others if each != first]
        dtype = self._source.compute_dtype if self._source is not None else ""
        again, perturbed, self._reference, *replayed = self._run_all(
            [
                self._spec(reference, "again", num_steps=AGAIN_STEPS),
                self._spec(reference, PERTURBED, perturbation_dtype=dtype),
                self._spec(reference, "reference"),
                *(self._spec(each) for each in rest),
            ]
        )
        due = self._reference.compute_dtype
        if due != dtype:  # the reference computes in another one than the recorded run
            (perturbed,) = self._run_all([self._spec(reference, PERTURBED, perturbation_dtype=due)])
        self._repeats = [*self._unlike_repeats(again, reference), perturbed]
        recorded.update(zip(rest, replayed, strict=True))
        outcomes = []
        for configuration in others:
            run = recorded[configuration]
            comparison = Comparison(
                self._reference, self._repeats, run, is_replayed=self._is_replayed
            )
            result = comparison.run()
            found = result.divergence
            if self._has_own_batches:
                if found is not None and found.subject is Subject.DATA:
                    raise UsageError(UNLIKE.format(found.explanation))
                result.not_compared["batches"] = OWN_BATCHES
            result.divergence = self._weighed(comparison, reference, result)
            own_report = self._launcher.report(_folder_name(configuration.label))
            outcomes.append(Outcome(configuration, result, own_report))
        return outcomes

    # The runs

    @property
    def _has_own_batches(self) -> bool:
        """Whether batches were to be replayed, and there were none to record."""
        return self._settings.is_replayed and not self._is_replayed

    def _unlike_repeats(
        self, again: RecordedRun, configuration: Configuration
    ) -> list[RecordedRun]:
        """Return the repeat of the reference, whole, unless it began the same to the last bit."""
        assert self._reference is not None
        if not again.repeats(self._reference, (Kind.START,)):
            raise UsageError(UNSEEDED.format(configuration.label))
        if again.repeats(self._reference):
            return []
        if again.num_steps < self._reference.num_steps:
            return self._run_all([self._spec(configuration, "again")])
        return [again]

    def _record(self, configuration: Configuration) -> RecordedRun:
        (run,) = self._run_all([self._spec(configuration)])
        if self._is_replayed and not any(s.num_batches for s in run.summaries.values()):
            if not all(s.num_given for s in run.summaries.values()):
                raise UsageError(NO_BATCHES)
            self._is_replayed = False
        if any(summary.draws_in_forward for summary in run.summaries.values()):
            raise UsageError(f"{configuration.label}: {DRAWS}")
        self._source = run
        return run

    def _run_all(self, specs: Sequence[RunSpec]) -> list[RecordedRun]:
        """Make runs at the same time where the machine has room for that."""
        slots: Sequence[Slot] = [{}]
        if self._source is not None and len(specs) > 1:
            num_ranks = max(spec.num_ranks for spec in specs)
            need = need_of(self._source.summaries.values(), num_ranks)
            slots = slots_for(need, len(specs), self._settings.most_at_once)
        for spec in specs:
            self._say(spec.name)
        return self._launcher.run_all(specs, slots)

    def _spec(
        self,
        configuration: Configuration,
        purpose: str = "",
        *,
        num_steps: int = 0,
        perturbation_dtype: str = "",
        sources: Sequence[int] = (),
    ) -> RunSpec:
        """Return how to make a run; one with a purpose helps to compare the others."""
        name = "-".join(filter(None, (_folder_name(configuration.label), purpose)))
        settings, replayed = self._settings, ""
        if self._is_replayed and self._source is not None:
            replayed = str(self._folder / _folder_name(self._source.label) / RECORDS)
            sources = sources or sources_of(self._source)
        task = ParityTask(
            folder=str(self._folder / name / RECORDS),
            num_steps=min(num_steps or settings.num_steps, settings.num_steps),
            replayed=replayed,
            sources=tuple(sources),
            perturbation=PERTURBATION_SEED if purpose == PERTURBED else None,
            perturbation_dtype=perturbation_dtype,
            padding=settings.padding,
            dropout=settings.dropout,
        )
        return RunSpec(
            name,
            configuration.label,
            configuration.num_ranks,
            task,
            configuration.arguments,
            is_checked=not purpose,
        )

    # Explaining

    def _weighed(
        self, comparison: Comparison, reference: Configuration, result: Result
    ) -> Divergence | None:
        """Find out with which weight the data of each coordinate enters, if that may explain it."""
        found = result.divergence
        wanted = (Subject.OUTPUT, Subject.LOSS, Subject.GRADIENT)
        if found is None or found.subject not in wanted or found.step:
            return found
        if found.reason is not Reason.UNKNOWN or (found.explanation and not found.is_share):
            return found
        if not self._is_replayed or self._source is None:
            return found
        sources, number = sources_of(self._source), comparison.num_coordinates
        if number < 2 or len(sources) % number:
            return found
        each = len(sources) // number
        shares = [sources[first : first + each] for first in range(0, len(sources), each)]
        alone = self._run_all(
            [
                self._spec(reference, f"alone-{share[0]}-{each}", sources=share, num_steps=1)
                for share in shares
            ]
        )
        gradients = comparison.gradient_pairs(0)
        weights = comparison.weights(gradients, alone)
        if weights is None and found.subject is Subject.GRADIENT:
            weights = comparison.weights(result.pairs, alone)  # of those that differ
        is_output = found.subject is Subject.OUTPUT
        if comparison.is_mean(gradients, alone) and (
            weights is None or found.is_share or is_output
        ):
            return msgspec.structs.replace(found, reason=Reason.BATCH)
        if is_output:
            return comparison.beside_alone(found, alone)
        if weights is None or found.is_share:
            return found
        return msgspec.structs.replace(found, **weights.fields)


def read_recording(folder: Path, label: str) -> RecordedRun:
    """Return what the ranks of a run recorded.

    Raises:
        DamagedFileError: they recorded nothing that can be compared.
        UsageError: they could not be given the batches of another run.

    """
    recorded = RecordedRun(folder, label)
    if recorded.problem:
        raise UsageError(f"{label} cannot be given the same batches: {recorded.problem}")
    if not recorded.num_steps:
        raise DamagedFileError("it took no optimizer step")
    return recorded


def sources_of(recorded: RecordedRun) -> Sequence[int]:
    """Return one rank of each data coordinate of a run."""
    return [coordinate[0] for coordinate in recorded.coordinates]


def _folder_name(label: str) -> str:
    return "".join(char if char.isalnum() else "-" for char in label)
