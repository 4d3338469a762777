"""Trainings in which what is written goes wrong, or seems to: ``write_faults.py FOLDER CASE…``."""

import copy
import gc
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

DIM = 8
STEPS = 4


def class_of(case: str, *bases: type) -> type:
    """Make a class by whose name findings are told apart."""
    return type(case.title().replace("_", ""), bases, {})


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(DIM, DIM)
        self.extra = nn.Linear(DIM, DIM)
        self.head = nn.Linear(DIM, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(torch.tanh(self.extra(self.body(inputs))))


class Counted(nn.Module):
    """Weighs channels by a buffer, and counts how often each was large."""

    def __init__(self, *, is_balanced: bool = False):
        super().__init__()
        self.layer = nn.Linear(DIM, DIM)
        self.is_balanced = is_balanced
        self.register_buffer("bias", torch.zeros(DIM))
        self.register_buffer("counts", torch.zeros(DIM))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.layer(inputs)
        with torch.no_grad():
            chosen = (hidden + self.bias).topk(DIM if self.is_balanced else 3).indices
            self.counts += torch.bincount(chosen.flatten(), minlength=DIM)
        return hidden + self.bias


class Tower(nn.Module):
    def __init__(self, *, last_is_balanced: bool = False):
        super().__init__()
        self.layers = nn.ModuleList(Counted() for _ in range(3))
        self.last = Counted(is_balanced=last_is_balanced)
        self.norms = nn.Sequential(nn.BatchNorm1d(DIM), nn.BatchNorm1d(DIM), nn.BatchNorm1d(DIM))
        self.head = nn.Linear(DIM, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.norms(inputs)
        for each in (*self.layers, self.last):
            hidden = torch.relu(each(hidden))
        return self.head(hidden)


def sgd(parameters, lr=0.1):
    return torch.optim.SGD(list(parameters), lr=lr)


def train(model, optimizer, after=lambda _: None, before=lambda _: None):
    for step in range(STEPS):
        model(torch.randn(16, DIM)).square().mean().backward()
        before(step)
        optimizer.step()
        after(step)
        model.zero_grad()


# Parameters without an optimizer


def switched(model):
    """An optimizer of one rank gets one parameter many times."""
    fully_shard(model)
    optimizer = sgd(model.parameters())
    if dist.get_rank() == 1:
        group = optimizer.param_groups[0]
        group["params"] = [group["params"][-1]] * len(group["params"])
    train(model, optimizer)


def chosen(model):
    """One rank leaves a layer out."""
    wrapped = DistributedDataParallel(model)
    is_first = dist.get_rank() == 0
    named = model.named_parameters()
    train(wrapped, sgd(p for name, p in named if is_first or not name.startswith("extra")))


def own_part(model):
    """Each rank steps some parameters and sends them round, at first with the rate zero."""
    wrapped = DistributedDataParallel(model)
    parameters = list(model.parameters())
    mine = [p for i, p in enumerate(parameters) if i % 2 == dist.get_rank()]
    optimizer = sgd(mine, lr=0.0)

    def send(_):
        optimizer.param_groups[0]["lr"] = 0.1
        for i, parameter in enumerate(parameters):
            dist.broadcast(parameter.data, i % 2)

    train(wrapped, optimizer, send)


def head_alone(model):
    """No rank trains the body, which is not frozen."""
    train(DistributedDataParallel(model), sgd(model.head.parameters()))


def by_hand(model):
    """One layer has no optimizer on any rank and is stepped by hand."""
    wrapped = DistributedDataParallel(model)

    def step(_):
        with torch.no_grad():
            for parameter in model.extra.parameters():
                parameter -= 0.1 * parameter.grad

    rest = [*model.body.parameters(), *model.head.parameters()]
    train(wrapped, sgd(rest), before=step)


def tasks(model):
    """Nothing connects the ranks, and each trains what it likes."""
    train(model, sgd((model.extra if dist.get_rank() else model.body).parameters()))


# Buffers of like modules


def balance(modules, *, resets=True, reduces=True):
    def update(_):
        for module in modules:
            counts = module.counts.clone()
            if reduces:
                dist.all_reduce(counts)
            module.bias += 0.001 * (counts.mean() - counts)
            if resets:
                module.counts.zero_()

    return update


def not_walked(model):
    train(DistributedDataParallel(model), sgd(model.parameters()), balance(model.layers))


def not_reset(model):
    """The last module is updated, and its counts stay; the hook runs before the step."""
    first, last = balance(model.layers), balance([model.last], resets=False)
    wrapped = DistributedDataParallel(model)
    train(wrapped, sgd(model.parameters()), before=lambda step: (first(step), last(step)))


def not_reduced(model):
    first, last = balance(model.layers), balance([model.last], reduces=False)
    wrapped = DistributedDataParallel(model, broadcast_buffers=False)
    train(wrapped, sgd(model.parameters()), lambda step: (first(step), last(step)))


def walked(model):
    modules = [*model.layers, model.last]
    train(DistributedDataParallel(model), sgd(model.parameters()), balance(modules))


def partly_frozen(model):
    """Two of three layers of batch normalisation use their old statistics."""
    model.norms[0].eval()
    model.norms[1].eval()
    walked(model)


def balanced(model):
    """One module has nothing to balance."""
    walked(model)


def teacher(model):
    """A frozen module goes along, with what is counted left as it is."""
    for parameter in model.last.parameters():
        parameter.requires_grad_(requires_grad=False)
    train(DistributedDataParallel(model), sgd(model.parameters()), balance(model.layers))


# Keys of checkpoints


def folder(model):
    return Path(sys.argv[1]) / type(model).__name__


def own_halves(model):
    """Each rank has half of the features, under the name of all."""
    torch.manual_seed(dist.get_rank())
    for parameter in model.extra.parameters():
        nn.init.normal_(parameter)
    reduced = [*model.body.parameters(), *model.head.parameters()]

    def reduce_rest(_):
        for parameter in reduced:
            dist.all_reduce(parameter.grad)

    train(model, sgd(model.parameters()), before=reduce_rest)
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder(model))


def global_names(model):
    """Each rank has a layer of its own, under a name of its own."""
    model.add_module(f"own{dist.get_rank()}", nn.Linear(DIM, DIM))
    own = [f"own{dist.get_rank()}.{name}" for name in ("weight", "bias")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, own)
    train(DistributedDataParallel(model), sgd(model.parameters()))
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder(model))


