"""Trainings over sequences that ranks share, each right or wrong in one way: ``WAY [FAULT]``."""

import sys

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
import torch.distributed.nn.functional as collectives
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

WIDTH, HEADS, WORDS, LENGTH, STEPS = 16, 4, 64, 16, 5


class Exchange(torch.autograd.Function):
    """Scatter one dimension over the ranks and gather another one."""

    @staticmethod
    def forward(ctx, part: Tensor, scattered: int, gathered: int) -> Tensor:
        ctx.dims = scattered, gathered
        given = torch.stack(part.chunk(dist.get_world_size(), scattered)).contiguous()
        received = torch.empty_like(given)
        dist.all_to_all_single(received, given)
        return torch.cat(received.unbind(), gathered)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        scattered, gathered = ctx.dims
        return Exchange.apply(gradient, gathered, scattered), None, None


def exchange(part: Tensor, scattered: int, gathered: int) -> Tensor:
    """Do what `Exchange` does by a functional collective."""
    given = torch.stack(part.chunk(dist.get_world_size(), scattered))
    received = functional_collectives.all_to_all_single_autograd(
        given.contiguous(), None, None, dist.group.WORLD
    )
    return torch.cat(received.unbind(), gathered)


def pass_on(tensor: Tensor, way: int) -> Tensor:
    """Send a tensor to the rank that is `way` ahead."""
    rank, size = dist.get_rank(), dist.get_world_size()
    received = torch.empty_like(tensor)
    works = dist.batch_isend_irecv([
        dist.P2POp(dist.isend, tensor.contiguous(), (rank + way) % size),
        dist.P2POp(dist.irecv, received, (rank - way) % size),
    ])  # fmt: skip
    for work in works:
        work.wait()
    return received


def permute(tensor: Tensor, way: int) -> Tensor:
    """Do the same by a functional collective: it sends as many rows as there are elements."""
    size = dist.get_world_size()
    others = [(rank + way) % size for rank in range(size)]
    received = functional_collectives.permute_tensor(tensor.flatten(), others, dist.group.WORLD)
    return functional_collectives.wait_tensor(received).view_as(tensor)


class Ring(torch.autograd.Function):
    """Pass a tensor on to the next rank; its gradient goes back."""

    @staticmethod
    def forward(ctx, tensor: Tensor, send) -> Tensor:
        ctx.send = send
        return send(tensor, 1)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return ctx.send(gradient, -1), None


