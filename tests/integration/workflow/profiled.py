"""Train two steps under torch's profiler, with a pause around the collective of its own."""

import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function

PAUSE_S = 0.3

dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with profile(activities=[ProfilerActivity.CPU]) as profiler:
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with record_function("sum over all ranks"):
        time.sleep(PAUSE_S)
        dist.all_reduce(torch.ones(1))
        time.sleep(PAUSE_S)
profiler.export_chrome_trace(f"profile-{rank}.json" + (".gz" if rank else ""))
dist.destroy_process_group()
