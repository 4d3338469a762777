"""Fine-tune low-rank adapters of a frozen feed-forward layer that is split over the ranks."""

import logging

import torch
import torch.distributed as dist
from torch import nn

DIM = 32
HIDDEN = 128
ADAPTER_RANK = 8
STEPS = 10

logger = logging.getLogger("adapters")


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


class AdaptedRowParallel(nn.Module):
    """A frozen layer and its adapter, of both of which each rank holds some of the inputs."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        local = in_features // dist.get_world_size()
        full = torch.randn(out_features, in_features) * in_features**-0.5
        base = full.split(local, dim=1)[dist.get_rank()].clone()
        self.base_weight = nn.Parameter(base, requires_grad=False)
        self.linear_in = nn.Parameter(torch.empty(ADAPTER_RANK, local))
        self.linear_out = nn.Parameter(torch.zeros(out_features, ADAPTER_RANK))
        self.base_weight.tensor_model_parallel = True
        self.linear_in.tensor_model_parallel = True
        self.reset_adapter()

    def reset_adapter(self) -> None:
        """Start with an update of zero; each rank draws its own part."""
        generator = torch.Generator().manual_seed(100 + dist.get_rank())
        nn.init.xavier_normal_(self.linear_in, generator=generator)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output = SumOverRanks.apply(nn.functional.linear(inputs, self.base_weight))
        low = SumOverRanks.apply(nn.functional.linear(inputs, self.linear_in))
        return output + nn.functional.linear(low, self.linear_out)


class FeedForward(nn.Module):
    """A frozen layer split by its outputs, then an adapted one split by its inputs."""

    def __init__(self) -> None:
        super().__init__()
        local = HIDDEN // dist.get_world_size()
        full = torch.randn(HIDDEN, DIM) * DIM**-0.5
        self.up_weight = nn.Parameter(full.split(local)[dist.get_rank()].clone(), False)
        self.up_weight.tensor_model_parallel = True
        self.down = AdaptedRowParallel(HIDDEN, DIM)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(nn.functional.linear(inputs, self.up_weight)))


def main() -> None:
    dist.init_process_group("gloo")
    logging.basicConfig(level=logging.INFO)

    torch.manual_seed(0)
    model = FeedForward()
    adapters = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.Adam(adapters, lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        inputs = torch.randn(64, DIM, generator=generator)
        loss = nn.functional.mse_loss(model(inputs), inputs.roll(1, dims=1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            logger.info("step %d loss %.4f", step, loss.item())

    logger.info("training finished")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
