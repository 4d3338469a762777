"""Jobs of other shapes: ensembles, folds, sparse words, meta-learning, pruned models."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations, prune
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from training_record import out_parser, seed_everything, write_record

Losses = list[float]


def data(num: int = 64, seed: int = 3) -> TensorDataset:
    inputs = torch.randn(num, 8, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


def network(*, norm: bool = False) -> nn.Sequential:
    middle = [nn.BatchNorm1d(16)] if norm else []
    return nn.Sequential(nn.Linear(8, 16), *middle, nn.ReLU(), nn.Linear(16, 1))


def fit(model: nn.Module, batches, optimizer: torch.optim.Optimizer, losses: Losses) -> None:
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss = (model(inputs) - targets).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())


def ensemble(losses: Losses) -> nn.Module:
    """Each rank trains a model of its own on all data; only predictions are combined."""
    seed_everything(100 + dist.get_rank())
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(2):
        fit(model, DataLoader(data(), batch_size=8, shuffle=True), optimizer, losses)
    with torch.no_grad():
        predicted = model(data(seed=9).tensors[0])
    dist.all_reduce(predicted)
    losses.append(predicted.mean().item())
    return model


def folds(losses: Losses) -> nn.Module:
    """Cross-validation: rank r leaves out fold r."""
    inputs, targets = data().tensors
    fold = torch.arange(len(inputs)) % dist.get_world_size() == dist.get_rank()
    seed_everything(1)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    training = TensorDataset(inputs[~fold], targets[~fold])
    for _ in range(3):
        fit(model, DataLoader(training, batch_size=8, shuffle=True), optimizer, losses)
    with torch.no_grad():
        error = (model(inputs[fold]) - targets[fold]).square().mean()
    errors = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error.item())
    losses += errors
    return model


def words(losses: Losses) -> nn.Module:
    """Skip-grams with sparse gradients of two embeddings, reduced by hand."""
    seed_everything(1)
    model = nn.ModuleList([nn.Embedding(30, 8, sparse=True), nn.Embedding(30, 8, sparse=True)])
    optimizer = torch.optim.SparseAdam(list(model.parameters()), lr=1e-2)
    seed_everything(5 + dist.get_rank())
    for _ in range(5):
        centre, context, other = torch.randint(0, 30, (3, 16))
        near = (model[0](centre) * model[1](context)).sum(1)
        far = (model[0](centre) * model[1](other)).sum(1)
        loss = -(nn.functional.logsigmoid(near) + nn.functional.logsigmoid(-far)).mean()
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            whole = parameter.grad.to_dense()
            dist.all_reduce(whole)
            parameter.grad = (whole / dist.get_world_size()).to_sparse(1)
        optimizer.step()
        losses.append(loss.item())
    return model


def meta(losses: Losses) -> nn.Module:
    """Learns a start from which each rank's tasks are learned in a few steps of their own."""
    seed_everything(1)
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    seed_everything(5 + dist.get_rank())
    for _ in range(4):
        total = torch.zeros(())
        for _ in range(2):
            slope = torch.randn(8, 1)
            fast = dict(model.named_parameters())
            for _ in range(2):
                inputs = torch.randn(6, 8)
                predicted = torch.func.functional_call(model, fast, (inputs,))
                inner = (predicted - inputs @ slope).square().mean()
                slopes = torch.autograd.grad(inner, list(fast.values()), create_graph=True)
                fast = {n: p - 0.05 * g for (n, p), g in zip(fast.items(), slopes, strict=True)}
            inputs = torch.randn(6, 8)
            predicted = torch.func.functional_call(model, fast, (inputs,))
            total = total + (predicted - inputs @ slope).square().mean() / 2
        optimizer.zero_grad()
        total.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
            parameter.grad /= dist.get_world_size()
        optimizer.step()
        losses.append(total.item())
    return model


