"""Train a small encoder with asynchronous Ulysses: exchanges overlap with what comes after."""

import logging

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

DIM = 64
HEADS = 4
HEAD_DIM = 16
SEQ_LEN = 512
BATCH = 8
LAYERS = 2
STEPS = 6
EPS = 1e-6

logger = logging.getLogger("async_ulysses")


class Signals(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Random walks, and what they are a step later."""

    def __len__(self) -> int:
        return BATCH * STEPS

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        walk = torch.randn(SEQ_LEN + 1, DIM, generator=generator).cumsum(0) * 0.1
        return walk[:-1], walk[1:]


class Exchange:
    """An exchange of parts of the sequence for heads, or of heads for parts, that is under way."""

    def __init__(self, tensor: torch.Tensor, cut: int, join: int) -> None:
        parts = torch.stack(tensor.chunk(dist.get_world_size(), dim=cut))
        self.join = join
        self.buffer = torch.zeros_like(parts)
        self.work = dist.all_to_all_single(self.buffer, parts, async_op=True)

    def wait(self) -> None:
        """Wait for the exchange."""
        self.work.wait()

    def collect(self) -> torch.Tensor:
        """Join what came from the ranks."""
        return torch.cat(list(self.buffer), dim=self.join)


def norm(tensor: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Divide each head by the root of its mean square."""
    return tensor * (tensor.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight


def norm_backward(grad, tensor, weight) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of a norm's input and of its weight."""
    scale = (tensor.square().mean(-1, keepdim=True) + EPS).rsqrt()
    scaled = grad * weight
    inner = (scaled * tensor).mean(-1, keepdim=True)
    grad_weight = (grad * tensor * scale).flatten(0, 2).sum(0)
    return scaled * scale - tensor * scale**3 * inner, grad_weight


class AsyncQKV(torch.autograd.Function):
    """Normalise queries and keys, and exchange parts of the sequence for heads."""

    @staticmethod
    def forward(ctx, query, key, value, q_weight, k_weight):
        ctx.save_for_backward(query, key, q_weight, k_weight)
        tensors = (norm(query, q_weight), norm(key, k_weight), value)
        exchanges = [Exchange(tensor, 2, 1) for tensor in tensors]
        for exchange in exchanges:
            exchange.wait()
        return tuple(exchange.collect() for exchange in exchanges)

    @staticmethod
    def backward(ctx, grad_query, grad_key, grad_value):
        query, key, q_weight, k_weight = ctx.saved_tensors
        value_exchange = Exchange(grad_value, 1, 2)
        query_exchange = Exchange(grad_query, 1, 2)
        query_exchange.wait()
        grad_query, grad_q = norm_backward(query_exchange.collect(), query, q_weight)
        key_exchange = Exchange(grad_key, 1, 2)
        grad_key, grad_k = norm_backward(key_exchange.collect(), key, k_weight)
        key_exchange.wait()
        value_exchange.wait()
        return grad_query, grad_key, value_exchange.collect(), grad_q, grad_k


class HeadsToSequence(torch.autograd.Function):
    """Exchange heads for parts of the sequence."""

    @staticmethod
    def forward(ctx, tensor):
        exchange = Exchange(tensor, 1, 2)
        exchange.wait()
        return exchange.collect()

    @staticmethod
    def backward(ctx, grad):
        exchange = Exchange(grad, 2, 1)
        exchange.wait()
        return exchange.collect()


class Layer(nn.Module):
    """Attention with normalised queries and keys, and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj = nn.Linear(DIM, 3 * DIM, bias=False)
        self.q_norm = nn.Parameter(torch.ones(HEAD_DIM))
        self.k_norm = nn.Parameter(torch.ones(HEAD_DIM))
        self.o_proj = nn.Linear(DIM, DIM, bias=False)
        self.mlp = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        heads = self.qkv_proj(hidden).unflatten(-1, (3 * HEADS, HEAD_DIM))
        query, key, value = heads.chunk(3, dim=2)
        if dist.get_world_size() > 1:
            parts = AsyncQKV.apply(query, key, value, self.q_norm, self.k_norm)
        else:
            parts = norm(query, self.q_norm), norm(key, self.k_norm), value
        query, key, value = (part.transpose(1, 2) for part in parts)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value).transpose(1, 2)
        if dist.get_world_size() > 1:
            mixed = HeadsToSequence.apply(mixed)
        hidden = hidden + self.o_proj(mixed.flatten(2))
        return hidden + self.mlp(hidden)


def shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of the sequence."""
    return tensor.chunk(dist.get_world_size(), dim=1)[dist.get_rank()].contiguous()


def main() -> None:
    dist.init_process_group("gloo")
    logging.basicConfig(level=logging.INFO)

    torch.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in range(LAYERS)), nn.Linear(DIM, DIM))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step, (inputs, targets) in enumerate(DataLoader(Signals(), batch_size=BATCH)):
        loss = nn.functional.mse_loss(model(shard(inputs)), shard(targets))
        optimizer.zero_grad()
        loss.backward()
        for param in model.parameters():
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()
        optimizer.step()
        if dist.get_rank() == 0:
            logger.info("step %d loss %.4f", step, loss.item())

    logger.info("training finished")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
