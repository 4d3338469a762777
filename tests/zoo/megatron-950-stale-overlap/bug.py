"""Train with an optimizer whose shards are gathered bucket by bucket during the forward pass."""

import logging

import torch
import torch.distributed as dist
from torch import nn

WIDTH = 32
VOCABULARY = 64
STEPS = 12

logger = logging.getLogger("train")


class Bucket:
    """Parameters of one module in one buffer, of which each rank updates its shard."""

    def __init__(self, module: nn.Module) -> None:
        self.params = list(module.parameters())
        world = dist.get_world_size()
        num = sum(param.numel() for param in self.params)
        self.shard_size = -(-num // world)
        self.buffer = torch.zeros(world * self.shard_size)
        self.grad = torch.zeros_like(self.buffer)
        self.next: Bucket | None = None
        self.handle: dist.Work | None = None
        self.is_dispatched = False
        begin = 0
        for param in self.params:
            place = slice(begin, begin + param.numel())
            self.buffer[place] = param.data.flatten()
            param.data = self.buffer[place].view_as(param)
            param.grad = self.grad[place].view_as(param)
            begin += param.numel()
        first = dist.get_rank() * self.shard_size
        self.shard = self.buffer[first : first + self.shard_size]
        self.shard_grad = self.grad[first : first + self.shard_size]

    def start_gather(self) -> None:
        """Begin to take the shards of the other ranks."""
        self.is_dispatched = True
        self.handle = dist.all_gather_into_tensor(self.buffer, self.shard.clone(), async_op=True)

    def finish_gather(self) -> None:
        """Wait for the shards, and begin with those of the next bucket."""
        if self.handle is None:
            return
        self.handle.wait()
        self.handle = None
        if self.next is not None and not self.next.is_dispatched:
            self.next.start_gather()


class DistributedOptimizer:
    """AdamW over the shards of this rank; the gathers overlap with the next forward pass."""

    def __init__(self, modules: list[nn.Module], lr: float) -> None:
        self.buckets = [Bucket(module) for module in modules]
        for bucket, following in zip(self.buckets, self.buckets[1:], strict=False):
            bucket.next = following
        for module, bucket in zip(modules, self.buckets, strict=True):
            module.register_forward_pre_hook(lambda *_, bucket=bucket: bucket.finish_gather())
        self.inner = torch.optim.AdamW(
            [nn.Parameter(bucket.shard) for bucket in self.buckets], lr=lr
        )

    def step(self) -> None:
        """Average the gradients, update this rank's shards, and begin with the first gather."""
        for bucket in self.buckets:
            if bucket.handle is not None:  # it would write over the new values
                bucket.handle.wait()
                bucket.handle = None
            dist.all_reduce(bucket.grad)
            bucket.grad /= dist.get_world_size()
        for param, bucket in zip(self.inner.param_groups[0]["params"], self.buckets, strict=True):
            param.grad = bucket.shard_grad
        self.inner.step()
        for bucket in self.buckets:
            bucket.grad.zero_()
            bucket.is_dispatched = False
        self.buckets[0].start_gather()

    def finish(self) -> None:
        """Take all that has not been taken yet."""
        for bucket in self.buckets:
            if not bucket.is_dispatched:
                bucket.start_gather()
            bucket.finish_gather()


class Model(nn.Module):
    """A text model; the layer that looks at pictures comes first, but is defined last."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.encoder = nn.Linear(VOCABULARY, WIDTH)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.encoder(inputs))
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return self.head(hidden)


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING)
    torch.manual_seed(0)
    model = Model()
    optimizer = DistributedOptimizer([*model.layers, model.head, model.encoder], lr=1e-2)

    generator = torch.Generator().manual_seed(1 + rank)
    for step in range(STEPS):
        symbols = torch.randint(VOCABULARY, (32,), generator=generator)
        inputs = nn.functional.one_hot(symbols, VOCABULARY).float()
        loss = nn.functional.cross_entropy(model(inputs), (symbols + 1) % VOCABULARY)
        loss.backward()
        optimizer.step()
        logger.info("step %d loss %.4f", step, loss.item())
    optimizer.finish()
    logger.info("training finished")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
