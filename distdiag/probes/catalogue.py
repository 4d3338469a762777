"""All probes, and the modules of torch that each of them waits for.

This module imports no probe: importing one imports torch, which is left to the user's script.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from distdiag.config import Config
from distdiag.probes.base import Probe
from distdiag.recorder import Recorder


class Plan(NamedTuple):
    """Probes that belong together: made and installed when all of `needs` have been imported.

    What needs nothing is there before the script begins.
    """

    name: str
    needs: tuple[str, ...]
    make: Callable[[Recorder, Config], Sequence[Probe]]


def _files(recorder: Recorder, _: Config) -> Sequence[Probe]:
    from distdiag.probes.files import FileWatch

    return [FileWatch(recorder)]


def _store_calls(recorder: Recorder, _: Config) -> Sequence[Probe]:
    from distdiag.probes.store_calls import StoreCalls

    return [StoreCalls(recorder)]


def _collectives(recorder: Recorder, config: Config) -> Sequence[Probe]:
    from distdiag.probes.collective_fronts import CollectiveFronts
    from distdiag.probes.dispatcher_tap import DispatcherTap
    from distdiag.probes.functional import FunctionalTap
    from distdiag.probes.hook_tap import HookTap
    from distdiag.probes.strict import StrictGate
    from distdiag.probes.strict_store import own_store
    from distdiag.probes.work import WorkWatch

    gate = None
    if config.strict:
        gate = StrictGate(recorder.rank, config.strict_timeout_s, own_store())
    functional = FunctionalTap(recorder)
    taps = [kind(recorder, functional, gate) for kind in (DispatcherTap, HookTap)]
    # If neither works, installing the first one says why.
    tap = next((tap for tap in taps if tap.can_observe()), taps[0])
    works = WorkWatch(recorder)
    return [functional, tap, works, CollectiveFronts(recorder, tap, works)]


def _groups(recorder: Recorder, _: Config) -> Sequence[Probe]:
    from distdiag.probes.groups import ProcessGroups

    return [ProcessGroups(recorder)]


def _sharding(recorder: Recorder, _: Config) -> Sequence[Probe]:
    from distdiag.probes.sharding_context import ShardingContext

    return [ShardingContext(recorder)]


def _sharding_moments(recorder: Recorder, _: Config) -> Sequence[Probe]:
    from distdiag.probes.sharding_moments import ShardingMoments

    return [ShardingMoments(recorder)]


def _parallel_moments(recorder: Recorder, _: Config) -> Sequence[Probe]:
    from distdiag.probes.parallel_moments import ParallelMoments

    return [ParallelMoments(recorder)]


def _parallelize_plans(recorder: Recorder, _: Config) -> Sequence[Probe]:
    from distdiag.probes.parallelize_plans import ParallelizePlans

    return [ParallelizePlans(recorder)]


def _veomni_plans(recorder: Recorder, _: Config) -> Sequence[Probe]:
    from distdiag.probes.veomni_plans import VeOmniPlans

    return [VeOmniPlans(recorder)]


def _transformers_plans(recorder: Recorder, _: Config) -> Sequence[Probe]:
    from distdiag.probes.transformers_plans import TransformersPlans

    return [TransformersPlans(recorder)]


def _partial_reads(recorder: Recorder, _: Config) -> Sequence[Probe]:
    from distdiag.probes.partial_reads import PartialReads

    return [PartialReads(recorder)]


def _steps(recorder: Recorder, config: Config) -> Sequence[Probe]:
    from distdiag.probes.loss_watch import LossWatch
    from distdiag.probes.steps import BackwardWatch, StepClock
    from distdiag.probes.survey import Survey

    survey = Survey(recorder, only_start=config.profile == "light")
    if config.profile == "light":
        return [survey, BackwardWatch(recorder, survey), StepClock(recorder, survey)]
    losses = LossWatch(recorder, survey.own_steps)
    followers = [BackwardWatch(recorder, survey, losses), StepClock(recorder, survey, losses)]
    return [survey, losses, *followers]


def _random_states(recorder: Recorder, config: Config) -> Sequence[Probe]:
    from distdiag.probes.random_states import RandomStates

    return [RandomStates(recorder, only_start=config.profile == "light")]


def _random_draws(recorder: Recorder, _: Config) -> Sequence[Probe]:
    from distdiag.probes.random_draws import RandomDraws

    return [RandomDraws(recorder)]


def _poison(recorder: Recorder, config: Config) -> Sequence[Probe]:
    if not config.poison_empty:
        return []
    from distdiag.probes.poison import PoisonedMemory

    return [PoisonedMemory(recorder)]


def _verify_sequence(recorder: Recorder, config: Config) -> Sequence[Probe]:
    if not config.verify_sequence:
        return []
    from distdiag.probes.verify_sequence import VerifySequence

    return [VerifySequence(recorder, config.sequence)]


def _parity(recorder: Recorder, config: Config) -> Sequence[Probe]:
    if not config.parity_task:
        return []
    from distdiag.parity_task import ParityTask
    from distdiag.probes.parity_recorder import ParityRecorder

    return [ParityRecorder(recorder, ParityTask.read(config.parity_task))]


def _routing_recorder(recorder: Recorder, config: Config) -> Sequence[Probe]:
    if not config.routing_task:
        return []
    from distdiag.probes.routing_recorder import RoutingRecorder
    from distdiag.routing_task import RoutingTask

    return [RoutingRecorder(recorder, RoutingTask.read(config.routing_task))]


def _dataloader(recorder: Recorder, _: Config) -> Sequence[Probe]:
    from distdiag.probes.phases import DataLoaderWatch

    return [DataLoaderWatch(recorder)]


def _data(recorder: Recorder, _: Config) -> Sequence[Probe]:
    from distdiag.probes.samplers import SamplerWatch
    from distdiag.probes.schedules import Schedules
    from distdiag.probes.step_draws import StepDraws
    from distdiag.probes.step_feeds import StepFeeds

    feeds = StepFeeds(recorder)
    samplers = SamplerWatch(recorder, feeds)
    return [feeds, samplers, StepDraws(recorder, feeds), Schedules(recorder)]


def _routing(recorder: Recorder, config: Config) -> Sequence[Probe]:
    if config.profile == "light":
        return []
    from distdiag.probes.routing import RoutingWatch

    return [RoutingWatch(recorder)]


def _sharded_forwards(recorder: Recorder, _: Config) -> Sequence[Probe]:
    from distdiag.probes.sharded_forwards import ShardedForwards

    return [ShardedForwards(recorder)]


def _save(recorder: Recorder, _: Config) -> Sequence[Probe]:
    from distdiag.probes.phases import SaveWatch

    return [SaveWatch(recorder)]


def _checkpoint(recorder: Recorder, _: Config) -> Sequence[Probe]:
    from distdiag.probes.phases import CheckpointWatch

    return [CheckpointWatch(recorder)]


def _compile(recorder: Recorder, _: Config) -> Sequence[Probe]:
    from distdiag.probes.phases import CompileWatch

    return [CompileWatch(recorder)]


def _loads(recorder: Recorder, _: Config) -> Sequence[Probe]:
    from distdiag.probes.loads import LoadWatch

    return [LoadWatch(recorder)]


def _rank_states(recorder: Recorder, _: Config) -> Sequence[Probe]:
    from distdiag.probes.rank_states import RankStates

    return [RankStates(recorder)]


def _evaluation_gathers(recorder: Recorder, _: Config) -> Sequence[Probe]:
    from distdiag.probes.evaluation_gathers import EvaluationGathers

    return [EvaluationGathers(recorder)]


_C10D: Final = "torch.distributed.distributed_c10d"
_DCP: Final = "torch.distributed.checkpoint"

PLANS: Final = (
    Plan("files", (), _files),
    Plan("store-calls", ("torch", _C10D), _store_calls),
    Plan("process-groups", ("torch", _C10D), _groups),
    Plan("collectives", ("torch", _C10D), _collectives),
    Plan("steps", ("torch",), _steps),
    Plan("random-states", ("torch",), _random_states),
    Plan("random-draws", ("torch", "torch.distributed.tensor._random"), _random_draws),
    Plan("poison-empty", ("torch", "torch.utils.deterministic"), _poison),
    Plan("verify-sequence", ("torch", _C10D), _verify_sequence),
    Plan("parity", ("torch",), _parity),
    Plan("routing-recorder", ("torch",), _routing_recorder),
    Plan("save", ("torch",), _save),
    Plan("dataloader", ("torch", "torch.utils.data.dataloader"), _dataloader),
    Plan("routing", ("torch",), _routing),
    Plan("data", ("torch", "torch.utils.data.dataloader"), _data),
    Plan(
        "sharded-forwards",
        (
            "torch",
            "torch.distributed.fsdp",
            "torch.distributed.fsdp._fully_shard._fsdp_state",
        ),
        _sharded_forwards,
    ),
    Plan(
        "sharding-context",
        ("torch", "torch.distributed.fsdp._fully_shard._fsdp_param_group"),
        _sharding,
    ),
    Plan(
        "parallel-moments",
        ("torch", "torch.distributed.tensor.parallel"),
        _parallel_moments,
    ),
    Plan(
        "parallelize-plans",
        ("torch", "torch.distributed.tensor.parallel"),
        _parallelize_plans,
    ),
    Plan("veomni-plans", ("torch", "veomni.distributed.parallel_plan"), _veomni_plans),
    Plan("transformers-plans", ("torch", "transformers.modeling_utils"), _transformers_plans),
    Plan("partial-reads", ("torch", "torch.distributed.tensor"), _partial_reads),
    Plan(
        "sharding-moments",
        ("torch", "torch.distributed.fsdp._fully_shard._fsdp_state"),
        _sharding_moments,
    ),
    Plan(
        "checkpoint",
        ("torch", f"{_DCP}.state_dict_saver", f"{_DCP}.state_dict_loader"),
        _checkpoint,
    ),
    Plan("compile", ("torch", "torch._dynamo.callback"), _compile),
    Plan("loads", ("torch",), _loads),
    Plan(
        "rank-states",
        ("torch", f"{_DCP}.state_dict_saver", f"{_DCP}.state_dict_loader"),
        _rank_states,
    ),
    Plan(
        "evaluation-gathers",
        ("torch", "accelerate.accelerator", "accelerate.data_loader"),
        _evaluation_gathers,
    ),
)
