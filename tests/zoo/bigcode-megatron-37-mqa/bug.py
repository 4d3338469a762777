"""Train a multi-query attention model with its heads spread over the tensor-parallel ranks."""

import logging

import torch
import torch.distributed as dist
from torch import nn

VOCAB = 48
DIM = 32
HEAD_DIM = 8
SEQ_LEN = 12
STEPS = 10

logger = logging.getLogger("multi_query")


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


def shard_of(full: torch.Tensor, dim: int) -> nn.Parameter:
    """Keep this rank's part of a weight that all ranks drew alike."""
    part = nn.Parameter(full.chunk(dist.get_world_size(), dim)[dist.get_rank()].clone())
    part.tensor_model_parallel = True
    return part


class MultiQueryAttention(nn.Module):
    """Queries of this rank's heads, and one key and value for the heads of all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.query_weight = shard_of(torch.randn(DIM, DIM) * DIM**-0.5, dim=0)
        self.key_value = nn.Linear(DIM, 2 * HEAD_DIM)
        self.out_weight = shard_of(torch.randn(DIM, DIM) * DIM**-0.5, dim=1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, length, _ = hidden.shape
        query = nn.functional.linear(CopyToRanks.apply(hidden), self.query_weight)
        query = query.view(batch, length, -1, HEAD_DIM).transpose(1, 2)
        key_value = self.key_value(hidden)
        key, value = key_value.unsqueeze(1).expand(-1, query.shape[1], -1, -1).chunk(2, dim=-1)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed = mixed.transpose(1, 2).flatten(2)
        return SumOverRanks.apply(nn.functional.linear(mixed, self.out_weight))


class LanguageModel(nn.Module):
    """Embed the tokens, attend once, predict the next tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.norm = nn.LayerNorm(DIM)
        self.attention = MultiQueryAttention()
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        hidden = hidden + self.attention(self.norm(hidden))
        return self.head(hidden)


def main() -> None:
    dist.init_process_group("gloo")
    logging.basicConfig(level=logging.INFO)

    torch.manual_seed(0)
    model = LanguageModel()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    generator = torch.Generator().manual_seed(7)
    for step in range(STEPS):
        tokens = torch.randint(VOCAB, (8, SEQ_LEN + 1), generator=generator)
        tokens[:, 1::2] = tokens[:, :-1:2]
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            logger.info("step %d loss %.4f", step, loss.item())

    logger.info("training finished")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
