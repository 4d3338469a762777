"""Reduces metrics in a background thread on a group of its own while the main thread trains."""

import queue
import threading

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from training_record import out_parser, seed_everything, write_record


class MetricThread(threading.Thread):
    """Sums queued values over all ranks in the order in which they were put."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(name="metrics")
        self.group = group
        self.inbox: queue.Queue[Tensor | None] = queue.Queue()
        self.sums: list[float] = []

    def run(self) -> None:
        while (value := self.inbox.get()) is not None:
            dist.all_reduce(value, group=self.group)
            self.sums.append(value.item())


def main() -> None:
    args = out_parser().parse_args()
    dist.init_process_group("gloo")
    metrics = MetricThread(dist.new_group(group_desc="metrics"))
    metrics.start()
    seed_everything(97)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = torch.Generator().manual_seed(dist.get_rank())
    for _step in range(20):
        inputs = torch.randn(8, 8, generator=data)
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        metrics.inbox.put(loss.detach().clone())
    metrics.inbox.put(None)
    metrics.join()
    write_record(args.out, metrics.sums, model.state_dict())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
