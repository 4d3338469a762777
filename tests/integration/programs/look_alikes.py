"""Correct programs that look like wrong ones, by what they do with samples, gradients and steps."""

from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from training_record import out_parser, seed_everything, write_record

Losses = list[float]


def data() -> TensorDataset:
    inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(3))
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


def network(out: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, out)
    )


def wrapped(out: int = 1) -> nn.Module:
    return DistributedDataParallel(network(out))


def loader(kind: type[DistributedSampler] = DistributedSampler) -> DataLoader:
    dataset = data()
    return DataLoader(dataset, batch_size=8, sampler=kind(dataset))


def prompts() -> DataLoader:
    order = torch.Generator().manual_seed(4)
    return DataLoader(data(), batch_size=4, shuffle=True, generator=order)


def fit(
    model: nn.Module, batches: DataLoader, optimizer: torch.optim.Optimizer, losses: Losses
) -> None:
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss = (model(inputs) - targets).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())


def variants(losses: Losses) -> nn.Module:
    """Two variants are trained on the same batches, one epoch each."""
    batches = loader()
    for rate in (0.01, 0.03):
        seed_everything(1)
        model = wrapped()
        fit(model, batches, torch.optim.SGD(model.parameters(), lr=rate), losses)
    return model


def alternate(losses: Losses) -> nn.Module:
    """In each epoch one part is trained on all batches, then the other on the same."""
    batches = loader()
    parts = [DistributedDataParallel(nn.Linear(8, width)) for width in (8, 1)]
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.02) for part in parts]
    for epoch in range(2):
        batches.sampler.set_epoch(epoch)
        for turn, optimizer in enumerate(optimizers):
            for number, part in enumerate(parts):
                part.requires_grad_(number == turn)
            encoder, decoder = (p if n == turn else p.module for n, p in enumerate(parts))
            for inputs, targets in batches:
                optimizer.zero_grad()
                loss = (decoder(encoder(inputs)) - targets).square().mean()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
    return nn.ModuleList(parts)


def shared_prompts(losses: Losses) -> nn.Module:
    """All ranks answer the same prompts; rewards are compared over the answers of all."""
    model = wrapped(4)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for inputs, _ in prompts():
        asked = inputs.repeat_interleave(2, 0)
        with torch.no_grad():
            answers = torch.distributions.Categorical(logits=model.module(asked)).sample()
        rewards = (answers == asked[:, :4].argmax(1)).float()
        parts = [torch.empty_like(rewards) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, rewards)
        group = torch.stack(parts).view(len(parts), -1, 2).transpose(0, 1).flatten(1)
        gain = (rewards.view(-1, 2) - group.mean(1, keepdim=True)).flatten()
        chances = model(asked).log_softmax(-1).gather(1, answers[:, None])[:, 0]
        loss = -(chances * gain).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model


def shared_images(losses: Losses) -> nn.Module:
    """The same for a sampler of images: each rank begins with noise of its own."""
    model = wrapped(8)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for inputs, _ in prompts():
        states = [torch.randn_like(inputs)]
        with torch.no_grad():
            for _ in range(2):
                mean = states[-1] + 0.5 * model.module(states[-1] + inputs)
                states.append(mean + 0.1 * torch.randn_like(mean))
        rewards = -(states[-1] - inputs).square().mean(1)
        whole = rewards.clone()
        dist.all_reduce(whole)
        gain = rewards - whole / dist.get_world_size()
        for before, after in pairwise(states):
            mean = before + 0.5 * model(before + inputs)
            chance = -(after - mean).square().sum(1) / 0.02
            loss = -(chance * gain).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return model


def skipped(losses: Losses) -> nn.Module:
    """Bad batches are left out: their gradients are dropped, and the step then finds none."""
    model = wrapped()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for number, (inputs, targets) in enumerate(loader()):
        given = inputs * float("inf") if number in (1, 2) else inputs
        optimizer.zero_grad()
        loss = (model(given) - targets).square().mean()
        loss.backward()
        bad = (~loss.detach().isfinite()).float()
        dist.all_reduce(bad)
        if bad:
            optimizer.zero_grad()
        optimizer.step()
        losses.append(loss.item())
    return model


@torch.no_grad()
def descend(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter -= 0.02 * parameter.grad


def second_by_hand(losses: Losses) -> nn.Module:
    """A second model, made after the optimizer of the first, is stepped without one."""
    first = wrapped()
    optimizer = torch.optim.Adam(first.parameters(), lr=1e-2)
    second = wrapped()
    for inputs, targets in loader():
        second.zero_grad(set_to_none=False)
        loss = (second(inputs) - targets).square().mean()
        loss.backward()
        descend(second)
        optimizer.zero_grad()
        loss = (first(inputs) - second(inputs).detach()).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return first


def probed(losses: Losses) -> nn.Module:
    """A probe on detached features, made last, steps after the optimizer."""
    model = wrapped(4)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    probe = DistributedDataParallel(nn.Linear(4, 1))
    for inputs, targets in loader():
        optimizer.zero_grad()
        probe.zero_grad()
        hidden = model(inputs)
        (probe(hidden.detach()) - targets).square().mean().backward()
        loss = (hidden - inputs[:, :4]).square().mean()
        loss.backward()
        optimizer.step()
        descend(probe)
        losses.append(loss.item())
    return model


def layer_by_layer(losses: Losses) -> nn.Module:
    """One optimizer is given other parameters of the model, time and again."""
    model = network()
    optimizer = torch.optim.Adam(model[0].parameters(), lr=1e-2)
    for number in (0, 2, 4):
        model.requires_grad_(requires_grad=False)
        model[number].requires_grad_(requires_grad=True)
        optimizer.param_groups[0]["params"] = list(model[number].parameters())
        batches = loader()
        batches.sampler.set_epoch(number)
        fit(DistributedDataParallel(model), batches, optimizer, losses)
    return model


class BySize(DistributedSampler):
    """The samples by size: the order is meant to be the same in each epoch."""

    def __iter__(self):
        sizes: Tensor = self.dataset.tensors[0].norm(dim=1)
        return iter(sizes.argsort().tolist()[self.rank : self.total_size : self.num_replicas])


def by_size(losses: Losses) -> nn.Module:
    model, batches = wrapped(), loader(BySize)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for _ in range(3):
        fit(model, batches, optimizer, losses)
    return model


WAYS = {
    "alternate": alternate,
    "by-size": by_size,
    "layer-by-layer": layer_by_layer,
    "probed": probed,
    "second-by-hand": second_by_hand,
    "shared-images": shared_images,
    "shared-prompts": shared_prompts,
    "skipped": skipped,
    "variants": variants,
}


def main() -> None:
    parser = out_parser()
    parser.add_argument("--way", choices=sorted(WAYS), default="variants")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    seed_everything(10 + dist.get_rank())
    losses: Losses = []
    model = WAYS[args.way](losses)
    write_record(args.out, losses, model.state_dict())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
