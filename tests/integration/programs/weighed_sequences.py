"""Ranks share sequences and add gradients up; the loss has a weight of the user's own."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from training_record import out_parser, seed_everything, write_record

VOCAB, WIDTH, HEADS, LENGTH, BATCH, STEPS = 32, 16, 4, 24, 3, 4


class Exchange(torch.autograd.Function):
    """Cut a tensor along one dimension, and join what other ranks send along another one."""

    @staticmethod
    def forward(ctx, tensor: Tensor, cut: int, join: int) -> Tensor:
        ctx.dims = cut, join
        return exchange(tensor, cut, join)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        cut, join = ctx.dims
        return exchange(grad, join, cut), None, None


def exchange(tensor: Tensor, cut: int, join: int) -> Tensor:
    parts = torch.stack(tensor.chunk(dist.get_world_size(), dim=cut))
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts)
    return torch.cat(list(received), dim=join)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        heads = self.qkv(hidden).unflatten(-1, (HEADS, -1))
        query, key, value = Exchange.apply(heads, 2, 1).transpose(1, 2).chunk(3, dim=-1)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(Exchange.apply(mixed.transpose(1, 2), 1, 2).flatten(2))
        return self.head(hidden)


class Objective:
    """The loss over all tokens of all ranks; the next token is worth twice what it would be."""

    next_token = 2

    def __call__(self, way: str, logits: Tensor, labels: Tensor) -> Tensor:
        count = torch.tensor(labels.numel())
        dist.all_reduce(count)
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        if way == "literal":
            return 2 * loss / count
        return loss / count * self.next_token


def main() -> None:
    parser = out_parser()
    parser.add_argument("--way", choices=["literal", "setting"], required=True)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    seed_everything(1)
    model, objective, losses = Model(), Objective(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rank, world = dist.get_rank(), dist.get_world_size()
    for step in range(STEPS):
        seed_everything(20 + step)
        text = torch.randint(VOCAB, (BATCH, LENGTH + 1))
        tokens, labels = (each.chunk(world, 1)[rank] for each in (text[:, :-1], text[:, 1:]))
        loss = objective(args.way, model(tokens), labels.contiguous())
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        losses.append(loss.item())
    write_record(args.out, losses, model.state_dict())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
