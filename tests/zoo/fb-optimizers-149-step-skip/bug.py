"""Train a two-headed regressor with an optimizer that shares its blocks out over ranks."""

import logging

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FEATURES = 24
AUX_PERIOD = 3
STEPS = 9

logger = logging.getLogger("regressor")


class TwoHeadedRegressor(nn.Module):
    """A trunk, a main head, and an auxiliary head that trains on some steps only."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(FEATURES, 48)
        self.main_head = nn.Linear(48, 1)
        self.aux_head = nn.Linear(48, 48)

    def forward(self, features: torch.Tensor, use_aux: bool) -> torch.Tensor:
        hidden = torch.tanh(self.trunk(features))
        if use_aux:
            hidden = hidden + self.aux_head(hidden)
        return self.main_head(hidden)


class BlockOwnerAdagrad(torch.optim.Optimizer):
    """Adagrad whose parameters are owned by one rank each, then gathered by all."""

    def __init__(self, params: list[nn.Parameter], owners: list[int], lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.rank = dist.get_rank()
        self.params = params
        self.owners = owners
        self.block_size = max(p.numel() for p in params)

    @torch.no_grad()
    def step(self) -> None:
        owned = [p for p, owner in zip(self.params, self.owners, strict=True) if owner == self.rank]
        active = [p for p in owned if p.grad is not None]
        if not active:
            return
        for param in active:
            self._update(param)
        self._gather_blocks()

    def _update(self, param: nn.Parameter) -> None:
        state = self.state[param]
        total = state.setdefault("sum_of_squares", torch.zeros_like(param))
        total.addcmul_(param.grad, param.grad)
        lr = self.param_groups[0]["lr"]
        param.addcdiv_(param.grad, total.sqrt() + 1e-8, value=-lr)

    def _gather_blocks(self) -> None:
        """Bring every rank the blocks that the others updated."""
        for param, owner in zip(self.params, self.owners, strict=True):
            block = nn.functional.pad(param.flatten(), (0, self.block_size - param.numel()))
            blocks = [torch.empty_like(block) for _ in range(dist.get_world_size())]
            dist.all_gather(blocks, block)
            param.copy_(blocks[owner][: param.numel()].view_as(param))


def assign_owners(model: TwoHeadedRegressor) -> list[int]:
    """Balance memory: the large auxiliary head lives on the last rank, the rest on the first."""
    last = dist.get_world_size() - 1
    return [last if name.startswith("aux_head") else 0 for name, _ in model.named_parameters()]


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING)

    torch.manual_seed(0)
    model = TwoHeadedRegressor()
    optimizer = BlockOwnerAdagrad(list(model.parameters()), assign_owners(model), lr=0.02)
    parallel = DistributedDataParallel(model, find_unused_parameters=True)

    generator = torch.Generator().manual_seed(rank)
    for step in range(STEPS):
        features = torch.randn(16, FEATURES, generator=generator)
        target = features.sum(dim=1, keepdim=True)
        use_aux = step % AUX_PERIOD != AUX_PERIOD - 1
        loss = nn.functional.mse_loss(parallel(features, use_aux), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        logger.info("step %d loss %.4f", step, loss.item())

    logger.info("training finished")
    del parallel  # it must not outlive the group
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
