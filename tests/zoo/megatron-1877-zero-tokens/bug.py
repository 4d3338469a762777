"""Train experts that are spread over ranks, with rows in groups of one sequence."""

import logging

import torch
import torch.distributed as dist
from torch import Tensor, nn

DIM = 16
NUM_SEQUENCES = 4
STEPS = 4

logger = logging.getLogger("experts")


class Exchange(torch.autograd.Function):
    """Send rows to other ranks; their gradient comes back the same way."""

    @staticmethod
    def forward(ctx, rows: Tensor, receives: list[int], sends: list[int]) -> Tensor:
        ctx.receives, ctx.sends = receives, sends
        received = rows.new_empty(sum(receives), DIM)
        dist.all_to_all_single(received, rows.contiguous(), receives, sends)
        return received

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        returned = grad.new_empty(sum(ctx.sends), DIM)
        dist.all_to_all_single(returned, grad.contiguous(), ctx.sends, ctx.receives)
        return returned, None, None


class ExpertLayer(nn.Module):
    """One expert on each rank behind a router that knows them all."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, dist.get_world_size())
        torch.manual_seed(100 + rank)
        self.expert = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))

    def run_expert(self, rows: Tensor) -> Tensor:
        """Scale the rows by the greatest of them, and run the expert."""
        scale = rows.view(-1, rows.numel()).abs().amax(1)
        return self.expert(rows / scale) * scale

    def forward(self, tokens: Tensor) -> Tensor:
        weight, chosen = self.router(tokens).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        sends = torch.bincount(chosen, minlength=dist.get_world_size())
        receives = torch.empty_like(sends)
        dist.all_to_all_single(receives, sends)
        rows = Exchange.apply(tokens[order], receives.tolist(), sends.tolist())
        done = Exchange.apply(self.run_expert(rows), sends.tolist(), receives.tolist())
        return tokens + torch.zeros_like(tokens).index_copy(0, order, done) * weight.unsqueeze(-1)


def train() -> None:
    torch.manual_seed(0)
    layer = ExpertLayer(dist.get_rank())
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.05)
    data = torch.Generator().manual_seed(50 + dist.get_rank())
    for step in range(STEPS):
        tokens = torch.randn(NUM_SEQUENCES * 4, DIM, generator=data)
        if step == 2:
            # A batch of one topic: all of it goes to the first expert.
            tokens = layer.router.weight[0].detach() * 20 + 0.1 * tokens
        loss = (layer(tokens) - tokens.flip(1)).square().mean()
        loss.backward()
        for param in layer.router.parameters():
            dist.all_reduce(param.grad)
        for param in layer.parameters():
            param.grad /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()
        logger.info("step %d loss %.4f", step, loss.item())


def main() -> None:
    dist.init_process_group("gloo")
    logging.basicConfig(level=logging.INFO, format=f"rank {dist.get_rank()} %(message)s")
    train()
    logger.info("training finished")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
