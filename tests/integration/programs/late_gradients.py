"""Trains parts whose gradients are zero or missing at times, each with an optimizer of its own."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from training_record import out_parser, seed_everything, write_record

DIM, VOCAB = 8, 20


class Model(nn.Module):
    """Embedding, trunk and a head that begins with zeros, so that nothing reaches the trunk yet."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM, sparse=True)
        self.trunk = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh())
        self.head = nn.Linear(DIM, VOCAB)
        self.auxiliary = nn.Linear(DIM, 1)
        nn.init.zeros_(self.head.weight)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.trunk(self.embed(tokens))
        return self.head(hidden), self.auxiliary(hidden.detach())


def optimizers_of(model: Model) -> list[torch.optim.Optimizer]:
    return [
        torch.optim.SparseAdam(model.embed.parameters(), lr=1e-2),
        torch.optim.AdamW(model.trunk.parameters(), lr=1e-2, weight_decay=0.1),
        torch.optim.Adam(model.head.parameters(), lr=1e-2),
        torch.optim.Adam(model.auxiliary.parameters(), lr=1e-2),
    ]


def main() -> None:
    args = out_parser().parse_args()
    dist.init_process_group("gloo")
    seed_everything(61)
    model = DistributedDataParallel(Model())
    optimizers = optimizers_of(model.module)
    seed_everything(62 + dist.get_rank())
    losses = []
    for step in range(6):
        tokens = torch.randint(0, VOCAB, (4, 6))
        logits, value = model(tokens)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        # The auxiliary loss fades in.
        weight = min(step / 4, 1.0)
        (loss + weight * (value - 1).square().mean()).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    if dist.get_rank() == 0:
        print(f"loss {losses[-1]:.4f}")
    write_record(args.out, losses, model.module.state_dict())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
