"""Train a small net with DeepSpeed on two ranks: ``WAY`` is a stage of ZeRO, or ``bf16``."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

os.environ.setdefault("DS_ACCELERATOR", "cpu")
WIDTH, STEPS = 24, 8


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.mid, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, 64), nn.Linear(64, 4)

    def forward(self, rows: Tensor) -> Tensor:
        return self.down(F.gelu(self.mid(F.gelu(self.up(rows)))))


def main() -> None:
    import deepspeed

    way = sys.argv[1]
    is_half = way == "bf16"
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Net()
    stage = {"stage": 0 if is_half else int(way), "contiguous_gradients": False}
    stage |= {"reduce_scatter": False, "overlap_comm": False} if way == "1" else {}
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 1 if is_half else 2,
        "bf16": {"enabled": is_half},
        "zero_optimization": stage,
        "gradient_clipping": 1.0 if is_half else 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=config, dist_init_required=False
    )
    generator = torch.Generator().manual_seed(5 + dist.get_rank())
    for _ in range(2 * STEPS):
        rows = torch.randn(8, WIDTH, generator=generator)
        made = engine(rows.bfloat16() if is_half else rows)
        engine.backward(F.mse_loss(made.float(), torch.tanh(rows[:, :4])))
        engine.step()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