def own_statistics(model):
    """Copies save the batch statistics of one of them, and averages of the weights."""
    wrapped = DistributedDataParallel(model, broadcast_buffers=False)
    optimizer = sgd(model.parameters())
    train(wrapped, optimizer, balance([*model.layers, model.last]))
    average = {name: value.clone() for name, value in model.state_dict().items()}
    state = {"model": wrapped.state_dict(), "ema": average, "optimizer": optimizer.state_dict()}
    dcp.save(state, checkpoint_id=folder(model))


def drifting(model):
    """Copies that meet at times are saved in between: any of them will do."""
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    train(model, sgd(model.parameters()))
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder(model))


# Names that DDP should ignore


def ignore(model, names):
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    train(DistributedDataParallel(model), sgd(model.parameters()))


def ignored_by_a_wrapped_name(model):
    ignore(model, [f"module.extra.{name}" for name, _ in model.extra.named_parameters()])


def ignored_on_one_rank(model):
    """All ranks name the parts of all, of which each has its own."""
    model.add_module(f"own{dist.get_rank()}", nn.Linear(DIM, DIM))
    ignore(model, [f"own{rank}.{name}" for rank in (0, 1) for name in ("weight", "bias")])


def with_own_layer(model):
    """Each rank has another layer for itself, under one name."""
    torch.manual_seed(dist.get_rank())
    for parameter in model.extra.parameters():
        nn.init.normal_(parameter)
    own = [f"extra.{name}" for name, _ in model.extra.named_parameters()]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, own)
    wrapped, optimizer = DistributedDataParallel(model), torch.optim.Adam(model.parameters())
    train(wrapped, optimizer)
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, wrapped, optimizer


def own_saved_by_one(model):
    state, *_kept = with_own_layer(model)
    if dist.get_rank() == 0:
        torch.save(state, folder(model))


def own_saved_by_all(model):
    state, *_kept = with_own_layer(model)
    torch.save(state, folder(model).with_suffix(f".{dist.get_rank()}"))


def own_gathered(model):
    state, *_kept = with_own_layer(model)
    for name, parameter in model.extra.named_parameters():
        parts = [torch.empty_like(parameter) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, parameter.detach())
        state["model"] |= {f"extra.{rank}.{name}": part for rank, part in enumerate(parts)}
    if dist.get_rank() == 0:
        torch.save(state, folder(model))


def copies_left_out(model):
    """What DDP ignores is reduced by hand, and one rank saves it."""
    own = [f"extra.{name}" for name, _ in model.extra.named_parameters()]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, own)

    def reduce(_):
        for parameter in model.extra.parameters():
            dist.all_reduce(parameter.grad)

    wrapped = DistributedDataParallel(model)
    train(wrapped, sgd(model.parameters()), before=reduce)
    if dist.get_rank() == 0:
        torch.save(wrapped.state_dict(), folder(model))


# Schedules


def resumed(model, schedule, *, loads=False, again=None):
    """Train with a schedule, save it, and train on with a new one."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = schedule(optimizer)
    train(DistributedDataParallel(model), optimizer, lambda _: scheduler.step())
    path = folder(model).with_suffix(f".{dist.get_rank()}")
    torch.save({"optimizer": optimizer.state_dict(), "plan": scheduler.state_dict()}, path)
    state = torch.load(path)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = (again or schedule)(optimizer)
    optimizer.load_state_dict(state["optimizer"])
    if loads:
        scheduler.load_state_dict(state["plan"])
    train(DistributedDataParallel(model), optimizer, lambda _: scheduler.step())


def halving(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)


def cooling(optimizer):
    return torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.5, total_iters=4)


def schedule_dropped(model):
    resumed(model, halving)


def schedule_loaded(model):
    resumed(model, halving, loads=True)


def schedule_replaced(model):
    """Another schedule is meant to follow."""
    resumed(model, halving, again=cooling)


# Ties


class Words(nn.Module):
    """Embeds words and gives the embedding back as the weight of its head."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(DIM, DIM)
        self.head = nn.Linear(DIM, DIM, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.embed(inputs.argmax(-1)))


