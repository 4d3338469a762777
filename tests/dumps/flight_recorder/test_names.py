"""The names of the recorder, and what they are called here."""

import pytest

from distdiag.dumps.flight_recorder.names import (
    backend_and_op,
    batch_op,
    comparable,
    is_symmetric,
    peers_of,
    refined_op,
    signature_of,
)


@pytest.mark.parametrize(
    ("name", "backend", "op"),
    [
        ("nccl:all_reduce", "nccl", "all_reduce"),
        ("nccl:_all_gather_base", "nccl", "all_gather_into_tensor"),
        ("nccl:_reduce_scatter_base", "nccl", "reduce_scatter_tensor"),
        ("nccl:all_reduce_barrier", "nccl", "barrier"),
        ("xccl:allreduce_coalesced", "xccl", "all_reduce_coalesced"),
        ("gloo:send 0->1", "gloo", "send 0->1"),
        ("strange", "", "strange"),
    ],
)
def test_a_profiling_name_is_a_backend_and_an_operation(name, backend, op):
    assert backend_and_op(name) == (backend, op)


@pytest.mark.parametrize(
    ("op", "places"),
    [
        ("send 3->12", (3, 12)),
        ("recv 1<-0", (1, 0)),
        ("send 1<-0", None),
        ("all_reduce", None),
        ("send 9999999999->0", None),
    ],
)
def test_messages_name_their_peers(op, places):
    assert peers_of(op) == places


@pytest.mark.parametrize(
    ("op", "inputs", "outputs", "called"),
    [
        ("all_gather", ((4,),), ((2, 4),), "all_gather_into_tensor"),
        ("all_gather", ((4,),), ((4,), (4,)), "all_gather"),
        ("reduce_scatter", ((2, 4),), ((4,),), "reduce_scatter_tensor"),
        ("reduce_scatter", ((4,), (4,)), ((4,),), "reduce_scatter"),
    ],
)
def test_a_list_that_the_backend_stacked_is_one_tensor(op, inputs, outputs, called):
    signature = signature_of(op, inputs, outputs, ("Float", "Float", "BFloat16"))
    assert (signature.op, signature.dtypes) == (called, ("float32", "bfloat16"))


@pytest.mark.parametrize(
    ("op", "api", "refined"),
    [
        ("all_reduce", "reduce_scatter_single", "reduce_scatter_tensor"),
        ("all_reduce", "barrier", "barrier"),
        ("all_reduce", "all_reduce", "all_reduce"),
        ("all_reduce", None, "all_reduce"),
        ("broadcast", "barrier", "broadcast"),
    ],
)
def test_the_function_tells_what_the_backend_did_another_way(op, api, refined):
    assert refined_op(op, api) == refined


@pytest.mark.parametrize(
    ("ops", "name"),
    [
        ({"all_reduce"}, "all_reduce_coalesced"),
        ({"all_reduce_coalesced"}, "all_reduce_coalesced"),
        ({"broadcast"}, "coalesced"),
        ({"all_reduce", "broadcast"}, "coalesced"),
    ],
)
def test_a_batch_is_named_after_its_calls(ops, name):
    assert batch_op(ops) == name


def test_uneven_sizes_that_are_legal_are_not_compared():
    uneven = signature_of("all_to_all", ((3,),), ((5,),), ("Float",))
    assert comparable(uneven) == comparable(signature_of("all_to_all", ((4,),), ((4,),), ()))
    reduced = signature_of("all_reduce", ((3,),), ((3,),), ("Float",))
    assert comparable(reduced) == reduced


@pytest.mark.parametrize(
    ("op", "answer"), [("all_reduce", True), ("barrier", True), ("broadcast", False)]
)
def test_some_operations_end_only_when_all_have_come(op, answer):
    assert is_symmetric(op) is answer
