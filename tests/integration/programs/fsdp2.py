"""Trains a small transformer under FSDP2 with clipping, evaluation and a distributed checkpoint."""

import shutil
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from training_record import out_parser, seed_everything, write_record

VOCAB = 64


class Decoder(nn.Module):
    """A stack of transformer layers over token embeddings."""

    def __init__(self, dim: int = 32, num_layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, 4, 2 * dim, dropout=0.1, batch_first=True)
            for _ in range(num_layers)
        )
        self.head = nn.Linear(dim, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def next_token_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1]).float()
    return nn.functional.cross_entropy(logits.reshape(-1, VOCAB), tokens[:, 1:].reshape(-1))


@torch.no_grad()
def evaluate(model: nn.Module, num_batches: int) -> float:
    model.eval()
    data = torch.Generator().manual_seed(99 + dist.get_rank())
    total = torch.zeros(())
    for _ in range(num_batches):
        total += next_token_loss(model, torch.randint(0, VOCAB, (4, 9), generator=data))
    dist.all_reduce(total)
    model.train()
    return total.item() / num_batches / dist.get_world_size()


def save_and_load(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder[0])
    dcp.load({"model": weights, "optimizer": states}, checkpoint_id=folder[0])
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(Path(folder[0]))


def main() -> None:
    args = out_parser().parse_args()
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
    seed_everything(3)
    model = Decoder()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    seed_everything(20 + dist.get_rank())
    losses = []
    for step in range(6):
        for micro in range(2):
            model.set_requires_gradient_sync(micro == 1)
            loss = next_token_loss(model, torch.randint(0, VOCAB, (4, 9)))
            (loss / 2).backward()
            losses.append(loss.item())
        grad_norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        losses.append(grad_norm.full_tensor().item())
        optimizer.step()
        optimizer.zero_grad()
        if step % 3 == 2:
            losses.append(evaluate(model, num_batches=2))
            save_and_load(model, optimizer)
            if dist.get_rank() == 0:
                print(f"step {step} validation loss {losses[-1]:.4f}")
    write_record(args.out, losses, model.state_dict())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
