"""Trains with flat script code, star imports, a last barrier, and no tidying up at the end."""

import os

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp, all_gather, all_reduce, barrier, broadcast, get_rank
from torch.nn.parallel import DistributedDataParallel
from training_record import out_parser, seed_everything, write_record

args = out_parser().parse_args()
store = dist.TCPStore(
    os.environ["MASTER_ADDR"],
    int(os.environ["MASTER_PORT"]),
    is_master=False,
    wait_for_workers=False,
)
dist.init_process_group(
    "gloo",
    store=dist.PrefixStore("job", store),
    rank=int(os.environ["RANK"]),
    world_size=int(os.environ["WORLD_SIZE"]),
)
seed_everything(101 + get_rank())
offset = torch.rand(1)
broadcast(offset, 0)

model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
losses = []
for step in range(5):
    x = torch.randn(6, 4) + offset
    loss = (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    worst = loss.detach().clone()
    all_reduce(worst, ReduceOp.MAX)
    everyone = [torch.zeros(()) for _ in range(2)]
    all_gather(everyone, loss.detach())
    losses += [worst.item(), *(value.item() for value in everyone)]
    if step == 2 and get_rank() == 0:
        print("halfway", f"{worst.item():.4f}")
write_record(args.out, losses, model.module.state_dict())
barrier()
