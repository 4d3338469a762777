"""Who has one task and who works alike is known by what ranks are given, and what they send."""

import pytest

from distdiag.engine.losses.feeds import Feeds
from tests.checks.feeds import epoch_fed, model_fed
from tests.checks.streams import Job, plain_site, signature

PAIR = (0, 1)


def known(*events):
    feeds = Feeds()
    for event in events:
        feeds.feed(event)
    return feeds


def parts(**values):
    return [epoch_fed(rank, range(rank, 32, 2), **values) for rank in PAIR]


def sent(job, op="all_to_all_single", step=0):
    return [job.call(rank, plain_site(9), sign=signature(op), step=step) for rank in PAIR]


def message(job, rank, peer, numel, op="send", step=0):
    return job.call(rank, plain_site(9), sign=signature(op, numel, peer=peer), step=step)


def test_parts_of_one_data_set_are_one_task():
    assert known(*parts()).are_parts_of_one(PAIR)
    assert known(*sent(Job(2), step=5), *parts()).are_parts_of_one(PAIR)


@pytest.mark.parametrize(
    "events",
    [
        [],
        parts()[:1],
        parts(replica=0),
        parts(num_replicas=None),
        parts(num_backwards=0),
        [*sent(Job(2)), *parts()],
    ],
    ids=["nothing", "one rank", "the same part", "no parts", "an evaluation", "rows are sent"],
)
def test_it_is_not_known_of(events):
    assert not known(*events).are_parts_of_one(PAIR)


def passes(inputs):
    """Two passes in which the ranks sum up activations."""
    job, events = Job(2), []
    for number in range(2):
        for rank in PAIR:
            call = job.call(rank, plain_site(9), sign=signature(input_sizes=((4, 8),)))
            fed = {"inputs": (inputs(rank, number),), "begin": call.seq, "end": call.seq + 1}
            events += [call, model_fed(rank, number, **fed)]
    return events


def test_ranks_that_are_given_the_same_and_sum_activations_work_alike():
    assert known(*passes(lambda _, number: f"batch {number}")).working_alike() == [PAIR]
    assert not known(*passes(lambda rank, number: f"{rank} {number}")).working_alike()
    alone = [model_fed(rank, n, inputs=(f"batch {n}",)) for n in range(2) for rank in PAIR]
    assert not known(*alone).working_alike()


def test_stages_send_the_same_sizes_to_and_fro():
    job = Job(3)
    calls = [message(job, *each) for each in ((0, 1, 8), (1, 0, 8), (1, 2, 4), (2, 1, 4))]
    feeds = known(*calls)
    assert feeds.stages(0) == [(0, 1, 2)]
    assert not feeds.stages(1)


def test_messages_of_one_way_or_other_sizes_make_no_stages():
    job = Job(2)
    assert not known(message(job, 0, 1, 8)).stages(0)
    assert not known(message(job, 0, 1, 8), message(job, 1, 0, 4)).stages(0)
