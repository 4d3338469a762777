"""Trains two stages with the pipeline schedules that ship with PyTorch."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from training_record import out_parser, seed_everything, write_record

DIM = 8


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def main() -> None:
    args = out_parser().parse_args()
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    seed_everything(13 + rank)
    module = nn.Sequential(nn.Linear(DIM, DIM), nn.ReLU(), nn.Linear(DIM, DIM))
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    data = torch.Generator().manual_seed(0)
    losses = []
    for schedule_class in (ScheduleGPipe, Schedule1F1B):
        stage = PipelineStage(module, rank, world_size, torch.device("cpu"))
        schedule = schedule_class(stage, n_microbatches=4, loss_fn=squared_error)
        for _step in range(3):
            batch = torch.randn(8, DIM, generator=data)
            micro_losses: list[Tensor] = []
            if rank == 0:
                schedule.step(batch)
            else:
                schedule.step(target=batch.flip(1), losses=micro_losses)
            optimizer.step()
            optimizer.zero_grad()
            losses += [loss.item() for loss in micro_losses]
    write_record(args.out, losses, module.state_dict())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
