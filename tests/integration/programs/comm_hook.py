"""Trains under DDP with a compressing hook, static graph and recomputed activations."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from training_record import out_parser, seed_everything, write_record


class Recomputed(nn.Module):
    """Blocks whose activations are computed again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(16, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False)
        return self.head(hidden)


def train(hook_name: str) -> tuple[list[float], nn.Module]:
    seed_everything(89)
    model = DistributedDataParallel(
        Recomputed(), static_graph=hook_name == "fp16", gradient_as_bucket_view=True
    )
    if hook_name == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    else:
        state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=1)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _step in range(5):
        inputs = torch.randn(8, 16, generator=data)
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.module


def main() -> None:
    args = out_parser().parse_args()
    dist.init_process_group("gloo")
    losses, weights = [], {}
    for hook_name in ("fp16", "power-sgd"):
        more_losses, module = train(hook_name)
        losses += more_losses
        weights |= {f"{hook_name}.{name}": w for name, w in module.state_dict().items()}
    write_record(args.out, losses, weights)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
