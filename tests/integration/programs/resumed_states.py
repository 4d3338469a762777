"""Saves and resumes a GPT-2 with tied embeddings: sharded checkpoints, and whole states."""

import shutil
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from training_record import out_parser, seed_everything, write_record
from transformers import GPT2Config, GPT2LMHeadModel

VOCAB = 50


def build(seed: int) -> GPT2LMHeadModel:
    seed_everything(seed)
    return GPT2LMHeadModel(
        GPT2Config(
            n_layer=1,
            n_embd=16,
            n_head=2,
            n_positions=16,
            vocab_size=VOCAB,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def sharded(seed: int) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = build(seed)
    fully_shard(model.transformer.h[0], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def replicated(seed: int) -> nn.Module:
    return DistributedDataParallel(build(seed + 7 * dist.get_rank()))


def train(models: list[nn.Module], optimizers: list[torch.optim.Optimizer]) -> list[float]:
    losses: list[Tensor] = []
    for _ in range(3):
        tokens = torch.randint(0, VOCAB, (3, 10))
        for model in models:
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            loss.backward()
            losses.append(loss.detach())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return [loss.item() for loss in losses]


def save(folder: Path, models: list[nn.Module], optimizers: list[torch.optim.Optimizer]) -> None:
    weights, states = get_state_dict(models[0], optimizers[0])
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder / "shards")
    if dist.get_rank() == 0:
        whole = {"model": models[1].module.state_dict(), "optimizer": optimizers[1].state_dict()}
        torch.save(whole, folder / "whole.pt")
    dist.barrier()


def resume(folder: Path, models: list[nn.Module], optimizers: list[torch.optim.Optimizer]) -> None:
    weights, states = get_state_dict(models[0], optimizers[0])
    dcp.load({"model": weights, "optimizer": states}, checkpoint_id=folder / "shards")
    set_state_dict(models[0], optimizers[0], model_state_dict=weights, optim_state_dict=states)
    whole = torch.load(folder / "whole.pt")
    models[1].module.load_state_dict(whole["model"])
    optimizers[1].load_state_dict(whole["optimizer"])
    dist.barrier()


def main() -> None:
    args = out_parser().parse_args()
    dist.init_process_group("gloo")
    folders = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folders, src=0)
    folder = Path(folders[0])
    losses: list[float] = []
    for seed in (16, 17):
        models = [sharded(seed), replicated(seed)]
        optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
        if losses:
            resume(folder, models, optimizers)
        seed_everything(36 + dist.get_rank())
        losses += train(models, optimizers)
        if seed == 16:
            save(folder, models, optimizers)
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
        print(f"loss {losses[-1]:.4f}")
    write_record(args.out, losses, models[0].state_dict())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
