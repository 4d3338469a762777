"""A correct training whose own modes, hooks and checks write down all that they see of it.

What they see is the same with and without distdiag. ``--way eager`` has modes around whole steps,
``--way traced`` has regions of a step that are transformed, faked or compiled.
"""

import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from operation_log import LoggedFunctions, LoggedOperations
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torch.utils.flop_counter import FlopCounterMode
from training_record import out_parser, seed_everything, write_record

DIM = 16
NUM_EXPERTS = 4
KEPT = [torch.ops.aten.mm.default, torch.ops.aten.topk.default]


def policy(_: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in KEPT else CheckpointPolicy.PREFER_RECOMPUTE


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(NUM_EXPERTS, DIM) * 0.1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = F.linear(x, self.weight).softmax(-1)
        weights, chosen = scores.topk(2, dim=-1)
        return weights, chosen


class Swap(torch.autograd.Function):
    """Rows go to the other ranks and theirs come here."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        out = torch.empty_like(rows)
        splits = [len(rows) // dist.get_world_size()] * dist.get_world_size()
        dist.all_to_all_single(out, rows.contiguous(), splits, splits)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return Swap.apply(grad)


class Experts(nn.Module):
    """One expert on each rank; half of the tokens of each rank goes to each."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Router()
        self.expert = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens)
        order = chosen[:, 0].argsort(stable=True)
        back = Swap.apply(self.expert(Swap.apply(tokens[order]))) * weights.flatten()[order, None]
        return torch.zeros_like(tokens).index_add(0, order, back.to(tokens.dtype)).view_as(x)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(DIM, 3 * DIM)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, DIM // 2)).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return found.transpose(1, 2).flatten(2)


class Model(nn.Module):
    def __init__(self, contexts: Any = None) -> None:
        super().__init__()
        self.contexts = contexts
        self.embed = nn.Embedding(64, DIM)
        self.attention = Attention()
        self.blocks = nn.ModuleList(Experts() for _ in range(2))
        self.norm = nn.BatchNorm1d(DIM)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(DIM, 64)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.attention(x)
        for index, block in enumerate(self.blocks):
            if self.contexts is None:
                x = x + block(x)
            else:
                x = x + checkpoint(
                    block, x, use_reentrant=False, context_fn=self.contexts[index % 2]
                )
        return self.head(self.drop(self.norm(x.transpose(1, 2)).transpose(1, 2)))


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())


class Seen:
    """What each mode has seen, step by step."""

    def __init__(self) -> None:
        self.by_name: dict[str, list[Any]] = {}
        self.losses: list[float] = []

    def add(self, name: str, what: Any) -> None:
        self.by_name.setdefault(name, []).append(what)


@contextmanager
def offloading(seen: Seen) -> Iterator[None]:
    """Move saved tensors, as `save_on_cpu` does, and write down which."""
    packed: list[Any] = []

    def pack(tensor: Tensor) -> tuple[torch.device, Tensor]:
        packed.append(["pack", list(tensor.shape)])
        return tensor.device, tensor.detach().clone()

    def unpack(kept: tuple[torch.device, Tensor]) -> Tensor:
        packed.append(["unpack", list(kept[1].shape)])
        return kept[1].to(kept[0])

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
    seen.add("saved tensors", packed)


@contextmanager
def all_modes(seen: Seen) -> Iterator[None]:
    operations, functions = LoggedOperations(), LoggedFunctions()
    flops = FlopCounterMode(display=False)
    with ExitStack() as stack:
        profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
        stack.enter_context(profiler)
        stack.enter_context(torch.autograd.detect_anomaly(check_nan=True))
        stack.enter_context(torch.autocast("cpu", torch.bfloat16))
        for mode in (functions, flops, operations):
            stack.enter_context(mode)
        yield
    seen.add("operations", operations.seen)
    seen.add("functions", functions.seen)
    seen.add("flops", flops.get_total_flops())
    names = Counter(event.name for event in profiler.events())
    seen.add("profiled", dict(sorted(names.items())))


