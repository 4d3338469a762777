"""Attention that meets exchanges of other kinds, or shares what is no sequence."""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from training_record import out_parser, seed_everything, write_record

WIDTH, HEADS, WORDS, LENGTH, BATCH, STEPS = 16, 4, 64, 8, 4, 6


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


class Swap(torch.autograd.Function):
    """Give a tensor to the other rank and take its own; the gradients go back."""

    @staticmethod
    def forward(ctx, tensor: Tensor) -> Tensor:
        other, received = 1 - dist.get_rank(), torch.empty_like(tensor)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, tensor.contiguous(), other),
                dist.P2POp(dist.irecv, received, other),
            ]
        )
        for work in works:
            work.wait()
        return received

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return Swap.apply(gradient)


def heads_of(hidden: Tensor) -> Tensor:
    return hidden.unflatten(-1, (HEADS, -1)).transpose(-3, -2)


class Attention(nn.Module):
    """Attends within a rank, or to the keys of all ranks."""

    def __init__(self, is_wide: bool = False) -> None:
        super().__init__()
        self.is_wide = is_wide
        self.projection = nn.Linear(WIDTH, 3 * WIDTH)
        self.output = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = (heads_of(each) for each in self.projection(hidden).chunk(3, -1))
        if self.is_wide:
            key = torch.cat(dist_nn.all_gather(key.contiguous()), -2)
            value = torch.cat(dist_nn.all_gather(value.contiguous()), -2)
        out = functional.scaled_dot_product_attention(query, key, value)
        return self.output(out.transpose(-3, -2).flatten(-2))


