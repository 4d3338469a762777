"""Routes tokens to experts on other ranks; counts are exchanged first and differ every step."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from training_record import out_parser, seed_everything, write_record

DIM = 8


class Exchange(torch.autograd.Function):
    """All-to-all of rows whose gradient travels the way back."""

    @staticmethod
    def forward(ctx, rows: Tensor, receives: list[int], sends: list[int]) -> Tensor:
        ctx.receives, ctx.sends = receives, sends
        received = rows.new_empty(sum(receives), rows.shape[1])
        dist.all_to_all_single(received, rows.contiguous(), receives, sends)
        return received

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        returned = grad.new_empty(sum(ctx.sends), grad.shape[1])
        dist.all_to_all_single(returned, grad.contiguous(), ctx.sends, ctx.receives)
        return returned, None, None


def exchange_counts(sends: list[int]) -> list[int]:
    received = torch.empty(len(sends), dtype=torch.long)
    dist.all_to_all_single(received, torch.tensor(sends))
    return received.tolist()


class ExpertLayer(nn.Module):
    """One expert per rank behind a replicated router."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, dist.get_world_size())
        self.expert = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.ReLU(), nn.Linear(2 * DIM, DIM))

    def forward(self, tokens: Tensor) -> Tensor:
        scores = self.router(tokens).softmax(-1)
        weight, choice = scores.max(-1)
        order = choice.argsort(stable=True)
        sends = torch.bincount(choice, minlength=dist.get_world_size()).tolist()
        receives = exchange_counts(sends)
        processed = self.expert(Exchange.apply(tokens[order], receives, sends))
        returned = Exchange.apply(processed, sends, receives)
        combined = torch.empty_like(returned)
        combined[order] = returned
        return tokens + weight.unsqueeze(-1) * combined


def main() -> None:
    args = out_parser().parse_args()
    dist.init_process_group("gloo")
    seed_everything(53)
    router_state = nn.Linear(DIM, dist.get_world_size()).state_dict()
    seed_everything(80 + dist.get_rank())
    layer = ExpertLayer()
    layer.router.load_state_dict(router_state)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.05)
    losses = []
    for step in range(8):
        # On one step a rank has no token for one of the experts, on another few tokens at all.
        tokens = torch.randn(3 + 5 * ((step + dist.get_rank()) % 3), DIM)
        loss = (layer(tokens) - tokens.flip(1)).square().mean()
        loss.backward()
        for parameter in layer.router.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    write_record(args.out, losses, layer.state_dict())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
