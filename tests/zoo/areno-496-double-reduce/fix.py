"""Fine-tune a latent-attention layer over frozen embeddings, its heads spread over the ranks."""

import logging

import torch
import torch.distributed as dist
from torch import nn

VOCAB = 64
DIM = 32
LATENT = 12
POSITION = 4
HEAD_DIM = 8
HEADS = 4
SEQ_LEN = 10
STEPS = 8

logger = logging.getLogger("latent_attention")


class CopyToRanks(torch.autograd.Function):
    """Hand the input to all ranks; sum the gradients that come back."""

    @staticmethod
    def forward(ctx: object, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


class SumOverRanks(torch.autograd.Function):
    """Sum the partial outputs of the ranks."""

    @staticmethod
    def forward(ctx: object, tensor: torch.Tensor) -> torch.Tensor:
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        return grad


class ShardedLinear(nn.Module):
    """A linear layer of which each rank holds some outputs (dim 0) or some inputs (dim 1)."""

    def __init__(self, in_features: int, out_features: int, dim: int) -> None:
        super().__init__()
        self.dim = dim
        full = torch.randn(out_features, in_features) * in_features**-0.5
        self.weight = nn.Parameter(full.chunk(dist.get_world_size(), dim)[dist.get_rank()].clone())
        self.weight.tensor_model_parallel = True

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.dim == 0:
            return nn.functional.linear(CopyToRanks.apply(inputs), self.weight)
        return SumOverRanks.apply(nn.functional.linear(inputs, self.weight))


class LatentAttention(nn.Module):
    """Keys and values from a small latent, and one positional key for all heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = ShardedLinear(DIM, HEADS * (HEAD_DIM + POSITION), dim=0)
        self.kv_down_proj = nn.Linear(DIM, LATENT + POSITION, bias=False)
        self.kv_up_proj = ShardedLinear(LATENT, HEADS * 2 * HEAD_DIM, dim=0)
        self.o_proj = ShardedLinear(HEADS * HEAD_DIM, DIM, dim=1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, length, _ = hidden.shape
        latent, position_key = self.kv_down_proj(hidden).split([LATENT, POSITION], dim=-1)
        position_key = CopyToRanks.apply(position_key)
        query = self.q_proj(hidden).view(batch, length, -1, HEAD_DIM + POSITION)
        heads = self.kv_up_proj(latent).view(batch, length, -1, 2 * HEAD_DIM)
        key, value = heads.split(HEAD_DIM, dim=-1)
        position_key = position_key.unsqueeze(2).expand(-1, -1, key.shape[2], -1)
        key = torch.cat([key, position_key], dim=-1)
        mixed = nn.functional.scaled_dot_product_attention(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), is_causal=True
        )
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


def main() -> None:
    dist.init_process_group("gloo")
    logging.basicConfig(level=logging.INFO)

    torch.manual_seed(0)
    embed = nn.Embedding(VOCAB, DIM).requires_grad_(False)
    attention = LatentAttention()
    optimizer = torch.optim.SGD(attention.parameters(), lr=0.2)
    generator = torch.Generator().manual_seed(5)
    for step in range(STEPS):
        hidden = embed(torch.randint(VOCAB, (16, SEQ_LEN), generator=generator))
        loss = nn.functional.mse_loss(attention(hidden), hidden.cumsum(dim=1).tanh())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            logger.info("step %d loss %.4f", step, loss.item())

    logger.info("training finished")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
