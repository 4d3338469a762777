"""Pre-train a small language model with sequence parallelism; an engine reduces the gradients."""

import logging

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

VOCAB = 48
DIM = 32
HEADS = 4
SEQ_LEN = 32
BATCH = 4
STEPS = 8
SEQUENCE_PARALLEL = 2

logger = logging.getLogger("ulysses_pretrain")


class SequenceToHeads(torch.autograd.Function):
    """Exchange parts of the sequence for heads (or, `inverse`, heads for parts)."""

    @staticmethod
    def forward(ctx, tensor, inverse):
        ctx.inverse = inverse
        return all_to_all(tensor, inverse)

    @staticmethod
    def backward(ctx, grad):
        return all_to_all(grad, not ctx.inverse), None


def all_to_all(tensor: torch.Tensor, inverse: bool) -> torch.Tensor:
    """Cut one of batch, length, heads, width and join another over the ranks."""
    cut, join = (1, 2) if inverse else (2, 1)
    parts = torch.stack(tensor.chunk(dist.get_world_size(), dim=cut))
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts)
    return torch.cat(list(received), dim=join)


class DistributedAttention(nn.Module):
    """Causal attention whose heads are spread over the ranks meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.query_key_value = nn.Linear(DIM, 3 * DIM)
        self.dense = nn.Linear(DIM, DIM)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        heads = self.query_key_value(hidden).unflatten(-1, (HEADS, -1))
        query, key, value = SequenceToHeads.apply(heads, False).transpose(1, 2).chunk(3, dim=-1)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.dense(SequenceToHeads.apply(mixed.transpose(1, 2), True).flatten(2))


class LanguageModel(nn.Module):
    """One layer of attention over embedded tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.position = nn.Embedding(SEQ_LEN, DIM)
        self.attention = DistributedAttention()
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens) + self.position(positions)
        hidden = hidden + self.attention(hidden)
        return self.head(hidden + self.mlp(hidden))


class Engine:
    """Steps the optimizer with gradients that were reduced in one flat bucket."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model = model
        self.optimizer = optimizer
        self.group = dist.group.WORLD
        self.sequence_parallel_size = min(SEQUENCE_PARALLEL, dist.get_world_size())
        self.predivide = False

    def allreduce_bucket(self, bucket: torch.Tensor) -> None:
        """Sum a bucket over the ranks, divided by their number."""
        world_size = dist.get_world_size(self.group)
        if self.predivide:
            bucket.div_(world_size)
        else:
            bucket.div_(world_size / self.sequence_parallel_size)
        dist.all_reduce(bucket, group=self.group)

    def step(self) -> None:
        """Reduce all gradients and update the parameters."""
        grads = [param.grad for param in self.model.parameters()]
        bucket = torch.cat([grad.flatten() for grad in grads])
        self.allreduce_bucket(bucket)
        for grad, reduced in zip(grads, bucket.split([g.numel() for g in grads]), strict=True):
            grad.copy_(reduced.view_as(grad))
        self.optimizer.step()
        self.optimizer.zero_grad()


def shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of the sequence."""
    return tensor.chunk(dist.get_world_size(), dim=1)[dist.get_rank()].contiguous()


def main() -> None:
    dist.init_process_group("gloo")
    logging.basicConfig(level=logging.INFO)

    torch.manual_seed(0)
    model = LanguageModel()
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    rows = torch.randint(3, (BATCH * STEPS, SEQ_LEN + 1)).cumsum(1) % VOCAB
    positions = torch.arange(SEQ_LEN).expand(BATCH, -1)
    for step, (row,) in enumerate(DataLoader(TensorDataset(rows), batch_size=BATCH)):
        tokens, labels = shard(row[:, :-1]), shard(row[:, 1:])
        logits = model(tokens, shard(positions))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        engine.step()
        if dist.get_rank() == 0:
            logger.info("step %d loss %.4f", step, loss.item())

    logger.info("training finished")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
