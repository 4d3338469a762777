"""Trains under the first FSDP with a wrapping policy and a full state dict on rank 0."""

import functools

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from training_record import out_parser, seed_everything, write_record


def main() -> None:
    args = out_parser().parse_args()
    dist.init_process_group("gloo")
    seed_everything(61)
    layers = [layer for _ in range(3) for layer in (nn.Linear(16, 16), nn.ReLU())]
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=200)
    model = FullyShardedDataParallel(
        nn.Sequential(*layers, nn.Linear(16, 1)),
        auto_wrap_policy=policy,
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for step in range(6):
        inputs = torch.randn(8, 16, generator=data)
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        loss.backward()
        losses += [loss.item(), model.clip_grad_norm_(1.0).item()]
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss.item():.4f}")
    full = FullStateDictConfig(rank0_only=False)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, full):
        weights = model.state_dict()
    write_record(args.out, losses, weights)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
