"""Fine-tune a mixture of experts, split over the ranks, with adapters that the experts share."""

import logging

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_to_all_single

DIM = 16
HIDDEN = 32
EXPERTS = 4
LORA_RANK = 4
BATCH = 64
STEPS = 8
SEED = 100

logger = logging.getLogger("finetune")


class SharedLoRA(nn.Module):
    """A low-rank update that all experts of all ranks have in common."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.lora_a = nn.Parameter(torch.empty(DIM, LORA_RANK))
        self.lora_b = nn.Parameter(torch.zeros(LORA_RANK, HIDDEN))
        nn.init.kaiming_uniform_(self.lora_a, a=5**0.5, generator=generator)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return 2.0 * tokens @ self.lora_a @ self.lora_b


class Experts(nn.Module):
    """The experts that this rank holds; each takes a fixed number of tokens of every rank."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group
        self.num_local = EXPERTS // group.size()
        generator = torch.Generator().manual_seed(SEED + group.rank())
        up = 0.3 * torch.randn(self.num_local, DIM, HIDDEN, generator=generator)
        down = 0.2 * torch.randn(self.num_local, HIDDEN, DIM, generator=generator)
        self.up, self.down = nn.Parameter(up, False), nn.Parameter(down, False)
        self.adapter = SharedLoRA(generator)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        received = self.exchange(tokens).view(self.group.size(), self.num_local, -1, DIM)
        inputs = received.transpose(0, 1).flatten(1, 2)
        hidden = torch.relu(inputs @ self.up + self.adapter(inputs))
        outputs = (hidden @ self.down).view(self.num_local, self.group.size(), -1, DIM)
        return self.exchange(outputs.transpose(0, 1).reshape(tokens.shape))

    def exchange(self, tokens: torch.Tensor) -> torch.Tensor:
        return all_to_all_single(torch.empty_like(tokens), tokens.contiguous(), group=self.group)


class Layer(nn.Module):
    """Route tokens to experts, an equal share to each, and read a number off the result."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(SEED)
        self.router = nn.Parameter(torch.randn(DIM, generator=generator), False)
        self.out = nn.Parameter(0.2 * torch.randn(DIM, generator=generator), False)
        self.experts = Experts(group)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        order = torch.argsort(tokens @ self.router)
        mixed = self.experts(tokens[order])
        return (tokens + torch.zeros_like(tokens).index_copy(0, order, mixed)) @ self.out


def average_gradients(params: list[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Average the gradients of what the ranks have in common."""
    for param in params:
        dist.all_reduce(param.grad, group=group)
        param.grad /= group.size()


def read_batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    tokens = torch.randn(BATCH, DIM, generator=generator)
    return tokens, tokens[:, :4].square().sum(dim=1) - 4


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING)
    expert_group = dist.new_group(list(range(dist.get_world_size())))

    model = Layer(expert_group)
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=1e-2)
    for step in range(STEPS):
        tokens, targets = read_batch(rank, step)
        loss = nn.functional.mse_loss(model(tokens), targets)
        loss.backward()
        average_gradients(params, expert_group)
        optimizer.step()
        optimizer.zero_grad()
        logger.info("step %d loss %.4f", step, loss.item())

    if rank == 0:
        torch.save(model.experts.adapter.state_dict(), "adapter.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
