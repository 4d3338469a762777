from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from distdiag.events.models import ReplicaEvidence, TensorPlan
from tests.probes.sample_models import FOUR, PAIR, network, plans


@pytest.fixture
def four_ranks() -> Iterator[DeviceMesh]:
    """A mesh of two by two ranks, of which only rank 0 exists."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dist.destroy_process_group()


# Without a wrapper


def test_parameters_and_buffers_come_in_the_order_of_the_modules() -> None:
    found = plans(network())

    assert list(found) == [
        "0.weight",
        "0.bias",
        "1.weight",
        "1.bias",
        "1.running_mean",
        "1.running_var",
        "1.num_batches_tracked",
    ]
    assert found["0.weight"] == TensorPlan(
        "0.weight",
        (3, 2),
        "float32",
        requires_grad=True,
        replicas=PAIR,
        evidence=ReplicaEvidence.WORLD,
    )
    assert (found["1.num_batches_tracked"].dtype, found["1.num_batches_tracked"].shape) == (
        "int64",
        (),
    )
    assert not found["1.running_mean"].is_parameter


def test_a_buffer_that_is_cut_along_a_sequence_is_one_ranks_own() -> None:
    model = nn.Linear(4, 4)
    model.register_buffer("positions", torch.arange(8))
    model.register_buffer("scale", torch.ones(()))

    found = plans(model, is_cut=lambda tensor: tensor is model.positions)

    assert (found["positions"].replicas, found["positions"].evidence) == (
        (),
        ReplicaEvidence.WRAPPER,
    )
    assert found["scale"].replicas == PAIR


def test_buffers_that_are_not_saved_and_parameters_that_are_frozen_count() -> None:
    model = nn.Linear(4, 4, bias=False).requires_grad_(False)
    model.register_buffer("inv_freq", torch.ones(2), persistent=False)
    model.register_buffer("later", None)

    found = plans(model)

    assert list(found) == ["weight", "inv_freq"]
    assert not found["weight"].requires_grad


def test_a_weight_that_is_tied_names_its_first_place() -> None:
    model = nn.ModuleDict({"embedding": nn.Embedding(5, 4), "head": nn.Linear(4, 5, bias=False)})
    model["head"].weight = model["embedding"].weight

    found = plans(model)

    assert found["embedding.weight"].tied_to == ""
    assert found["head.weight"].tied_to == "embedding.weight"


def test_a_module_in_two_places_is_reported_once() -> None:
    layer = nn.Linear(4, 4)
    assert list(plans(nn.Sequential(layer, layer))) == ["0.weight", "0.bias"]


def test_the_optimizers_of_a_parameter_are_reported() -> None:
    model = nn.Linear(4, 4)
    owners = {id(model.weight): ("AdamW", "SGD")}

    found = plans(model, owners=owners)

    assert found["weight"].owners == ("AdamW", "SGD")
    assert found["bias"].owners == ()


def test_what_the_program_reduces_itself_is_held_by_those_ranks() -> None:
    model = nn.Linear(4, 4)

    found = plans(model, world=FOUR, reduced={id(model.weight): (0, 2)})

    assert (found["weight"].replicas, found["weight"].evidence) == ((0, 2), ReplicaEvidence.REDUCED)
    assert (found["bias"].replicas, found["bias"].evidence) == (FOUR, ReplicaEvidence.WORLD)


def test_a_bias_of_a_router_is_held_by_those_who_reduce_the_gradient_of_its_weight() -> None:
    model = nn.ModuleDict({"gate": nn.Linear(4, 6, bias=False), "expert": nn.Linear(4, 4)})
    model.register_buffer("expert_bias", torch.zeros(6))
    model.register_buffer("counts", torch.zeros(6))
    reduced = {id(model["gate"].weight): (0, 2), id(model["expert"].weight): (0, 1)}

    found = plans(
        model,
        world=FOUR,
        reduced=reduced,
        is_routing_bias=lambda module, name: (module, name) == (model, "expert_bias"),
    )

    bias = found["expert_bias"]
    assert (bias.replicas, bias.evidence, bias.is_routing_bias) == (
        (0, 2),
        ReplicaEvidence.REDUCED,
        True,
    )
    assert (found["counts"].evidence, found["counts"].is_routing_bias) == (
        ReplicaEvidence.WORLD,
        False,
    )


def test_a_buffer_that_ddp_sends_round_may_differ_between_passes() -> None:
    model = nn.Linear(4, 4)
    model.register_buffer("bias_of_experts", torch.zeros(4))
    model.broadcast_buffers = True  # type: ignore[assignment]

    found = plans(model, is_routing_bias=lambda _, name: name == "bias_of_experts")

    assert not found["bias_of_experts"].is_routing_bias


def test_what_was_only_sent_round_says_less_than_a_reduction() -> None:
    model = nn.Linear(4, 4)
    sent = {id(model.weight): (0, 2), id(model.bias): (0, 2)}

    found = plans(model, world=FOUR, sent=sent, reduced={id(model.weight): FOUR})

    assert (found["weight"].replicas, found["weight"].evidence) == (FOUR, ReplicaEvidence.REDUCED)
    assert (found["bias"].replicas, found["bias"].evidence) == ((0, 2), ReplicaEvidence.SENT)


@pytest.mark.parametrize(
    ("trains", "training_ranks", "evidence"),
    [
        (False, PAIR, ReplicaEvidence.FROZEN),
        (False, (), ReplicaEvidence.WORLD),
        (True, PAIR, ReplicaEvidence.WORLD),
    ],
    ids=["frozen-with-another", "frozen-alone", "trained-with-another"],
)
def test_only_a_frozen_model_is_a_replica_by_another_model(
    trains: bool, training_ranks: tuple[int, ...], evidence: ReplicaEvidence
) -> None:
    found = plans(network().requires_grad_(trains), training_ranks=training_ranks)

    assert {plan.evidence for plan in found.values() if plan.is_parameter} == {evidence}
    assert {plan.evidence for plan in found.values() if not plan.is_parameter} == {
        ReplicaEvidence.WORLD
    }


@pytest.mark.parametrize(
    ("mark", "evidence"),
    [
        (("allreduce", False), ReplicaEvidence.OWN),
        (("tensor_model_parallel", True), ReplicaEvidence.WRAPPER),
    ],
)
def test_a_part_of_one_rank_is_compared_with_nobody(
    mark: tuple[str, bool], evidence: ReplicaEvidence
) -> None:
    model = nn.Linear(4, 4)
    setattr(model.weight, *mark)

    found = plans(model)

    assert (found["weight"].replicas, found["weight"].evidence) == ((), evidence)
    assert found["bias"].replicas == PAIR


def test_what_is_not_marked_as_a_part_while_others_are_should_be_the_same() -> None:
    model = network()
    model[0].weight.tensor_model_parallel = True

    found = plans(model)

    assert found["0.weight"].replicas == ()
    assert (found["0.bias"].evidence, found["0.bias"].replicas) == (ReplicaEvidence.MARKED, PAIR)
    assert found["1.running_mean"].evidence is ReplicaEvidence.WORLD


# DDP


def test_ddp_keeps_parameters_and_buffers_alike(fake_group: None) -> None:
    found = plans(DistributedDataParallel(network()))

    assert next(iter(found)) == "0.weight"
    assert {plan.wrapper for plan in found.values()} == {"DDP"}
    assert {plan.evidence for plan in found.values()} == {ReplicaEvidence.WRAPPER}
    assert {plan.replicas for plan in found.values()} == {PAIR}
    assert {plan.placements for plan in found.values()} == {()}


def test_a_model_that_ddp_did_not_reduce_is_reported_as_such(fake_group: None) -> None:
    found = plans(DistributedDataParallel(network()), is_local=True)

    assert {plan.evidence for plan in found.values()} == {ReplicaEvidence.UNSYNCED}
    assert {plan.replicas for plan in found.values()} == {PAIR}


def test_who_kept_a_model_is_known_when_the_group_is_gone() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    model = DistributedDataParallel(network())
    before = plans(model)
    dist.destroy_process_group()

    assert plans(model) == before
    assert {plan.replicas for plan in before.values()} == {PAIR}


def test_the_group_of_ddp_counts_and_not_the_world(four_ranks: DeviceMesh) -> None:
    model = DistributedDataParallel(network(), process_group=four_ranks["dp"].get_group())
    assert {plan.replicas for plan in plans(model, world=FOUR).values()} == {(0, 2)}


def test_a_part_that_ddp_wraps_is_a_unit(fake_group: None) -> None:
    model = nn.Sequential(nn.Linear(4, 4), DistributedDataParallel(nn.Linear(4, 4)))

    found = plans(model)

    assert (found["1.weight"].wrapper, found["1.weight"].unit) == ("DDP", "1")
    assert (found["0.weight"].wrapper, found["0.weight"].evidence) == ("", ReplicaEvidence.WORLD)


def ignoring(model: nn.Module, *names: str) -> nn.Module:
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    return DistributedDataParallel(model)


def test_what_ddp_ignores_is_compared_with_nobody(fake_group: None) -> None:
    found = plans(ignoring(nn.Linear(4, 4), "bias"))

    assert (found["bias"].wrapper, found["bias"].replicas) == ("", ())
    assert (found["weight"].wrapper, found["weight"].replicas) == ("DDP", PAIR)


def test_what_ddp_ignores_in_a_part_is_compared_with_nobody(fake_group: None) -> None:
    found = plans(ignoring(network(), "0.bias"))

    assert (found["0.bias"].wrapper, found["0.bias"].replicas) == ("", ())
    assert (found["1.bias"].wrapper, found["1.bias"].replicas) == ("DDP", PAIR)


def test_what_the_program_sent_round_is_still_each_ranks_own_once_ddp_ignores_it(
    fake_group: None,
) -> None:
    model = nn.Linear(4, 4)
    sent = {id(model.bias): PAIR, id(model.weight): PAIR}

    found = plans(ignoring(model, "bias"), sent=sent)

    assert (found["bias"].replicas, found["bias"].is_ignored) == ((), True)
    assert (found["weight"].replicas, found["weight"].is_ignored) == (PAIR, False)
    reduced = plans(ignoring(model, "bias"), reduced=sent)
    assert (reduced["bias"].replicas, reduced["bias"].evidence) == (PAIR, ReplicaEvidence.REDUCED)


# The first FSDP


def fsdp1(model: nn.Module, **options: object) -> nn.Module:
    return FullyShardedDataParallel(
        model,
        device_id=torch.device("cpu"),
        **{"use_orig_params": True, **options},  # type: ignore[arg-type]
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("known", ["sent", "reduced"])
def test_pieces_of_a_flat_parameter_are_no_copies_of_what_was_sent_before(
    fake_group: None, known: str
) -> None:
    model = network()
    whole = {id(parameter): PAIR for parameter in model.parameters()}

    found = plans(fsdp1(model), **{known: whole})

    assert {plan.replicas for plan in found.values() if plan.is_parameter} == {()}
    assert {plan.replicas for plan in found.values() if not plan.is_parameter} == {PAIR}
    assert all(plan.is_flat_part for plan in found.values() if plan.is_parameter)


@pytest.mark.filterwarnings("ignore")
def test_pieces_that_the_program_reduces_over_other_ranks_are_copies(
    four_ranks: DeviceMesh,
) -> None:
    model = nn.Linear(4, 4)
    wrapped = fsdp1(model, process_group=four_ranks["tp"].get_group())
    reduced = {id(parameter): (0, 2) for parameter in model.parameters()}

    found = plans(wrapped, world=FOUR, reduced=reduced)

    assert {plan.replicas for plan in found.values()} == {(0, 2)}
    assert not any(plan.is_flat_part for plan in found.values())


@pytest.mark.filterwarnings("ignore")
def test_fsdp1_without_sharding_keeps_whole_copies(fake_group: None) -> None:
    model = network()
    sent = {id(parameter): PAIR for parameter in model.parameters()}
    for known in ({}, sent):
        found = plans(fsdp1(model, sharding_strategy=ShardingStrategy.NO_SHARD), sent=known)
        assert {plan.replicas for plan in found.values()} == {PAIR}
        model = network()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", ["modules", "states"])
def test_what_fsdp1_ignores_is_compared_with_nobody(fake_group: None, way: str) -> None:
    model = nn.Sequential(nn.Linear(2, 3), network())
    left_out = [model[1]] if way == "modules" else list(model[1].parameters())

    found = plans(fsdp1(model, **{f"ignored_{way}": left_out}))

    ignored = {name for name, plan in found.items() if plan.is_ignored}
    assert ignored == {name for name in found if name.startswith("1.")}
    assert {found[name].replicas for name in ignored} == {()}
    assert {found[name].wrapper for name in found} == {"", "FSDP1"}
    assert found["1.0.weight"].shape == (3, 2)


def test_what_fsdp2_ignores_is_compared_with_nobody(fake_group: None) -> None:
    model = nn.Sequential(nn.Linear(2, 3), network())
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model, mesh=mesh, ignored_params=set(model[1].parameters()))

    found = plans(model)

    ignored = {name for name, plan in found.items() if plan.is_ignored}
    assert ignored == {name for name in found if name.startswith("1.")}
    assert {found[name].replicas for name in ignored} == {()}


# Ties that the configuration promises


class Config:
    def __init__(self, is_tied: bool) -> None:
        self.tie_word_embeddings = is_tied


def language_model(is_tied: bool) -> nn.Module:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5, bias=False))
    model.config = Config(is_tied)
    return model


def test_a_head_that_should_be_the_embedding_and_is_not_is_reported() -> None:
    model = language_model(is_tied=True)
    assert plans(model)["2.weight"].untied_from == "0.weight"

    model[2].weight = model[0].weight

    head = plans(model)["2.weight"]
    assert (head.untied_from, head.tied_to) == ("", "0.weight")


def test_without_that_promise_two_weights_may_be_two() -> None:
    for model in (language_model(is_tied=False), language_model(is_tied=True)[:]):
        assert not any(plan.untied_from for plan in plans(model).values())


def test_where_two_layers_may_be_the_head_neither_is_reported() -> None:
    model = language_model(is_tied=True)
    model.append(nn.Linear(4, 5, bias=False))
    assert not any(plan.untied_from for plan in plans(model).values())


class Declaring(nn.Module):
    """A model that says itself what its embedding and its head are."""

    def __init__(self, head: nn.Module | None) -> None:
        super().__init__()
        self.config = Config(is_tied=True)
        self.embedding = nn.Embedding(5, 4)
        self.other = nn.Linear(4, 5, bias=False)
        self.head = head

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def get_output_embeddings(self) -> nn.Module | None:
        return self.head


def test_a_model_that_declares_its_head_is_believed() -> None:
    found = plans(Declaring(nn.Linear(4, 5, bias=False)))
    untied = {name: plan.untied_from for name, plan in found.items() if plan.untied_from}
    assert untied == {"head.weight": "embedding.weight"}


def test_a_model_that_declares_no_head_has_none() -> None:
    assert not any(plan.untied_from for plan in plans(Declaring(None)).values())
