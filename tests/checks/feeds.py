"""Builds what the engine would show of the data that ranks are fed."""

from distdiag.engine.relations import RelationAligner
from distdiag.events.collectives import GroupCreated
from distdiag.events.data import Draw, EpochFed, ModelFed, SamplerState, ScheduleState
from distdiag.events.ranks import RankSet
from distdiag.views.relations import NormalisedFeeds
from tests.checks.streams import event_of, plain_site
from tests.engine.aligned import aligned


def bitmap(indices):
    return sum(1 << index for index in indices).to_bytes(max(indices) // 8 + 1, "little")


def epoch_fed(rank, order, *, num_ranks=2, **values):
    """A rank has trained on these samples of 32, as its part of them; other values may be given."""
    sampler = {"epoch": 0, "seed": 0, "shuffle": True, "num_replicas": num_ranks, "replica": rank}
    for name in list(values):
        if name in (*sampler, "num_skipped", "chain", "uses_epoch", "dividers"):
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
        "is_trained": True,
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


def mask(state, activation, *, module="drop Dropout"):
    """Dropout draws for an activation."""
    return Draw("dropout", (4, 8), state, True, False, plain_site(31), module, activation)


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


def normalised_feeds(*passes, is_shared_work=False):
    """What the ranks were given for several passes: for each the events of all ranks."""
    by_rank = tuple({event.rank: event for event in events} for events in passes)
    return NormalisedFeeds("DDP Net", RankSet(by_rank[0]), by_rank, is_shared_work)


def related(check, *passes, is_shared_work=False, before=(), world=(0, 1)):
    """What a check finds in these passes, for each the events of all ranks."""
    group = {"api": "new_group", "ordinal": 1, "desc": "tp", "generation": 0, "scope": (0, 1)}
    group |= {"ranks": (0, 1), "site": plain_site(3)}
    shared = [event_of(GroupCreated, 0, **group)] if is_shared_work else []
    events = [*shared, *before, *(event for events in passes for event in events)]
    return aligned(RelationAligner, *events, checks=[check()], world=world).findings
