"""What functional collectives are recorded as, by their arguments."""

import pytest
import torch

from distdiag.probes.collectives.functional_exchanges import ExchangeLayout

ROWS = torch.ones(4, 3)


class Group:
    """Has a name, as process groups have."""

    group_name = "0"


GROUP = Group()


def layout(name):
    return ExchangeLayout(name, getattr(torch.ops._c10d_functional, name).default._schema)


@pytest.mark.parametrize(
    ("received", "sent", "public", "peer"),
    [
        ([2, 2], [2, 2], "all_to_all_single", -1),
        ([0, 4], [4, 0], "permute", 0),
        ([4, 0], [0, 4], "permute", 1),
        ([3, 1], [2, 2], "uneven", -1),
        ([3, 1], [4, 0], "uneven", -1),
        ([0, 0], [4, 0], "uneven", -1),
    ],
)
def test_an_all_to_all_is_reported_by_its_splits(received, sent, public, peer):
    given = layout("all_to_all_single").read((ROWS, received, sent, GROUP), {})
    assert (given.public, given.peer) == (public, peer)
    assert given.tensors == (ROWS,)
    assert given.group is GROUP


@pytest.mark.parametrize(
    ("name", "args", "public"),
    [
        ("all_gather_into_tensor", (ROWS, 2, GROUP), "all_gather_into_tensor"),
        ("reduce_scatter_tensor", (ROWS, "sum", 2, GROUP), "reduce_scatter_tensor"),
        ("all_reduce_", (ROWS, "sum", GROUP), "all_reduce"),
    ],
)
def test_others_are_reported_as_those_of_process_groups(name, args, public):
    given = layout(name).read(args, {})
    assert (given.public, given.peer, given.tensors) == (public, -1, (ROWS,))


def test_arguments_are_known_by_their_names_too():
    given = layout("all_reduce_coalesced").read(
        ([ROWS, ROWS],), {"reduce_op": "sum", "group_name": GROUP}
    )
    assert len(given.tensors) == 2


def test_what_nobody_exchanges_is_left_out():
    assert layout("all_gather_into_tensor").may_exchange
    assert not layout("wait_tensor").may_exchange
    assert not layout("broadcast").may_exchange
