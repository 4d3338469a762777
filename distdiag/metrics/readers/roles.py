"""Which series of a run is its loss, its learning rate, ...: by the names that trainers give."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from distdiag.metrics.series import Series

# For each role patterns of names, the surest first. Names are compared in lower case, with an
# underscore for every space, dash and dot, and without a unit in brackets at the end.
_PATTERNS: Final[Mapping[str, tuple[str, ...]]] = {
    "loss": (
        # what is optimised, as Megatron, torchtitan, NeMo, composer, OLMo, fairseq call it
        r"lm_loss|reduced_train_loss|loss_metrics/global_avg_loss|loss/global_avg_loss",
        r"train/loss|loss/train/total|train_loss|training_loss|loss/train|train/total_loss",
        r"train/(?:cross_?entropy_?loss|ce_loss)|loss|total_loss|(?:train/)?(?:step|batch)_loss",
        r"train_loss_step|train_loss_epoch|train/loss_(?:step|epoch)|loss_train",
        # of reinforcement learning the policy's
        r"actor/pg_loss|(?:train/)?policy_loss|(?:train/)?actor_loss|loss/policy(?:_avg)?",
        r"(?:train/)?box_loss",  # ultralytics has no sum of its losses
        r"(?:train[/_])?[a-z]{1,20}_loss",  # mse loss, mlm loss, nll_loss of one's own
        r"loss_\(avg\)",
    ),
    "val_loss": (
        r"(?:val|valid|validate|validation|eval|evaluation|dev)[/_]{1,2}loss|loss/(?:val|eval)|loss_val",
        r"(?:val|valid|validation|eval|test)[/_](?:lm_loss(?:_value)?|reduced_val_loss)",
        r"reduced_val_loss|validation_metrics/loss/global_avg_loss|validation_loss/\w{1,40}",
        r"(?:validation|test)_(?:lm_loss|loss)(?:_value)?|lm_loss_value|val_total_loss",
        r"(?:val|eval|valid|test)[/_](?:[\w/]{1,60}[/_])?"
        r"(?:cross_?entropy_?loss|ce_loss|cross_?entropy|loss|nll_loss|box_loss)",
        r"test_loss|metrics/(?!train)[\w/]{1,60}/language_?cross_?entropy",
    ),
    "grad_norm": (
        r"grad_norm|gradient_norm|gnorm|total_grad_norm|global_grad_norm",
        r"(?:train|optim|optimizer|actor|training|l2_norm/grad)/(?:total_)?(?:grad_norm|global)",
        r"(?:\w{1,30}/){0,2}(?:total_|global_)?(?:grad|gradient)_?norm(?:_total)?",
        r"grad_2_0_norm_total|grad_2_norm_total|norm",
    ),
    "lr": (
        r"lr|learning_rate|train/(?:lr|learning_rate)|base_lr|actor/lr|optim/lr",
        r"lr_\w{1,40}(?:/\w{1,40})?|lr/\w{1,40}|\w{1,40}[/_](?:lr|learning_rate)(?:_?group_?\d)?",
        r"optim/learning_rate_group0|learning_rate/\w{1,40}",
    ),
    "step_time_s": (
        r"step_time_s",
        r"elapsed_time_per_iteration|train_step_timing(?:_in_s)?|iter_time",
        r"time_metrics/end_to_end|step_time|time_per_step|timing_s/step|dt|time|batch_time",
        r"(?:\w{1,30}/){0,2}(?:step|iteration|iter|batch)_?(?:time|duration)(?:_ms|_s|_seconds)?",
    ),
    "throughput": (
        r"throughput(?:_per_gpu)?|tps|throughput_tps|samples/sec|tokens_per_second_per_gpu|tok/sec",
        r"currsamplespersec|perf/throughput|throughput/(?:device/)?(?:tokens|batches|samples)_per_sec",
        r"(?:\w{1,30}/){0,2}(?:tokens?|samples?|steps?|iters?)(?:/|_per_)(?:sec|second|s)(?:ond)?"
        r"(?:/gpu|_per_(?:gpu|device))?|wps|tflops|runningavgsamplespersec",
    ),
    "loss_scale": (r"loss_scale|grad_scale|(?:\w{1,20}/)?(?:loss|grad)_scale|scale",),
    "kl": (
        r"kl|actor/ppo_kl|actor/kl|objective/kl|train/kl|approx_kl|ppo_kl|actor/kl_loss",
        r"(?:\w{1,30}/){0,2}(?:\w{1,20}_)?kl(?:_loss|_div|_mean)?",
    ),
    "reward": (
        r"reward|rewards?/mean|critic/rewards/mean|critic/score/mean|train/reward|objective/scores",
        r"mean_reward|rollout/ep_rew_mean|episode_reward|return|rewards/accuracies",
        r"(?:\w{1,30}/){0,2}rewards?(?:_mean|/mean)?",
    ),
    "entropy": (r"entropy|(?:\w{1,30}/){0,2}(?:policy_)?entropy(?:_loss|_mean|/mean)?",),
    "memory": (
        r"memory|memory/max_reserved|max_memory|max_mem|mem|gpu_mem",
        r"peak_memory_\w{1,20}|memory/\w{1,40}|(?:\w{1,30}/){0,3}(?:max_|peak_)?(?:gpu_)?mem"
        r"(?:ory)?(?:_?(?:alloc|reserv)\w{0,20}|_gb|_gib)?",
    ),
}
_COMPILED: Final = {
    role: tuple(re.compile(pattern) for pattern in patterns) for role, patterns in _PATTERNS.items()
}
_NOT_LOSS: Final = re.compile(r"val|eval|test|dev|aux|balanc|scale|max|min|time|num|std")
_UNIT: Final = re.compile(r" ?[(\[]([\w/%]{1,16})[)\]]$")
_IN_MS: Final = re.compile(r"\(ms\)$|_ms$|[ _]in[ _]ms$")
_JOINING: Final = str.maketrans(" -.", "___")


def plain_name(name: str) -> str:
    """Return a name of a series as the tables of roles spell it."""
    name = name.rpartition(" - ")[2] or name  # tables of W&B put the run before it
    name = _UNIT.sub("", name.strip().lower()[:200])
    return name.translate(_JOINING).replace("__", "_").replace("_/", "/").strip("_")


def roles_of(series: Mapping[str, Series]) -> dict[str, str]:
    """Return by role the name of the series that plays it; roles without one are left out.

    The surest name counts, unless its series is a summary: it has one value, or less
    than a tenth of those of another one (transformers print `loss` at each step, and one
    `train_loss` at the end). Of names that are as sure, the series with the most values is taken.
    """
    names = {name: plain_name(name) for name in series}
    found = {}
    for role, patterns in _COMPILED.items():
        fitting: list[str] = []
        for pattern in patterns:
            of_pattern = [
                name
                for name, plain in names.items()
                if pattern.fullmatch(plain) and not (role == "loss" and _NOT_LOSS.search(plain))
            ]
            if of_pattern:
                fitting.append(max(of_pattern, key=lambda name: len(series[name])))
        most = max((len(series[name]) for name in fitting), default=0)
        for name in fitting:
            if 10 * len(series[name]) >= most and (len(series[name]) > 1 or most == 1):
                found[role] = name
                break
    return found


def with_step_time(series: Mapping[str, Series]) -> Mapping[str, Series]:
    """Return the series, with ``step_time_s`` added where a log tells it in milliseconds only."""
    name = roles_of(series).get("step_time_s")
    if name is None or not _IN_MS.search(name.strip().lower()):
        return series
    told = series[name]
    seconds = Series("step_time_s", told.steps, told.values / 1e3, told.lines, told.times)
    return {**series, "step_time_s": seconds}
