"""All probes, and the modules of torch that each of them waits for.

This module imports no probe: importing one imports torch, which is left to the user's script.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from distdiag.config import Config
from distdiag.probes.base import Probe
from distdiag.record.recorder import Recorder


class Plan(NamedTuple):
    """Probes that belong together: made and installed when all of `needs` have been imported.

    What needs nothing is there before the script begins.
    """

    name: str
    needs: tuple[str, ...]
    make: Callable[[Recorder, Config], Sequence[Probe]]


def _only(module: str, probe: str) -> Callable[[Recorder, Config], Sequence[Probe]]:
    """Make one probe that needs no more than the recorder."""

    def make(recorder: Recorder, _: Config) -> Sequence[Probe]:
        kind = getattr(importlib.import_module(f"distdiag.{module}"), probe)
        return [kind(recorder)]

    return make


def _collectives(recorder: Recorder, config: Config) -> Sequence[Probe]:
    from distdiag.probes.collectives.dispatcher import DispatcherTap
    from distdiag.probes.collectives.functional import FunctionalTap
    from distdiag.probes.collectives.hooks import HookTap
    from distdiag.probes.collectives.python_wrappers import CollectiveFronts
    from distdiag.probes.collectives.strict import StrictGate, own_store
    from distdiag.probes.collectives.work import WorkWatch

    gate = None
    if config.strict:
        gate = StrictGate(recorder.rank, config.strict_timeout_s, own_store())
    functional = FunctionalTap(recorder)
    taps = [kind(recorder, functional, gate) for kind in (DispatcherTap, HookTap)]
    # If neither works, installing the first one says why.
    tap = next((tap for tap in taps if tap.can_observe()), taps[0])
    works = WorkWatch(recorder)
    return [functional, tap, works, CollectiveFronts(recorder, tap, works)]


def _steps(recorder: Recorder, config: Config) -> Sequence[Probe]:
    from distdiag.probes.gradients.sums import GradientSumWatch
    from distdiag.probes.losses.watch import LossWatch
    from distdiag.probes.models.snapshot import Survey
    from distdiag.probes.optimizers.steps import BackwardWatch, StepClock

    survey = Survey(recorder, only_start=config.profile == "light")
    if config.profile == "light":
        return [survey, BackwardWatch(recorder, survey), StepClock(recorder, survey)]
    losses = LossWatch(recorder, survey.own_steps)
    followers = [BackwardWatch(recorder, survey, losses), StepClock(recorder, survey, losses)]
    return [survey, losses, GradientSumWatch(recorder, survey.name_of), *followers]


def _random_states(recorder: Recorder, config: Config) -> Sequence[Probe]:
    from distdiag.probes.random.states import RandomStates

    return [RandomStates(recorder, only_start=config.profile == "light")]


def _poison(recorder: Recorder, config: Config) -> Sequence[Probe]:
    if not config.poison_empty:
        return []
    from distdiag.probes.process.poison import PoisonedMemory

    return [PoisonedMemory(recorder)]


def _verify_sequence(recorder: Recorder, config: Config) -> Sequence[Probe]:
    if not config.verify_sequence:
        return []
    from distdiag.probes.sequence.verify import VerifySequence

    return [VerifySequence(recorder, config.sequence)]


def _parity(recorder: Recorder, config: Config) -> Sequence[Probe]:
    if not config.parity_task:
        return []
    from distdiag.config.tasks import ParityTask
    from distdiag.probes.parity.recorder import ParityRecorder

    return [ParityRecorder(recorder, ParityTask.read(config.parity_task))]


def _routing_recorder(recorder: Recorder, config: Config) -> Sequence[Probe]:
    if not config.routing_task:
        return []
    from distdiag.config.tasks import RoutingTask
    from distdiag.probes.routing.recorder import RoutingRecorder

    return [RoutingRecorder(recorder, RoutingTask.read(config.routing_task))]


def _data(recorder: Recorder, _: Config) -> Sequence[Probe]:
    from distdiag.probes.data.feeds import StepFeeds
    from distdiag.probes.data.samplers import SamplerWatch
    from distdiag.probes.optimizers.schedules import Schedules
    from distdiag.probes.random.step_draws import StepDraws

    feeds = StepFeeds(recorder)
    samplers = SamplerWatch(recorder, feeds)
    return [feeds, samplers, StepDraws(recorder, feeds), Schedules(recorder)]


def _routing(recorder: Recorder, config: Config) -> Sequence[Probe]:
    is_light = config.profile == "light"
    if is_light and config.routing_task:
        return []  # which records all that this one would look at
    from distdiag.probes.routing.watch import RoutingWatch

    return [RoutingWatch(recorder, config.routing.modules, is_light=is_light)]


def _sequence(recorder: Recorder, config: Config) -> Sequence[Probe]:
    if config.profile == "light":
        return []
    from distdiag.probes.sequence.probe import SequenceProbe

    return [SequenceProbe(recorder)]


_C10D: Final = "torch.distributed.distributed_c10d"
_DCP: Final = "torch.distributed.checkpoint"

PLANS: Final = (
    Plan("files", (), _only("probes.files.probe", "FileWatch")),
    Plan("store-calls", ("torch", _C10D), _only("probes.collectives.store_calls", "StoreCalls")),
    Plan("process-groups", ("torch", _C10D), _only("probes.collectives.groups", "ProcessGroups")),
    Plan("spawned-processes", ("torch", _C10D), _only("probes.process.spawned", "SpawnWatch")),
    Plan("collectives", ("torch", _C10D), _collectives),
    Plan("steps", ("torch",), _steps),
    Plan("random-states", ("torch",), _random_states),
    Plan(
        "random-draws",
        ("torch", "torch.distributed.tensor._random"),
        _only("probes.random.draws", "RandomDraws"),
    ),
    Plan("poison-empty", ("torch", "torch.utils.deterministic"), _poison),
    Plan("verify-sequence", ("torch", _C10D), _verify_sequence),
    Plan("parity", ("torch",), _parity),
    Plan("routing-recorder", ("torch",), _routing_recorder),
    Plan("save", ("torch",), _only("probes.process.phases", "SaveWatch")),
    Plan(
        "dataloader",
        ("torch", "torch.utils.data.dataloader"),
        _only("probes.process.phases", "DataLoaderWatch"),
    ),
    Plan("routing", ("torch",), _routing),
    Plan("sequence", ("torch", _C10D), _sequence),
    Plan("data", ("torch", "torch.utils.data.dataloader"), _data),
    Plan(
        "sharded-forwards",
        (
            "torch",
            "torch.distributed.fsdp",
            "torch.distributed.fsdp._fully_shard._fsdp_state",
        ),
        _only("probes.models.sharding_moments", "ShardedForwards"),
    ),
    Plan(
        "sharding-context",
        ("torch", "torch.distributed.fsdp._fully_shard._fsdp_param_group"),
        _only("probes.collectives.sharding_context", "ShardingContext"),
    ),
    Plan(
        "parallel-moments",
        ("torch", "torch.distributed.tensor.parallel"),
        _only("probes.models.parallel_moments", "ParallelMoments"),
    ),
    Plan(
        "parallelize-plans",
        ("torch", "torch.distributed.tensor.parallel"),
        _only("probes.models.parallelize_plans", "ParallelizePlans"),
    ),
    Plan(
        "sequence-buffers",
        ("torch", "torch.distributed.tensor.experimental"),
        _only("probes.sequence.buffers", "SequenceBuffers"),
    ),
    Plan(
        "veomni-plans",
        ("torch", "veomni.distributed.parallel_plan"),
        _only("frameworks.veomni", "VeOmniPlans"),
    ),
    Plan(
        "transformers-plans",
        ("torch", "transformers.modeling_utils"),
        _only("frameworks.transformers", "TransformersPlans"),
    ),
    Plan(
        "partial-reads",
        ("torch", "torch.distributed.tensor"),
        _only("probes.models.partial_reads", "PartialReads"),
    ),
    Plan(
        "sharding-moments",
        (
            "torch",
            "torch.distributed.fsdp",
            "torch.distributed.fsdp._fully_shard._fsdp_state",
        ),
        _only("probes.models.sharding_moments", "ShardingMoments"),
    ),
    Plan(
        "checkpoint",
        ("torch", f"{_DCP}.state_dict_saver", f"{_DCP}.state_dict_loader"),
        _only("probes.process.phases", "CheckpointWatch"),
    ),
    Plan(
        "compile",
        ("torch", "torch._dynamo.callback"),
        _only("probes.process.phases", "CompileWatch"),
    ),
    Plan("loads", ("torch",), _only("probes.checkpoints.loads", "LoadWatch")),
    Plan(
        "rank-states",
        ("torch", f"{_DCP}.state_dict_saver", f"{_DCP}.state_dict_loader"),
        _only("probes.checkpoints.rank_states", "RankStates"),
    ),
    Plan(
        "evaluation-gathers",
        ("torch", "accelerate.accelerator", "accelerate.data_loader"),
        _only("frameworks.accelerate", "EvaluationGathers"),
    ),
)