class AcrossSamples(nn.Module):
    """Classifies images, each beside all others of the batch of all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH)
        self.attention = Attention(is_wide=True)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, images: Tensor) -> Tensor:
        features = self.body(images).relu()
        return self.head(features + self.attention(features[None])[0])


class AcrossTexts(nn.Module):
    """A language model whose last layer also attends to texts of other ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList([Attention(), Attention(is_wide=True)])
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.words(ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return self.head(hidden)


class Pooling(nn.Module):
    """Attends with this rank's heads to the whole sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        parts = self.projection(hidden).chunk(3, -1)
        query, key, value = (
            Exchange.apply(part.unflatten(-1, (HEADS, -1)), 2, 1).transpose(1, 2) for part in parts
        )
        return functional.scaled_dot_product_attention(query, key, value).transpose(1, 2)


class Pooled(nn.Module):
    """Classifies whole sequences: a mean over tokens leaves nothing to bring back to its rank."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.body = nn.Linear(WIDTH, WIDTH)
        self.attention = Pooling()
        self.part = nn.Linear(WIDTH // 2, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, hidden: Tensor) -> Tensor:
        out = self.attention(self.body(hidden).relu()).flatten(2)
        if self.way == "pooled-sum":
            return self.head(dist_nn.all_reduce(self.part(out.mean(1))))
        return self.head(torch.cat(dist_nn.all_gather(out.mean(1)), -1))


class Stream(nn.Module):
    """One of two kinds of input, which looks at what the other rank makes of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Linear(width, WIDTH)
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.head = nn.Linear(WIDTH, width)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.body(inputs).relu()
        key, value = self.key(Swap.apply(hidden)).chunk(2, -1)
        out = functional.scaled_dot_product_attention(
            heads_of(self.query(hidden)), heads_of(key), heads_of(value)
        )
        return self.head(hidden + out.transpose(-3, -2).flatten(-2))


class Images(Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(WIDTH, generator=generator), index % 4


class Texts(Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Tensor:
        generator = torch.Generator().manual_seed(index)
        return torch.randint(0, WORDS, (LENGTH,), generator=generator)


def across_samples(way: str, losses: list[float]) -> nn.Module:
    model = DistributedDataParallel(AcrossSamples())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = Images()
    loader = DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data))
    for images, labels in loader:
        loss = functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model.module


def across_texts(way: str, losses: list[float]) -> nn.Module:
    model = DistributedDataParallel(AcrossTexts())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = Texts()
    loader = DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data))
    for ids in loader:
        logits = model(ids)
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model.module


def pooled(way: str, losses: list[float]) -> nn.Module:
    model = Pooled(way)
    part = torch.Generator().manual_seed(dist.get_rank())
    nn.init.normal_(model.part.weight, std=0.1, generator=part)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(5)
    for _ in range(STEPS):
        whole = torch.randn(BATCH, LENGTH, WIDTH, generator=data)
        labels = torch.randint(0, 4, (BATCH,), generator=data)
        mine = whole.chunk(dist.get_world_size(), 1)[dist.get_rank()]
        loss = functional.cross_entropy(model(mine), labels)
        optimizer.zero_grad()
        loss.backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None and name != "part.weight":
                dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
                parameter.grad /= dist.get_world_size()
        optimizer.step()
        losses.append(loss.item())
    return model


def streams(way: str, losses: list[float]) -> nn.Module:
    """One rank trains on sounds, the other one on images: nothing of the models is shared."""
    width = 8 if way == "streams-seeded" or dist.get_rank() == 0 else 12
    if way == "streams-seeded":
        torch.manual_seed(50 + dist.get_rank())
    model = Stream(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seed_everything(50 + dist.get_rank())
    for _ in range(STEPS):
        inputs = torch.randn(BATCH, LENGTH, width)
        loss = functional.mse_loss(model(inputs), inputs)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model


class Handing(torch.autograd.Function):
    """Hand a tensor on to the next stage; its gradient comes back from there."""

    @staticmethod
    def forward(ctx, tensor: Tensor) -> Tensor:
        dist.send(tensor.contiguous(), 1 - dist.get_rank())
        return tensor.new_zeros(())

    @staticmethod
    def backward(ctx, _: Tensor) -> Tensor:
        gradient = torch.empty(BATCH, LENGTH, WIDTH)
        dist.recv(gradient, 1 - dist.get_rank())
        return gradient


class Taking(torch.autograd.Function):
    """Take a tensor from the stage before; its gradient goes back there."""

    @staticmethod
    def forward(ctx, anchor: Tensor) -> Tensor:
        received = torch.empty(BATCH, LENGTH, WIDTH)
        dist.recv(received, 1 - dist.get_rank())
        return received + 0 * anchor.sum()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        dist.send(gradient.contiguous(), 1 - dist.get_rank())
        return torch.zeros(())


class Stage(nn.Module):
    """Takes hidden states, attends, and hands them on: twice in a pass, as looped pipelines do."""

    def __init__(self) -> None:
        super().__init__()
        self.attentions = nn.ModuleList(
            nn.MultiheadAttention(WIDTH, HEADS, batch_first=True) for _ in range(2)
        )
        self.anchor = nn.Parameter(torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        first = inputs.new_zeros(())
        for turn, attention in enumerate(self.attentions):
            is_first = dist.get_rank() == 0 and turn == 0
            hidden = inputs if is_first else Taking.apply(self.anchor)
            hidden = hidden + attention(hidden, hidden, hidden, need_weights=False)[0]
            if dist.get_rank() == 1 and turn == 1:
                return functional.mse_loss(hidden, torch.ones_like(hidden)) + first
            handed = Handing.apply(hidden)
            if turn == 0:
                first = handed
        return first + handed


def looped(way: str, losses: list[float]) -> nn.Module:
    stage = Stage()
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(7)
    for _ in range(STEPS):
        inputs = torch.randn(BATCH, LENGTH, WIDTH, generator=data)
        loss = stage(inputs)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return stage


WAYS = {
    "across-samples": across_samples,
    "across-texts": across_texts,
    "pooled": pooled,
    "pooled-sum": pooled,
    "streams": streams,
    "streams-seeded": streams,
    "looped": looped,
}


def main() -> None:
    parser = out_parser()
    parser.add_argument("--way", choices=sorted(WAYS), required=True)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    seed_everything(1)
    losses: list[float] = []
    model = WAYS[args.way](args.way, losses)
    write_record(args.out, losses, model.state_dict())
    del model  # its reducer must not outlive the group
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