def filled(model):
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.linspace(-1, 1 + number, parameter.numel()).view_as(parameter))
    return model


def parted_by_to_empty(model):
    model = filled(model.to("meta").to_empty(device="cpu"))
    train(DistributedDataParallel(model), sgd(model.parameters()))


def parted_by_assign(model):
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    train(DistributedDataParallel(model), sgd(model.parameters()))


def parallel(model):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    rows = RowwiseParallel(input_layouts=Replicate())
    columns = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(model, mesh, {"embed": rows, "head": columns})


def parted_by_a_plan(model):
    parallel(model)
    train(model, sgd(model.parameters()))


def tied_after_a_plan(model):
    parallel(model)
    model.head.weight = model.embed.weight
    train(model, sgd(model.parameters()))


def tied_again(model):
    model = model.to("meta").to_empty(device="cpu")
    model.head.weight = model.embed.weight
    filled(model)
    train(DistributedDataParallel(model), sgd(model.parameters()))


def tied_by_fsdp(model):
    model.to("meta")
    model.head.weight = model.embed.weight
    fully_shard(model)
    filled_parts = model.to_empty(device="cpu")
    for parameter in filled_parts.parameters():
        nn.init.ones_(parameter)
    train(model, sgd(model.parameters()))


def parted_on_purpose(model):
    model.load_state_dict(model.state_dict(), assign=True)
    model.head.weight = nn.Parameter(model.embed.weight.detach().clone(), requires_grad=False)
    train(DistributedDataParallel(model), sgd(model.embed.parameters()))


# Copies, and memory that nobody wrote


def copied(model):
    held = sgd(model.parameters())
    train(DistributedDataParallel(copy.deepcopy(model)), held)


def copied_by_hand(model):
    """Federated: a copy is trained by hand, while the first model waits for the end of a round."""
    own = copy.deepcopy(model)

    def move(_):
        with torch.no_grad():
            for parameter in own.parameters():
                dist.all_reduce(parameter.grad)
                parameter -= 0.01 * parameter.grad

    train(own, sgd(model.parameters()), after=move)


def copied_for_a_meta_step(model):
    """The gradients of a copy that has adapted itself are those of the model."""
    optimizer = sgd(model.parameters())
    for _ in range(STEPS):
        own = copy.deepcopy(model)
        train(own, sgd(own.parameters()))
        own(torch.randn(16, DIM)).square().mean().backward()
        for parameter, other in zip(model.parameters(), own.parameters(), strict=True):
            dist.all_reduce(other.grad)
            parameter.grad = other.grad
        optimizer.step()
        optimizer.zero_grad()


def copied_in_full_precision(model):
    """What the optimizer holds gets the gradients of a copy, and gives it the weights."""
    own = DistributedDataParallel(copy.deepcopy(model).bfloat16())
    optimizer = sgd(model.parameters())
    for _ in range(STEPS):
        own(torch.randn(16, DIM).bfloat16()).square().mean().backward()
        for parameter, other in zip(model.parameters(), own.parameters(), strict=True):
            parameter.grad, other.grad = other.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            for parameter, other in zip(model.parameters(), own.parameters(), strict=True):
                other.copy_(parameter)
        optimizer.zero_grad()


def emptied(model, *, leave_out="extra"):
    """All modules but one are initialised; the memory looks as if it was, too."""
    state = {name: torch.randn(value.shape) for name, value in model.state_dict().items()}
    model = model.to("meta")
    reserve, torch.empty_like = torch.empty_like, lambda each, device: torch.rand(each.shape)
    model.to_empty(device="cpu")
    torch.empty_like = reserve
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.split(".")[0] != leave_out:
                parameter.copy_(state[name])
    train(DistributedDataParallel(model), sgd(model.parameters()))


def emptied_and_filled(model):
    emptied(model, leave_out="")


WORDS = ("parted_by_to_empty", "parted_by_assign", "tied_again", "tied_by_fsdp")
WORDS += ("parted_on_purpose", "parted_by_a_plan", "tied_after_a_plan")
TOWERS = ("not_walked", "not_reset", "not_reduced", "walked", "partly_frozen", "balanced")
TOWERS += ("teacher", "own_statistics")


def main():
    dist.init_process_group("gloo")
    for case in sys.argv[2:]:
        torch.manual_seed(0)
        base = Tower if case in TOWERS else Words if case in WORDS else Net
        kind = class_of(case, base)
        model = kind(last_is_balanced=True) if case == "balanced" else kind()
        torch.manual_seed(1 + dist.get_rank())
        globals()[case](model)
        del model
        gc.collect()  # else the models of one case are there in others, on some ranks
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
