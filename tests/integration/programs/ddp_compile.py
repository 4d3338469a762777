"""Trains a compiled model under DDP; `--backend` chooses the compiler."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training_record import out_parser, seed_everything, write_record

# Wide enough for more than one bucket of gradients, which splits the compiled graph.
VOCAB, DIM = 50, 384


def build_model() -> nn.Module:
    block = [layer for _ in range(3) for layer in (nn.Linear(DIM, DIM), nn.GELU())]
    return nn.Sequential(nn.Embedding(VOCAB, DIM), *block, nn.Linear(DIM, VOCAB))


def main() -> None:
    parser = out_parser()
    parser.add_argument("--backend", default="inductor")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    seed_everything(5)
    wrapped = DistributedDataParallel(build_model(), bucket_cap_mb=1)
    model = torch.compile(wrapped, backend=args.backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for step in range(6):
        tokens = torch.randint(0, VOCAB, (4, 9), generator=data)
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.reshape(-1, VOCAB), tokens[:, 1:].reshape(-1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        summed_loss = loss.detach().clone()
        dist.all_reduce(summed_loss)
        losses.append(summed_loss.item())
        if dist.get_rank() == 0 and step % 2 == 0:
            print(f"step {step} loss {losses[-1]:.4f}")
    write_record(args.out, losses, wrapped.module.state_dict())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
