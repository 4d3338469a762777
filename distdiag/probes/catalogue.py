"""All probes, and the modules of torch that each of them waits for.

This module imports no probe: importing one imports torch, which is left to the user's script.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import cached_property
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Final, NamedTuple

from distdiag.config import Config
from distdiag.probes.base import Probe
from distdiag.record.recorder import Recorder
from distdiag.record.signals import Signals

if TYPE_CHECKING:
    from distdiag.probes.creations import Creations
    from distdiag.probes.models.registry import LiveModels
    from distdiag.probes.models.snapshot import ModelSnapshots
    from distdiag.probes.routing.passes import Biases


class Wiring:
    """What probes are made with: each of them is given the parts that it needs."""

    def __init__(self, recorder: Recorder, signals: Signals, config: Config) -> None:
        """Make the rest when it is asked for: it needs torch."""
        self.recorder = recorder
        self.signals = signals
        self.config = config

    @property
    def is_light(self) -> bool:
        """Whether only the beginning of a run is sampled closely."""
        return self.config.profile == "light"

    @cached_property
    def models(self) -> LiveModels:
        """The models that there are."""
        from distdiag.probes.models.registry import LiveModels

        return LiveModels(self.creations)

    @cached_property
    def creations(self) -> Creations:
        """Where the user made what findings name."""
        from distdiag.probes.creations import Creations

        return Creations(self.recorder)

    @cached_property
    def snapshots(self) -> ModelSnapshots:
        """Who looks at models, and names them."""
        from distdiag.probes.models import snapshot

        return snapshot.ModelSnapshots(
            self.recorder,
            self.signals.pick(snapshot.Moments),
            self.models,
            self.creations,
            self.routing_biases.has,
            only_start=self.is_light,
        )

    @cached_property
    def routing_biases(self) -> Biases:
        """The biases by which modules choose experts."""
        from distdiag.probes.routing.passes import Biases

        return Biases()


Make = Callable[[Wiring], Sequence[Probe]]


class ProbeSpec(NamedTuple):
    """Probes that belong together: made and installed when all of `needs` have been imported.

    What needs nothing is there before the script begins.
    """

    name: str
    needs: tuple[str, ...]
    make: Make


def _only(module: str, probe: str, *signals: str) -> Make:
    """Make one probe that needs no more than the recorder and the signals of these names."""

    def make(wiring: Wiring) -> Sequence[Probe]:
        kind = getattr(importlib.import_module(f"distdiag.{module}"), probe)
        return [kind(wiring.recorder, *[getattr(wiring.signals, name) for name in signals])]

    return make


def _collectives(wiring: Wiring) -> Sequence[Probe]:
    from distdiag.probes.collectives.dispatcher import DispatcherTap
    from distdiag.probes.collectives.functional import FunctionalTap
    from distdiag.probes.collectives.hooks import HookTap
    from distdiag.probes.collectives.python_wrappers import CollectiveWrappers
    from distdiag.probes.collectives.strict import StrictGate, own_store
    from distdiag.probes.collectives.work import WorkProbe

    recorder, signals, config = wiring.recorder, wiring.signals, wiring.config
    gate = None
    if config.strict:
        gate = StrictGate(recorder.rank, config.strict_timeout_s, own_store())
    functional = FunctionalTap(recorder, signals.exchange_starting)
    call_signals = (signals.collective_recorded, signals.exchange_known)
    taps = [kind(recorder, functional, *call_signals, gate) for kind in (DispatcherTap, HookTap)]
    # If neither works, installing the first one says why.
    tap = next((tap for tap in taps if tap.can_observe()), taps[0])
    works = WorkProbe(recorder, signals.work_waited)
    wrappers = CollectiveWrappers(
        recorder, tap, works, signals.tensors_shared, signals.exchange_starting
    )
    return [functional, tap, works, wrappers]


def _meshes(wiring: Wiring) -> Sequence[Probe]:
    from distdiag.probes.models.meshes import DeviceMeshes

    return [DeviceMeshes(wiring.recorder, wiring.creations)]


def _steps(wiring: Wiring) -> Sequence[Probe]:
    snapshots, clocks = wiring.snapshots, _clocks(wiring)
    if wiring.is_light:
        return [snapshots, *clocks]
    return [snapshots, _loss_weights(wiring, snapshots), _gradients(wiring, snapshots), *clocks]


def _combined_shards(wiring: Wiring) -> Sequence[Probe]:
    from distdiag.probes.models.combined_shards import CombinedShards

    return [CombinedShards(wiring.recorder, wiring.signals.tensors_shared, wiring.models.roots)]


def _broken_passes(wiring: Wiring) -> Sequence[Probe]:
    from distdiag.probes.process.broken_passes import BrokenPasses, Moments

    return [BrokenPasses(wiring.recorder, wiring.signals.pick(Moments))]


def _clocks(wiring: Wiring) -> Sequence[Probe]:
    from distdiag.probes.optimizers.steps import BackwardProbe, StepClock

    recorder, signals = wiring.recorder, wiring.signals
    return [
        BackwardProbe(
            recorder, signals.before_backward, signals.backward_started, signals.backward_ended
        ),
        StepClock(
            recorder, signals.optimizer_stepping, signals.optimizer_stepped, signals.step_ended
        ),
    ]


def _loss_weights(wiring: Wiring, snapshots: ModelSnapshots) -> Probe:
    from distdiag.probes.losses import probe as losses

    return losses.LossProbe(
        wiring.recorder,
        wiring.signals.pick(losses.Moments),
        snapshots.own_steps,
        wiring.config.aux_loss.coefficient,
    )


def _gradients(wiring: Wiring, snapshots: ModelSnapshots) -> Probe:
    from distdiag.probes.gradients import sums

    # By name: what knows libraries stands above the probes.
    deepspeed = importlib.import_module("distdiag.frameworks.deepspeed")
    return sums.GradientSumProbe(
        wiring.recorder,
        wiring.signals.pick(sums.Moments),
        wiring.models.roots,
        snapshots.name_of,
        [deepspeed.kept_by_deepspeed],
    )


def _summed_parts(wiring: Wiring) -> Sequence[Probe]:
    if wiring.is_light:
        return []
    from distdiag.probes.collectives.summed_parts import SummedParts

    signals, name_of = wiring.signals, wiring.snapshots.name_of
    shared, ended = signals.tensors_shared, signals.step_ended
    return [SummedParts(wiring.recorder, shared, ended, wiring.models.roots, name_of)]


def _random_states(wiring: Wiring) -> Sequence[Probe]:
    from distdiag.probes.random.states import RandomStates

    step_ended = None if wiring.is_light else wiring.signals.step_ended
    return [RandomStates(wiring.recorder, wiring.signals.model_started, step_ended)]


def _poison(wiring: Wiring) -> Sequence[Probe]:
    if not wiring.config.poison_empty:
        return []
    from distdiag.probes.process.poison import PoisonedMemory

    return [PoisonedMemory(wiring.recorder, wiring.signals.step_ended)]


def _verify_sequence(wiring: Wiring) -> Sequence[Probe]:
    if not wiring.config.verify_sequence:
        return []
    from distdiag.probes.sequence.verify import Moments, VerifySequence

    moments = wiring.signals.pick(Moments)
    sequence = wiring.config.sequence
    # By name: what knows libraries stands above the probes.
    table = importlib.import_module("distdiag.frameworks.sequence_functions").LIBRARIES
    return [VerifySequence(wiring.recorder, sequence, moments, wiring.models.roots, table)]


def _parity(wiring: Wiring) -> Sequence[Probe]:
    if not wiring.config.parity_task:
        return []
    from distdiag.config.tasks import ParityTask
    from distdiag.probes.parity.recorder import ParityRecorder

    return [ParityRecorder(wiring.recorder, ParityTask.read(wiring.config.parity_task))]


def _routing_recorder(wiring: Wiring) -> Sequence[Probe]:
    if not wiring.config.routing_task:
        return []
    from distdiag.config.tasks import RoutingTask
    from distdiag.probes.routing.recorder import RoutingRecorder

    return [RoutingRecorder(wiring.recorder, RoutingTask.read(wiring.config.routing_task))]


def _loads(wiring: Wiring) -> Sequence[Probe]:
    from distdiag.probes.checkpoints.loads import LoadProbe

    signals = wiring.signals
    read, planned = signals.state_read, signals.load_planned
    return [LoadProbe(wiring.recorder, read, planned, wiring.models.roots)]


def _rank_states(wiring: Wiring) -> Sequence[Probe]:
    from distdiag.probes.checkpoints.rank_states import RankStates

    signals, known_name = wiring.signals, wiring.snapshots.known_name
    read, planned = signals.state_read, signals.load_planned
    return [RankStates(wiring.recorder, read, planned, wiring.models.roots, known_name)]


def _data(wiring: Wiring) -> Sequence[Probe]:
    from distdiag.probes.data.feeds import Moments, StepFeeds
    from distdiag.probes.data.fetches import Fetches
    from distdiag.probes.data.samplers import SamplerProbe
    from distdiag.probes.optimizers.schedules import Schedules
    from distdiag.probes.random.step_draws import StepDraws

    recorder, signals, creations = wiring.recorder, wiring.signals, wiring.creations
    feeds = StepFeeds(recorder, signals.pick(Moments), wiring.models.roots, creations)
    fetches = Fetches(recorder)
    stepping, step_ended = signals.optimizer_stepping, signals.step_ended
    return [
        feeds,
        fetches,
        SamplerProbe(recorder, feeds, fetches, stepping, step_ended, creations),
        StepDraws(recorder, feeds),
        Schedules(recorder, signals.optimizer_stepped, signals.step_ended),
    ]


def _routing(wiring: Wiring) -> Sequence[Probe]:
    config = wiring.config
    if wiring.is_light and config.routing_task:
        return []  # which records all that this one would look at
    from distdiag.probes.models.registry import ModelNames
    from distdiag.probes.routing.probe import Moments, RoutingProbe

    moments = wiring.signals.pick(Moments)
    named, biases = config.routing.modules, wiring.routing_biases
    names = ModelNames(wiring.creations)
    return [RoutingProbe(wiring.recorder, moments, biases, named, names, is_light=wiring.is_light)]


def _sequence(wiring: Wiring) -> Sequence[Probe]:
    if wiring.is_light:
        return []
    from distdiag.probes.sequence.probe import Moments, SequenceProbe

    return [SequenceProbe(wiring.recorder, wiring.signals.pick(Moments))]


_C10D: Final = "torch.distributed.distributed_c10d"
_DCP: Final = "torch.distributed.checkpoint"

PROBES: Final = (
    ProbeSpec("files", (), _only("probes.files.probe", "FileProbe", "before_sync", "file_access")),
    ProbeSpec(
        "host-waits",
        ("torch", _C10D),
        _only("probes.files.host_waits", "HostWaits", "work_waited", "file_access", "before_sync"),
    ),
    ProbeSpec(
        "store-calls", ("torch", _C10D), _only("probes.collectives.store_calls", "StoreCalls")
    ),
    ProbeSpec(
        "process-groups", ("torch", _C10D), _only("probes.collectives.groups", "ProcessGroups")
    ),
    ProbeSpec("device-meshes", ("torch", "torch.distributed.device_mesh"), _meshes),
    ProbeSpec(
        "child-processes",
        ("multiprocessing.popen_fork",),
        _only("probes.process.children", "ChildEnds"),
    ),
    ProbeSpec("collectives", ("torch", _C10D), _collectives),
    ProbeSpec("steps", ("torch",), _steps),
    ProbeSpec("summed-parts", ("torch", _C10D), _summed_parts),
    ProbeSpec(
        "surroundings",
        ("torch", _C10D),
        _only("probes.process.surroundings", "SurroundingsProbe", "collective_recorded"),
    ),
    ProbeSpec("random-states", ("torch",), _random_states),
    ProbeSpec(
        "random-draws",
        ("torch", "torch.distributed.tensor._random"),
        _only("probes.random.draws", "RandomDraws"),
    ),
    ProbeSpec("poison-empty", ("torch", "torch.utils.deterministic"), _poison),
    ProbeSpec("verify-sequence", ("torch", _C10D), _verify_sequence),
    ProbeSpec("parity", ("torch",), _parity),
    ProbeSpec("routing-recorder", ("torch",), _routing_recorder),
    ProbeSpec("save", ("torch",), _only("probes.process.phases", "SaveProbe", "state_saving")),
    ProbeSpec("live-saves", ("torch",), _only("probes.checkpoints.live_saves", "LiveSaves")),
    ProbeSpec(
        "dataloader",
        ("torch", "torch.utils.data.dataloader"),
        _only("probes.process.phases", "DataLoaderProbe"),
    ),
    ProbeSpec("routing", ("torch",), _routing),
    ProbeSpec("sequence", ("torch", _C10D), _sequence),
    ProbeSpec("data", ("torch", "torch.utils.data.dataloader"), _data),
    ProbeSpec(
        "sharded-forwards",
        (
            "torch",
            "torch.distributed.fsdp",
            "torch.distributed.fsdp._fully_shard._fsdp_state",
        ),
        _only(
            "probes.models.sharding_moments", "ShardedForwards", "forward_started", "forward_ended"
        ),
    ),
    ProbeSpec(
        "sharding-context",
        ("torch", "torch.distributed.fsdp._fully_shard._fsdp_param_group"),
        _only("probes.collectives.sharding_context", "ShardingContext"),
    ),
    ProbeSpec(
        "parallel-moments",
        ("torch", "torch.distributed.tensor.parallel"),
        _only(
            "probes.models.parallelize_plans",
            "ParallelMoments",
            "model_parallelizing",
            "model_wrapped",
        ),
    ),
    ProbeSpec(
        "parallelize-plans",
        ("torch", "torch.distributed.tensor.parallel"),
        _only("probes.models.parallelize_plans", "ParallelizePlans", "step_ended"),
    ),
    ProbeSpec("ignore-lists", ("torch",), _only("probes.models.ignore_lists", "IgnoreLists")),
    ProbeSpec(
        "sequence-buffers",
        ("torch", "torch.distributed.tensor.experimental"),
        _only("probes.sequence.buffers", "SequenceBuffers", "sequence_cut"),
    ),
    ProbeSpec(
        "veomni-plans",
        ("torch", "veomni.distributed.parallel_plan"),
        _only("frameworks.veomni", "VeOmniPlans"),
    ),
    ProbeSpec(
        "transformers-plans",
        ("torch", "transformers.modeling_utils"),
        _only("frameworks.transformers", "TransformersPlans"),
    ),
    ProbeSpec("broken-passes", ("torch", "torch.utils.data.dataloader"), _broken_passes),
    ProbeSpec("combined-shards", ("torch", "torch.distributed.tensor"), _combined_shards),
    ProbeSpec(
        "partial-reads",
        ("torch", "torch.distributed.tensor"),
        _only("probes.models.partial_reads", "PartialReads", "tensors_shared", "step_ended"),
    ),
    ProbeSpec(
        "sharding-moments",
        (
            "torch",
            "torch.distributed.fsdp",
            "torch.distributed.fsdp._fully_shard._fsdp_state",
        ),
        _only(
            "probes.models.sharding_moments",
            "ShardingMoments",
            "model_wrapped",
            "before_first_forward",
        ),
    ),
    ProbeSpec(
        "checkpoint",
        ("torch", f"{_DCP}.state_dict_saver", f"{_DCP}.state_dict_loader"),
        _only("probes.process.phases", "CheckpointProbe"),
    ),
    ProbeSpec(
        "compile",
        ("torch", "torch._dynamo.callback"),
        _only("probes.process.phases", "CompileProbe"),
    ),
    ProbeSpec("loads", ("torch",), _loads),
    ProbeSpec(
        "rank-states",
        ("torch", f"{_DCP}.state_dict_saver", f"{_DCP}.state_dict_loader"),
        _rank_states,
    ),
    ProbeSpec(
        "resumed-loaders",
        (
            "torch",
            "torch.utils.data.dataloader",
            "torchdata.stateful_dataloader.stateful_dataloader",
        ),
        _only("frameworks.torchdata", "ResumedLoaders"),
    ),
    ProbeSpec(
        "evaluation-gathers",
        ("torch", "accelerate.accelerator", "accelerate.data_loader"),
        _only("frameworks.accelerate", "EvaluationGathers"),
    ),
)


def find_probes() -> list[ProbeSpec]:
    """Return all probes: those above, and those that a folder beside this module lists itself.

    A folder does so as `PROBES` in its ``__init__.py``, which must not import torch.
    """
    package = importlib.import_module(__package__)
    modules = iter_modules(package.__path__, f"{__package__}.")
    folders = [importlib.import_module(each.name) for each in modules if each.ispkg]
    return [*PROBES, *(spec for each in folders for spec in getattr(each, "PROBES", ()))]
