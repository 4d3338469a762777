"""Loads that leave something out on purpose: a new head, an adapter, parts, an average, a retry."""

import copy
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from training_record import out_parser, seed_everything, write_record


def build(seed: int) -> nn.Sequential:
    seed_everything(seed)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)), nn.Linear(8, 2))


def train(model: nn.Module, losses: list[float]) -> None:
    wrapped = DistributedDataParallel(model)
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        loss = wrapped(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())


def without(state: Mapping[str, Tensor], *prefixes: str) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if not name.startswith(prefixes)}


def loaded(source: nn.Sequential) -> list[nn.Module]:
    """Models that each got what they need of another one."""
    state = source.state_dict()
    headless = build(1)
    headless.load_state_dict(without(state, "4."), strict=False)

    parts = build(2)  # each part by itself, one by hand
    parts.load_state_dict(without(state, "1.", "2."), strict=False)
    parts[1].load_state_dict(source[1].state_dict())
    with torch.no_grad():
        for name, parameter in parts[2].named_parameters():
            parameter.copy_(state[f"2.{name}"])

    adapted = build(0).requires_grad_(requires_grad=False)  # only what is trained was saved
    adapted[4].requires_grad_(requires_grad=True)
    adapted.load_state_dict({n: v for n, v in state.items() if n.startswith("4.")}, strict=False)

    retried = build(3)
    saved = {f"module.{name}": value for name, value in state.items()}
    try:
        retried.load_state_dict(saved)
    except RuntimeError:
        retried.load_state_dict({n.removeprefix("module."): v for n, v in saved.items()})
    average = copy.deepcopy(retried)
    average.load_state_dict(retried.state_dict())
    return [headless, parts, adapted, retried, average]


def resumed(source: nn.Module, folder: str) -> nn.Module:
    """Return a model that a distributed checkpoint gave its weights, by way of a copy."""
    rank = dist.get_rank()
    checkpoint = str(Path(folder, "step-2"))
    state = source.state_dict()
    given = {"model": state, "progress": {"step": 2}, f"loader_{rank}": {"position": 10 + rank}}
    dcp.save(given, checkpoint_id=checkpoint)
    model = build(4)
    copied = {name: value.clone() for name, value in model.state_dict().items()}
    found = {"model": copied, "progress": {"step": 0}, f"loader_{rank}": {"position": 0}}
    dcp.load(found, checkpoint_id=checkpoint)
    model.load_state_dict(copied)
    return model


def main() -> None:
    args = out_parser().parse_args()
    dist.init_process_group("gloo")
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    losses: list[float] = []
    source = build(0)
    models = [*loaded(source), resumed(source, folder[0])]
    for model in models:
        train(model, losses)
    write_record(args.out, losses, models[-1].state_dict())
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