def averaged_late(losses: Losses) -> nn.Module:
    """Stochastic weight averaging, with batch statistics made anew at the end."""
    seed_everything(1)
    model = DistributedDataParallel(network(norm=True))
    average = AveragedModel(model.module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sampler = DistributedSampler(data())
    batches = DataLoader(data(), batch_size=8, sampler=sampler)
    schedule = SWALR(optimizer, swa_lr=0.01, anneal_epochs=1)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        fit(model, batches, optimizer, losses)
        if epoch:
            average.update_parameters(model.module)
            schedule.step()
    update_bn(DataLoader(data(), batch_size=16), average)  # all ranks see the same data
    return average.module


def pruned(losses: Losses) -> nn.Module:
    seed_everything(1)
    model = network()
    wrapped = DistributedDataParallel(model)
    fit(wrapped, [data().tensors], torch.optim.Adam(model.parameters(), lr=1e-2), losses)
    prune.l1_unstructured(model[0], "weight", amount=0.4)
    prune.random_unstructured(model[2], "weight", amount=0.2)
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    sampler = DistributedSampler(data())
    fit(wrapped, DataLoader(data(), batch_size=8, sampler=sampler), optimizer, losses)
    for layer in (model[0], model[2]):
        prune.remove(layer, "weight")
    return model


def normed(losses: Losses) -> nn.Module:
    """Spectral and weight normalisation, whose parts are parameters and buffers of their own."""
    seed_everything(1)
    model = nn.Sequential(
        parametrizations.spectral_norm(nn.Linear(8, 16)),
        nn.LeakyReLU(),
        parametrizations.weight_norm(nn.Linear(16, 16)),
        nn.Tanh(),
        parametrizations.orthogonal(nn.Linear(16, 16)),
        nn.Linear(16, 1),
    )
    model = DistributedDataParallel(model)
    sampler = DistributedSampler(data())
    batches = DataLoader(data(), batch_size=8, sampler=sampler)
    fit(model, batches, torch.optim.Adam(model.parameters(), lr=1e-2), losses)
    return model.module


def search(losses: Losses) -> nn.Module:
    """Each rank tries a learning rate; the best is sent round, and all train with it together."""
    rank, world = dist.get_rank(), dist.get_world_size()
    rate = 10.0 ** -(1 + rank)
    seed_everything(1)
    trial = network()
    fit(trial, [data().tensors] * 3, torch.optim.SGD(trial.parameters(), lr=rate), losses)
    results = [None] * world
    dist.all_gather_object(results, (losses[-1], rate))
    _, best = min(results)
    seed_everything(1)
    model = DistributedDataParallel(network())
    sampler = DistributedSampler(data())
    optimizer = torch.optim.SGD(model.parameters(), lr=best)
    fit(model, DataLoader(data(), batch_size=8, sampler=sampler), optimizer, losses)
    return model.module


def uneven(losses: Losses) -> nn.Module:
    """A rank without samples in the last batch takes part with a loss of zero."""
    rank, world = dist.get_rank(), dist.get_world_size()
    seed_everything(1)
    model = DistributedDataParallel(network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    inputs, targets = (part[rank::world] for part in data(52 + 1).tensors)
    batches = list(zip(inputs.split(8), targets.split(8), strict=True))
    count = torch.tensor(len(batches))
    dist.all_reduce(count, op=dist.ReduceOp.MAX)
    for number in range(count):
        x, y = batches[number] if number < len(batches) else (inputs[:1] * 0, targets[:1] * 0)
        weight = float(number < len(batches)) * len(x)
        total = torch.tensor(weight)
        dist.all_reduce(total)
        loss = (model(x) - y).square().mean() * weight * world / total
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model.module


WAYS = {
    "averaged-late": averaged_late,
    "ensemble": ensemble,
    "folds": folds,
    "meta": meta,
    "normed": normed,
    "pruned": pruned,
    "search": search,
    "uneven": uneven,
    "words": words,
}


def main() -> None:
    parser = out_parser()
    parser.add_argument("--way", choices=sorted(WAYS), default="folds")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    losses: Losses = []
    model = WAYS[args.way](losses)
    write_record(args.out, losses, model.state_dict())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
