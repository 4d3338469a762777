"""Builds what the engine would show of the data that ranks are fed."""

from distdiag.events.data import Draw, EpochFed, ModelFed, SamplerState, ScheduleState
from distdiag.events.ranks import RankSet
from distdiag.views.data import FeedView
from tests.checks.streams import event_of, plain_site


def bitmap(indices):
    return sum(1 << index for index in indices).to_bytes(max(indices) // 8 + 1, "little")


def epoch_fed(rank, order, *, num_ranks=2, **values):
    """A rank has trained on these samples of 32, as its part of them; other values may be given."""
    sampler = {"epoch": 0, "seed": 0, "shuffle": True, "num_replicas": num_ranks, "replica": rank}
    for name in list(values):
        if name in (*sampler, "num_skipped", "chain", "uses_epoch"):
            sampler[name] = values.pop(name)
    chain = sampler.pop("chain", ("BatchSampler", "DistributedSampler"))
    fields = {
        "stream": "Data 0 by DistributedSampler",
        "number": 1,
        "dataset": "Data",
        "num_samples": 32,
        "sampler": SamplerState(chain, **sampler),
        "num_indices": len(order),
        "num_batches": len(order) // 4,
        "digest": str(hash(tuple(order))),
        "first": tuple(order[:8]),
        "indices": bitmap(order),
        "contents": (),
        "is_complete": True,
        "is_ascending": list(order) == sorted(order),
        "last_digest": "",
        "last_epoch": None,
        "epoch_before": None,
        "num_before_training": 1,
        "num_backwards": 4,
        "members": tuple(range(num_ranks)),
        "site": plain_site(10 + rank),
    }
    return event_of(EpochFed, rank, step=8, **{**fields, **values})


def schedule(rank, **values):
    """A scheduler that is advanced once for each step, and has come to its end with them."""
    fields = {
        "name": "LambdaLR",
        "num_advances": 40,
        "num_steps": 40,
        "least_pace": 1,
        "greatest_pace": 1,
        "peak_rate": 0.1,
        "last_rate": 0.0,
        "settled_at": 40,
        "site": plain_site(10 + rank),
    }
    return event_of(ScheduleState, rank, **{**fields, **values})


def draw(state="s0", *, api="randn_like", sizes=(4, 8), inside=True, given=False, line=30):
    return Draw(api, sizes, state, inside, given, plain_site(line))


def model_fed(rank, number, **values):
    """A rank is given four samples of its own of 32."""
    fields = {
        "model": "DDP Net",
        "number": number,
        "members": (0, 1),
        "inputs": (f"input {rank} {number}",),
        "batch_sizes": (4,),
        "stream": "Data 0 by RandomSampler",
        "batch": f"indices {rank} {number}",
        "num_batch": 4,
        "num_samples": 32,
        "samples": (f"samples {rank} {number}",),
        "num_local_norms": 0,
        "draws": (),
        "begin": 0,
        "end": 0,
        "site": plain_site(20 + rank),
    }
    return event_of(ModelFed, rank, step=number, **{**fields, **values})


def feeds(*passes, is_shared_work=False, kind=FeedView):
    """What the ranks were given for several passes: for each the events of all ranks."""
    by_rank = tuple({event.rank: event for event in events} for events in passes)
    return kind("DDP Net", RankSet(by_rank[0]), by_rank, is_shared_work)
