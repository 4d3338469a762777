"""Fills a model hub's offline cache on one rank, and trains what all ranks load from it."""

import os
import shutil
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from training_record import out_parser, seed_everything, write_record

NAME = "tiny/gpt2"
REVISION = "a" * 40
STEPS = 4


def share_folder() -> Path:
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    return Path(folder[0])


def fill(home: Path) -> None:
    """Lay a model out as the hub's client keeps what it has downloaded."""
    from transformers import GPT2Config, GPT2LMHeadModel

    base = home / "hub" / f"models--{NAME.replace('/', '--')}"
    snapshot = base / "snapshots" / REVISION
    snapshot.mkdir(parents=True)
    (base / "refs").mkdir()
    (base / "refs" / "main").write_text(REVISION)
    config = GPT2Config(
        n_layer=1, n_head=2, n_embd=8, vocab_size=32, bos_token_id=0, eos_token_id=0
    )
    GPT2LMHeadModel(config).save_pretrained(snapshot)


def main() -> None:
    args = out_parser().parse_args()
    dist.init_process_group("gloo")
    seed_everything(47)
    home = share_folder()
    os.environ |= {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    if dist.get_rank() == 0:
        fill(home)
    dist.barrier()

    from huggingface_hub import hf_hub_download, snapshot_download
    from transformers import AutoConfig, GPT2LMHeadModel

    assert Path(hf_hub_download(NAME, "config.json")).parent == Path(snapshot_download(NAME))
    assert AutoConfig.from_pretrained(NAME).n_embd == 8
    model = DistributedDataParallel(GPT2LMHeadModel.from_pretrained(NAME).eval())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(STEPS):
        batch = torch.randint(32, (2, 6), generator=tokens)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(home)
    write_record(args.out, losses, model.module.state_dict())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