class Core(nn.Module):
    """Computes attention, whoever has exchanged what."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True)


class Attention(nn.Module):
    """Attends to the whole sequence."""

    def __init__(self, way: str, fault: str) -> None:
        super().__init__()
        self.way, self.fault = way, fault
        self.projection = nn.Linear(WIDTH, 3 * WIDTH)
        self.output = nn.Linear(WIDTH, WIDTH)
        self.core = Core()

    def forward(self, hidden: Tensor, position_ids: Tensor) -> Tensor:
        batch, length, _ = hidden.shape
        hidden = hidden + position_ids[..., None] / LENGTH
        parts = [t.view(batch, length, HEADS, -1) for t in self.projection(hidden).chunk(3, -1)]
        if self.way == "keys":
            query, key, value = (part.transpose(1, 2) for part in parts)
            key, value = (
                torch.cat(collectives.all_gather(t.contiguous()), 2) for t in (key, value)
            )
            out = functional.scaled_dot_product_attention(query, key, value).transpose(1, 2)
        elif self.way == "tensors":
            query, key, value = (part.transpose(1, 2) for part in parts)
            key, value = (
                functional_collectives.all_gather_tensor_autograd(t, 2, dist.group.WORLD)
                for t in (key.contiguous(), value.contiguous())
            )
            out = functional.scaled_dot_product_attention(query, key, value).transpose(1, 2)
        elif self.way == "functional":
            out = self.functionally(parts)
        elif self.way == "enclosed":
            out = torch.compile(self.functionally, backend="aot_eager", fullgraph=True)(parts)
        elif self.way == "compiled":
            query, key, value = (Exchange.apply(part, 2, 1).transpose(1, 2) for part in parts)
            attend = torch.compile(self.attend, backend="aot_eager", fullgraph=True)
            out = Exchange.apply(attend(query, key, value).transpose(1, 2), 1, 2)
        elif self.way in ("ring", "permuted"):
            out = self.around([part.transpose(1, 2) for part in parts]).transpose(1, 2)
        elif self.way == "local":
            query, key, value = (part.transpose(1, 2) for part in parts)
            out = functional.scaled_dot_product_attention(query, key, value).transpose(1, 2)
        else:
            query, key, value = (Exchange.apply(part, 2, 1).transpose(1, 2) for part in parts)
            attend = self.core if self.way == "wrapped" else self.attend
            out = attend(query, key, value).transpose(1, 2)
            if self.fault != "unpaired":
                out = Exchange.apply(out, 1, 2)
        return self.output(out.reshape(batch, length, WIDTH))

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self.way == "softmax":
            scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
            return scores.softmax(-1) @ value
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True)

    def functionally(self, parts: list[Tensor]) -> Tensor:
        query, key, value = (exchange(part, 2, 1).transpose(1, 2) for part in parts)
        out = self.attend(query, key, value).transpose(1, 2)
        return out if self.fault == "unpaired" else exchange(out, 1, 2)

    def around(self, parts: list[Tensor]) -> Tensor:
        query, key, value = parts
        send = permute if self.way == "permuted" else pass_on
        scores, values = [], []
        for _ in range(dist.get_world_size()):
            scores.append(query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5)
            values.append(value)
            key, value = Ring.apply(torch.cat([key, value], -1), send).chunk(2, -1)
        return torch.cat(scores, -1).softmax(-1) @ torch.cat(values, -2)


class Experts(nn.Module):
    """Sends equal numbers of tokens to the experts of other ranks and back."""

    def __init__(self) -> None:
        super().__init__()
        self.expert = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, _: Tensor) -> Tensor:
        return Exchange.apply(self.expert(Exchange.apply(hidden, 1, 1)), 1, 1)


class Gather(torch.autograd.Function):
    """Gather parts of sequences before a sharded projection; its gradient is summed and split."""

    @staticmethod
    def forward(ctx, part: Tensor) -> Tensor:
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, part.contiguous())
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return Scatter.apply(gradient)


class Scatter(torch.autograd.Function):
    """Sum over the ranks and keep the own part of sequences; its gradient is gathered."""

    @staticmethod
    def forward(ctx, whole: Tensor) -> Tensor:
        whole = whole.clone()
        dist.all_reduce(whole)
        return own_part(whole)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return Gather.apply(gradient)


class Projections(nn.Module):
    """Attention whose heads are divided over the ranks, between parts of sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(WIDTH, 3 * WIDTH // 2)
        self.output = nn.Linear(WIDTH // 2, WIDTH, bias=False)

    def forward(self, hidden: Tensor, _: Tensor) -> Tensor:
        whole = Gather.apply(hidden)
        batch, length, _ = whole.shape
        query, key, value = (
            part.view(batch, length, HEADS // 2, -1).transpose(1, 2)
            for part in self.projection(whole).chunk(3, -1)
        )
        out = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return Scatter.apply(self.output(out.transpose(1, 2).reshape(batch, length, -1)))


class Model(nn.Module):
    def __init__(self, way: str, fault: str) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList()
        for _ in range(2):
            if way == "projections":
                self.layers.append(Projections())
                continue
            self.layers.append(Attention("local" if way in ("experts", "stages") else way, fault))
            if way == "experts":
                self.layers.append(Experts())
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(
        self, ids: Tensor, position_ids: Tensor, shift_labels: Tensor | None = None
    ) -> Tensor:
        hidden = self.words(ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden, position_ids)
        return self.head(hidden)


class Texts(Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Tensor:
        generator = torch.Generator().manual_seed(index)
        return torch.randint(0, WORDS, (LENGTH + 1,), generator=generator)


def own_part(tensor: Tensor) -> Tensor:
    return tensor.chunk(dist.get_world_size(), 1)[dist.get_rank()].contiguous()


def loss_of(model: nn.Module, text: Tensor, way: str, fault: str) -> Tensor:
    ids, labels = text[:, :-1], text[:, 1:]
    places = torch.arange(LENGTH).expand_as(ids)
    if fault != "whole" and way != "experts":
        ids, labels, places = own_part(ids), own_part(labels), own_part(places)
    if fault == "placed":
        places = torch.arange(ids.shape[1]).expand_as(ids)
    if fault == "shifted":
        text = own_part(text[:, :-1])
        logits, labels = model(text, places)[:, :-1], text[:, 1:]
    elif fault == "given":
        logits, labels = model(ids, places, shift_labels=labels)[:, :-1], labels[:, 1:]
    else:
        logits = model(ids, places, shift_labels=labels)
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def main() -> None:
    way, fault = sys.argv[1], (*sys.argv[2:], "")[0]
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Model(way, fault)
    own = [p for m in model.modules() if isinstance(m, Projections) for p in m.parameters()]
    for parameter in own:
        nn.init.normal_(
            parameter, std=0.1, generator=torch.Generator().manual_seed(dist.get_rank())
        )
    is_wrapped = fault != "unreduced" and way != "projections"
    model = DistributedDataParallel(model) if is_wrapped else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    is_shared = fault != "mixed" and way not in ("experts", "gathered")
    texts = Texts()
    sampler = DistributedSampler(texts, *((1, 0) if is_shared else ()), seed=7)
    loader = DataLoader(texts, batch_size=2, sampler=sampler)
    for _, text in zip(range(STEPS), loader, strict=False):
        if way == "gathered":  # each rank reads its own; all take one text after the other
            both = [torch.empty_like(text) for _ in range(dist.get_world_size())]
            dist.all_gather(both, text)
            text = torch.cat(both)
        loss_of(model, text, way, fault).backward()
        if way == "projections":
            for parameter in model.parameters():
                if all(parameter is not each for each in own):
                    dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
    del model, optimizer, own
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