def train(model: nn.Module, step: Any, seen: Seen) -> None:
    ids = torch.randint(0, 64, (64, 9), generator=torch.Generator().manual_seed(1))
    data = TensorDataset(ids)
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, seed=3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for number, (batch,) in enumerate(loader):
        if number == 4:
            break
        step(model, optimizer, batch, seen)
        schedule.step()
    with tempfile.TemporaryDirectory() as folder, LoggedOperations() as operations:
        torch.save(model.state_dict(), Path(folder, "model.pt"))
        model.load_state_dict(torch.load(Path(folder, "model.pt")))
    seen.add("saving", operations.seen)


# Modes around whole steps


def eager_step(model: nn.Module, optimizer: Any, batch: Tensor, seen: Seen) -> None:
    torch.use_deterministic_algorithms(True)
    with all_modes(seen):
        optimizer.zero_grad()
        # Some hooks refuse to be where a checkpoint has its own.
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
    torch.use_deterministic_algorithms(False)
    seen.losses.append(loss.item())


def hooked_step(model: nn.Module, optimizer: Any, batch: Tensor, seen: Seen) -> None:
    operations = LoggedOperations()
    with operations, offloading(seen):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    seen.add("offloaded operations", operations.seen)


def eager(seen: Seen) -> nn.Module:
    contexts = [
        partial(create_selective_checkpoint_contexts, policy),
        partial(create_selective_checkpoint_contexts, KEPT),
    ]
    train(DistributedDataParallel(Model(contexts)), eager_step, seen)
    with LoggedOperations() as operations, LoggedFunctions() as functions:
        other = DistributedDataParallel(Model())
    seen.add("making", [operations.seen, functions.seen])
    train(other, hooked_step, seen)
    return other


# Regions of a step that are transformed, faked or compiled


class Compiler:
    """A backend that counts graphs and runs them as they are."""

    def __init__(self, seen: Seen) -> None:
        self.seen = seen

    def __call__(self, graph: torch.fx.GraphModule, _: Any) -> Any:
        self.seen.add("graphs", [str(node.target) for node in graph.graph.nodes])
        return graph.forward


def make_traced(seen: Seen) -> Any:
    small = nn.ModuleDict({"gate": Router(), "out": nn.Linear(DIM, DIM)})

    def through(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        picked = torch.func.functional_call(small.gate, weights, (x,))[0]
        return (small.out(x) * picked.sum(-1, keepdim=True)).square().mean()

    @partial(torch.compile, backend=Compiler(seen))
    def compiled(x: Tensor) -> Tensor:
        best = x.topk(2, -1).values.sum(-1, keepdim=True)
        return F.scaled_dot_product_attention(x, x, x) + best.sin()

    def step(model: nn.Module, optimizer: Any, batch: Tensor, seen: Seen) -> None:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        x = torch.linspace(0, 1, 4 * 8 * DIM).view(4, 8, DIM)
        weights = {name: each.detach() for name, each in small.gate.named_parameters()}
        with LoggedOperations() as operations, LoggedFunctions() as functions:
            grads = torch.func.grad(through)(weights, x[0])
            each = torch.vmap(torch.func.grad(through), in_dims=(None, 0))(weights, x)
            graph = make_fx(through)(weights, x[0])
            with torch.inference_mode():
                small.gate(x[0])
        seen.add("transformed", [operations.seen, functions.seen])
        seen.add("graph", [str(node.target) for node in graph.graph.nodes])
        seen.add("gradients", [float(t.sum()).hex() for t in (*grads.values(), *each.values())])
        with FakeTensorMode(allow_non_fake_inputs=True), LoggedOperations() as operations:
            faked = nn.ModuleDict({"gate": Router(), "attention": Attention()}).train()
            given = torch.ones(2, 4, DIM)
            found = faked.attention(given) + faked.gate(given)[0].sum(-1, keepdim=True)
            found.square().mean().backward()
        seen.add("faked", operations.seen)
        (loss + compiled(x).mean() * 0).backward()
        optimizer.step()
        seen.losses.append(loss.item())

    return step


def traced(seen: Seen) -> nn.Module:
    step = make_traced(seen)
    model = DistributedDataParallel(Model())
    train(model, step, seen)
    return model


def main() -> None:
    parser = out_parser()
    parser.add_argument("--way", choices=("eager", "traced"), required=True)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    seed_everything(dist.get_rank())
    seen = Seen()
    model = {"eager": eager, "traced": traced}[args.way](seen)
    write_record(args.out, seen.losses, model.state_dict(), seen=seen.by_name)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
