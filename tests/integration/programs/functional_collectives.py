"""Uses functional collectives, eagerly and in a compiled function, and ops of mixed dtypes."""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from training_record import out_parser, seed_everything, write_record


def normalised(batch: Tensor) -> Tensor:
    """Divide by the mean of the whole batch over all ranks."""
    total = funcol.all_reduce(batch.sum(0), "sum", dist.group.WORLD)
    return batch - total / (batch.shape[0] * 2)


def main() -> None:
    parser = out_parser()
    parser.add_argument("--backend", default="aot_eager")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    seed_everything(103)
    model = nn.Linear(4, 1)
    compiled = torch.compile(normalised, backend=args.backend)
    seed_everything(104 + dist.get_rank())
    losses = []
    for step in range(4):
        batch = torch.randn(8, 4)
        inputs = compiled(batch) if step % 2 else normalised(batch)
        loss = (model(inputs) - batch.sum(1, keepdim=True)).square().mean()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                mean = funcol.all_reduce(parameter.grad, "sum", dist.group.WORLD) / 2
                parameter -= 0.1 * mean
                parameter.grad = None
        gathered = funcol.all_gather_tensor(loss.detach().reshape(1), 0, dist.group.WORLD)
        losses += [loss.item(), gathered.sum().item()]
        for dtype in (torch.int64, torch.float64, torch.bfloat16, torch.uint8):
            counts = torch.arange(4).to(dtype)
            dist.all_reduce(counts, op=dist.ReduceOp.MAX)
            losses.append(counts.float().sum().item())
    write_record(args.out, losses, model.state_dict())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
