"""Writes trainings: a style, a model, data and a loop, all drawn from a seed, and maybe one fault.

None of them copies a report. A fault is a change of one part of a right training, so that each
broken program has a right twin that differs in that part alone.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from textwrap import dedent, indent
from typing import Final

__all__ = ["FAULTS", "STYLES", "Expected", "Fault", "Pair", "Training", "on_gpu", "pair", "right"]


@dataclass(frozen=True, slots=True)
class Net:
    """The text of a model's class, of the data that it reads, and what is known of its parts."""

    source: str
    data: str
    num_classes: int
    head: str
    norm: str | None
    dropout: str | None
    is_tied: bool = False


@dataclass(frozen=True, slots=True)
class Training:
    """A training in parts; each is source text, and `text` puts them together."""

    style: str
    nproc: int
    net: Net
    imports: tuple[str, ...]
    build: str
    wrap: str
    seed_after: str
    optimizer: str
    loader: str
    epochs: int
    begin_epoch: str
    batch: str
    zero: str
    passes: str
    reduce: str
    clip: str
    step: str
    end_epoch: str
    helpers: str = ""
    after: str = ""
    names: Mapping[str, str] = field(default_factory=dict)

    def text(self) -> str:
        """Return the program."""
        loop = "\n".join(
            part
            for part in (self.batch, self.zero, self.passes, self.reduce, self.clip, self.step)
            if part
        )
        epoch = "\n".join(
            part
            for part in (
                self.begin_epoch,
                "for batch in loader:",
                indent(loop, "    "),
                self.end_epoch,
            )
            if part
        )
        start = ("rank, world = dist.get_rank(), dist.get_world_size()",)
        main = "\n".join(
            part
            for part in (
                'dist.init_process_group("gloo")',
                *start,
                self.build,
                self.wrap,
                self.seed_after,
                self.optimizer,
                self.loader,
                f"for epoch in range({self.epochs}):",
                indent(epoch, "    "),
                self.after,
                "dist.barrier()",
                "dist.destroy_process_group()",
            )
            if part
        )
        return "\n".join(
            (
                *sorted(_IMPORTS + self.imports),
                "",
                "",
                self.net.source,
                "",
                self.net.data,
                "",
                self.helpers,
                "",
                "def main():",
                indent(main, "    "),
                "",
                "",
                'if __name__ == "__main__":',
                "    main()",
                "",
            )
        )


@dataclass(frozen=True, slots=True)
class Expected:
    """What a report must say: a code of one of `families` that holds one of `names`.

    A name is a subject, or a word of the message. `ranks` counts as a name when it is given.
    """

    families: tuple[str, ...]
    names: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Fault:
    """One way to break a training: which mechanism, in which styles, and how."""

    name: str
    mechanism: str
    styles: tuple[str, ...]
    apply: Callable[[Training, random.Random], "Pair | None"]
    wants: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Pair:
    """A broken training, what must be said of it, and its right twin."""

    broken: Training
    expected: Expected
    right: Training


_IMPORTS: Final = (
    "import torch",
    "import torch.distributed as dist",
    "import torch.nn as nn",
    "import torch.nn.functional as F",
    "from torch.utils.data import DataLoader, TensorDataset",
    "from torch.utils.data.distributed import DistributedSampler",
)
_DDP: Final = "from torch.nn.parallel import DistributedDataParallel as DDP"
_FSDP: Final = "from torch.distributed.fsdp import fully_shard"
_FSDP1: Final = "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP"
_MESH: Final = "from torch.distributed.device_mesh import init_device_mesh"
_TP: Final = (
    "from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, "
    "parallelize_module"
)
_WORDS: Final = {
    "first": ("inp", "stem", "front", "encoder", "project_in", "lift"),
    "wide": ("up", "expand", "wide", "fc1", "gate_in"),
    "narrow": ("down", "shrink", "narrow", "fc2", "gate_out"),
    "norm": ("norm", "ln", "scale", "post_norm"),
    "head": ("head", "out", "classifier", "readout", "scores"),
    "blocks": ("blocks", "layers", "stages", "trunk"),
    "model": ("Net", "Classifier", "Tagger", "Reader", "Scorer"),
    "drop": ("drop", "dropout", "thin"),
}
STYLES: Final = (
    "accelerate",
    "fsdp1",
    "ddp",
    "hand",
    "fsdp2",
    "tp",
    "hand-tp",
    "hybrid",
    "pipeline",
    "experts",
)
_PLAIN: Final = ("ddp", "hand", "fsdp1", "fsdp2", "accelerate")
_ALIKE: Final = ("tp", "hand-tp", "pipeline")
"""Styles in which all ranks work on the same samples."""


def _names(rng: random.Random) -> dict[str, str]:
    return {role: rng.choice(words) for role, words in _WORDS.items()}


def _dense(rng: random.Random, names: Mapping[str, str], *, dropout: bool) -> Net:
    """Blocks of two linear layers over features, a norm and a head."""
    width, classes = rng.choice((16, 24, 32)), rng.choice((4, 6, 8))
    features, depth = rng.choice((10, 12, 20)), rng.choice((1, 2))
    activation = rng.choice(("gelu", "relu", "silu"))
    rate = rng.choice((0.1, 0.2, 0.3))
    drop = f"self.{names['drop']} = nn.Dropout({rate})" if dropout else ""
    inner = f"self.{names['narrow']}(F.{activation}(self.{names['wide']}(x)))"
    inner = f"self.{names['drop']}({inner})" if dropout else inner
    source = f"""\
class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.{names["wide"]} = nn.Linear(width, 2 * width)
        self.{names["narrow"]} = nn.Linear(2 * width, width)
        {drop or "pass"}

    def forward(self, x):
        return x + {inner}


class {names["model"]}(nn.Module):
    def __init__(self, width={width}):
        super().__init__()
        self.{names["first"]} = nn.Linear({features}, width)
        self.{names["blocks"]} = nn.ModuleList(Block(width) for _ in range({depth}))
        self.{names["norm"]} = nn.LayerNorm(width)
        self.{names["head"]} = nn.Linear(width, {classes})

    def forward(self, x):
        x = self.{names["first"]}(x)
        for block in self.{names["blocks"]}:
            x = block(x)
        return self.{names["head"]}(self.{names["norm"]}(x))
""".replace("\n        pass\n", "\n")
    noise = rng.choice((0.4, 0.6, 0.8))
    data = f"""
def make_data(num, seed):
    gen = torch.Generator().manual_seed(seed)
    y = torch.randint(0, {classes}, (num,), generator=gen)
    x = torch.randn({classes}, {features}, generator=torch.Generator().manual_seed(9))[y]
    return x + {noise} * torch.randn(num, {features}, generator=gen), y
"""
    module = f"{names['blocks']}.0.{names['drop']}" if dropout else None
    return Net(source, data, classes, names["head"], names["norm"], module)


def _tokens(rng: random.Random, names: Mapping[str, str], *, dropout: bool) -> Net:
    """A small language model: an embedding, a recurrent or an attention layer, and a head."""
    vocab, width, length = rng.choice((24, 32, 40)), rng.choice((16, 32)), rng.choice((9, 13))
    rate = rng.choice((0.1, 0.2))
    kind = rng.choice(("gru", "attention"))
    drop = f"self.{names['drop']} = nn.Dropout({rate})" if dropout else "pass"
    if kind == "gru":
        layer = f"self.{names['first']} = nn.GRU(width, width, batch_first=True)"
        use = f"x = self.{names['first']}(x)[0]"
    else:
        layer = f"self.{names['first']} = nn.Linear(width, 3 * width)"
        use = (
            f"q, k, v = self.{names['first']}(x).chunk(3, -1)\n"
            "        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True)"
        )
    thin = f"x = self.{names['drop']}(x)" if dropout else "pass"
    source = f"""\
class {names["model"]}(nn.Module):
    def __init__(self, width={width}):
        super().__init__()
        self.embed = nn.Embedding({vocab}, width)
        {layer}
        {drop}
        self.{names["norm"]} = nn.LayerNorm(width)
        self.{names["head"]} = nn.Linear(width, {vocab})

    def forward(self, ids):
        x = self.embed(ids)
        {use}
        {thin}
        return self.{names["head"]}(self.{names["norm"]}(x))
""".replace("        pass\n", "")
    data = f"""
def make_data(num, seed):
    gen = torch.Generator().manual_seed(seed)
    start = torch.randint(0, {vocab}, (num, 1), generator=gen)
    stride = torch.randint(1, 4, (num, 1), generator=gen)
    ids = (start + torch.arange({length}) * stride) % {vocab}
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
"""
    module = names["drop"] if dropout else None
    return Net(source, data, vocab, names["head"], names["norm"], module)


def _optimizer(rng: random.Random, parameters: str = "net.parameters()") -> str:
    kind = rng.choice(("SGD({}, lr=0.05, momentum=0.9)", "AdamW({}, lr=3e-3)", "Adam({}, lr=2e-3)"))
    return f"optimizer = torch.optim.{kind.format(parameters)}"


def _loader(rng: random.Random, split: str) -> tuple[str, str]:
    """Return the loader's text, and what begins an epoch; `split` is how the ranks share it."""
    num, size, seed = rng.choice((96, 128, 160)), rng.choice((4, 8)), rng.randrange(1, 99)
    data = f"data = TensorDataset(*make_data({num}, {seed}))"
    if split == "alike":  # tensor-parallel ranks and pipeline stages work on the same samples
        order = f"torch.Generator().manual_seed({seed + 1})"
        return f"{data}\nloader = DataLoader(data, {size}, shuffle=True, generator={order})", ""
    arguments = "data" if split == "world" else f"data, num_replicas={split}"
    sampler = f"sampler = DistributedSampler({arguments}, seed={seed})"
    return (
        f"{data}\n{sampler}\nloader = DataLoader(data, {size}, sampler=sampler)",
        "sampler.set_epoch(epoch)",
    )


_HAND: Final = """\
for p in net.parameters():
    dist.all_reduce(p.grad)
    p.grad /= world"""
_PASS: Final = """\
x, y = batch
loss = F.cross_entropy(model(x).flatten(0, -2), y.flatten())
loss.backward()"""


def right(style: str, rng: random.Random, **wanted: bool) -> Training:
    """Write a right training in this style; `wanted` asks for parts (dropout, accumulation)."""
    names = _names(rng)
    dropout = wanted.get("dropout", rng.random() < 0.4)
    is_dense = wanted.get("dense") or style not in _PLAIN
    make = _dense if is_dense else rng.choice((_dense, _tokens))
    make = _tokens if wanted.get("tokens") else make
    net = make(rng, names, dropout=dropout)
    seed = rng.randrange(1000)
    has_scheduler = wanted.get("scheduler", rng.random() < 0.4)
    split = "alike" if style in _ALIKE else "world"
    loader, begin = _loader(rng, split)
    own_seed = f"torch.manual_seed({seed + 1} + rank)" if style not in _ALIKE else ""
    training = Training(
        style=style,
        nproc=2,
        net=net,
        imports=(),
        build=f"torch.manual_seed({seed})\nnet = {names['model']}()",
        wrap="model = net",
        seed_after=own_seed,
        optimizer=_optimizer(rng),
        loader=loader,
        epochs=rng.choice((2, 3)),
        begin_epoch=begin,
        batch="",
        zero="optimizer.zero_grad()",
        passes=_PASS,
        reduce="",
        clip="torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)" if rng.random() < 0.3 else "",
        step="optimizer.step()",
        end_epoch='if rank == 0:\n    print(f"epoch {epoch} loss {loss.item():.4f}")',
        names=names,
    )
    if has_scheduler:
        schedule = rng.choice(
            ("LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / 10))", "StepLR(optimizer, 5, 0.8)")
        )
        training = replace(
            training,
            optimizer=f"{training.optimizer}\nscheduler = torch.optim.lr_scheduler.{schedule}",
            step="optimizer.step()\nscheduler.step()",
        )
    return _WRAPPED[style](training, rng, wanted)


def _ddp(training: Training, rng: random.Random, wanted: Mapping[str, bool]) -> Training:
    wrapped = replace(training, imports=(*training.imports, _DDP), wrap="model = DDP(net)")
    return _accumulated(wrapped, rng, wanted) if wanted.get("accumulation") else wrapped


def _accumulated(training: Training, rng: random.Random, _: Mapping[str, bool]) -> Training:
    """Several backward passes for one step, only the last of which is reduced."""
    num = rng.choice((2, 4))
    passes = f"""\
x, y = batch
is_last = (number + 1) % {num} == 0
with nullcontext() if is_last else model.no_sync():
    loss = F.cross_entropy(model(x).flatten(0, -2), y.flatten()) / {num}
    loss.backward()
number += 1
if not is_last:
    continue"""
    return replace(
        training,
        imports=(*training.imports, "from contextlib import nullcontext"),
        begin_epoch=f"{training.begin_epoch}\nnumber = 0",
        zero="",
        passes=passes,
        step=f"{training.step}\noptimizer.zero_grad()",
    )


def _hand(training: Training, rng: random.Random, _: Mapping[str, bool]) -> Training:
    broadcast = "for p in net.parameters():\n    dist.broadcast(p.data, 0)"
    return replace(
        training,
        wrap=f"model = net\n{broadcast}" if rng.random() < 0.5 else "model = net",
        reduce=_HAND,
    )


def _fsdp2(training: Training, rng: random.Random, _: Mapping[str, bool]) -> Training:
    blocks = training.names["blocks"]
    units = f"for block in net.{blocks}:\n    fully_shard(block, mesh=mesh)\n"
    units = units if f"self.{blocks} =" in training.net.source else ""
    return replace(
        training,
        imports=(*training.imports, _FSDP, _MESH),
        wrap='mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))\n'
        f"{units}model = fully_shard(net, mesh=mesh)",
    )


def _fsdp1(training: Training, rng: random.Random, _: Mapping[str, bool]) -> Training:
    return replace(
        training,
        imports=(*training.imports, _FSDP1),
        wrap="model = net = FSDP(net, use_orig_params=True, device_id=torch.device('cpu'))",
        clip="net.clip_grad_norm_(1.0)" if training.clip else "",
    )


def _accelerate(training: Training, rng: random.Random, _: Mapping[str, bool]) -> Training:
    """The library splits the loader and wraps the model."""
    data = training.loader.splitlines()[0]
    scheduled = "scheduler" in training.optimizer
    both = ", scheduler" if scheduled else ""
    loader = f"""\
{data}
loader = DataLoader(data, {rng.choice((4, 8))}, shuffle=True)
model, optimizer, loader{both} = accelerator.prepare(net, optimizer, loader{both})"""
    return replace(
        training,
        imports=(*training.imports, "from accelerate import Accelerator"),
        build=f"accelerator = Accelerator(cpu=True)\n{training.build}",
        wrap="",
        loader=loader,
        begin_epoch="",
        passes=training.passes.replace("loss.backward()", "accelerator.backward(loss)"),
        clip="accelerator.clip_grad_norm_(model.parameters(), 1.0)" if training.clip else "",
    )


def _plan(names: Mapping[str, str]) -> str:
    wide, narrow = names["wide"], names["narrow"]
    return f'{{"{wide}": ColwiseParallel(), "{narrow}": RowwiseParallel()}}'


def _tp(training: Training, rng: random.Random, _: Mapping[str, bool]) -> Training:
    names = training.names
    wrap = f"""\
mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
for block in net.{names["blocks"]}:
    parallelize_module(block, mesh, {_plan(names)})
model = net"""
    return replace(training, imports=(*training.imports, _MESH, _TP), wrap=wrap, clip="")


def _hybrid(training: Training, rng: random.Random, _: Mapping[str, bool]) -> Training:
    names = training.names
    wrap = f"""\
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
for block in net.{names["blocks"]}:
    parallelize_module(block, mesh["tp"], {_plan(names)})
    fully_shard(block, mesh=mesh["dp"])
model = fully_shard(net, mesh=mesh["dp"])
dp_rank = mesh.get_local_rank("dp")"""
    return replace(
        training,
        nproc=4,
        clip="",  # torch does not clip gradients of two meshes together
        imports=(*training.imports, _MESH, _TP, _FSDP),
        wrap=wrap,
        seed_after=training.seed_after.replace("+ rank", "+ dp_rank"),
        loader=training.loader.replace(
            "DistributedSampler(data,", "DistributedSampler(data, num_replicas=2, rank=dp_rank,"
        ),
    )


def _pipeline(training: Training, rng: random.Random, _: Mapping[str, bool]) -> Training:
    """Two stages by hand: activations are sent on, their gradients are sent back."""
    names = training.names
    split = f"""\
stage = net.{names["first"]} if rank == 0 else nn.Sequential(*net.{names["blocks"]}, net.{
        names["norm"]
    }, net.{names["head"]})
width = net.{names["first"]}.out_features
del net"""
    passes = """\
x, y = batch
if rank == 0:
    sent = stage(x)
    dist.send(sent.detach(), 1)
    back = torch.empty_like(sent)
    dist.recv(back, 1)
    sent.backward(back)
    loss = sent.detach().sum()
else:
    received = torch.empty(len(x), width)
    dist.recv(received, 0)
    received.requires_grad_()
    loss = F.cross_entropy(stage(received), y)
    loss.backward()
    dist.send(received.grad, 0)"""
    clip = """\
norm = sum(p.grad.square().sum() for p in stage.parameters())
dist.all_reduce(norm)
factor = (0.5 / (norm.sqrt() + 1e-6)).clamp(max=1.0)
for p in stage.parameters():
    p.grad *= factor"""
    return replace(
        training,
        wrap=split,
        optimizer=training.optimizer.replace("net.parameters()", "stage.parameters()"),
        passes=passes,
        clip=clip,
    )


_EXPERTS: Final = '''
class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, send, receive):
        ctx.send, ctx.receive = send, receive
        out = rows.new_empty((sum(receive), rows.shape[1]))
        dist.all_to_all_single(out, rows.contiguous(), receive, send)
        return out

    @staticmethod
    def backward(ctx, grad):
        out = grad.new_empty((sum(ctx.send), grad.shape[1]))
        dist.all_to_all_single(out, grad.contiguous(), ctx.send, ctx.receive)
        return out, None, None


class Mixture(nn.Module):
    """One expert lives on each rank; a token goes to the expert with the highest score."""

    def __init__(self, width):
        super().__init__()
        self.router = nn.Linear(width, dist.get_world_size(), bias=False)
        wide = 2 * width
        self.expert = nn.Sequential(nn.Linear(width, wide), nn.GELU(), nn.Linear(wide, width))

    def forward(self, x):
        weight, choice = self.router(x).softmax(-1).max(-1)
        order = choice.argsort(stable=True)
        counts = torch.bincount(choice, minlength=dist.get_world_size())
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts)
        send, receive = counts.tolist(), theirs.tolist()
        done = Exchange.apply(self.expert(Exchange.apply(x[order], send, receive)), receive, send)
        return torch.zeros_like(x).index_copy(0, order, done) * weight[:, None]


'''


def _experts(training: Training, rng: random.Random, _: Mapping[str, bool]) -> Training:
    training = _with_layer(training, _EXPERTS, "self.mixture = Mixture(width)")
    build = (
        f"{training.build}\ntorch.manual_seed(100 + rank)\n"
        "for layer in (net.mixture.expert[0], net.mixture.expert[2]):\n    layer.reset_parameters()"
    )
    reduce = """\
for name, p in net.named_parameters():
    if p.grad is None:
        p.grad = torch.zeros_like(p)
    if ".expert." not in name:
        dist.all_reduce(p.grad)
    p.grad /= world"""
    return replace(training, build=build, reduce=reduce, clip="")


_SHARED_LINEAR: Final = """
class Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


class Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class Shared(nn.Module):
    \"\"\"Each rank has a part of the hidden features.\"\"\"

    def __init__(self, width):
        super().__init__()
        hidden = 4 * width // dist.get_world_size()
        self.rows = nn.Parameter(torch.empty(hidden, width))
        self.columns = nn.Parameter(torch.empty(width, hidden))
        state = torch.get_rng_state()
        torch.manual_seed(500 + dist.get_rank())
        nn.init.normal_(self.rows, std=width**-0.5)
        nn.init.normal_(self.columns, std=hidden**-0.5)
        torch.set_rng_state(state)

    def forward(self, x):
        return Leave.apply(F.gelu(Enter.apply(x) @ self.rows.T) @ self.columns.T)


"""


def _with_layer(training: Training, layer: str, call: str) -> Training:
    """Put one more residual layer before the norm."""
    names = training.names
    head = f"class {names['model']}(nn.Module):"
    norm, out = f"self.{names['norm']} = nn.LayerNorm(width)", f"return self.{names['head']}"
    source = training.net.source.replace(head, layer.lstrip("\n") + head)
    source = source.replace(norm, f"{norm}\n        {call}")
    name = call.split(" =")[0]
    source = source.replace(f"        {out}", f"        x = x + {name}(x)\n        {out}")
    return replace(training, net=replace(training.net, source=source))


def _hand_tp(training: Training, rng: random.Random, _: Mapping[str, bool]) -> Training:
    return _with_layer(training, _SHARED_LINEAR, "self.shared = Shared(width)")


_WRAPPED: Final = {
    "hand-tp": _hand_tp,
    "fsdp1": _fsdp1,
    "accelerate": _accelerate,
    "ddp": _ddp,
    "hand": _hand,
    "fsdp2": _fsdp2,
    "tp": _tp,
    "hybrid": _hybrid,
    "pipeline": _pipeline,
    "experts": _experts,
}


# Faults: each changes one part of a right training.


def _same_samples(training: Training, rng: random.Random) -> Pair:
    data = training.loader.splitlines()[0]
    size = rng.choice((4, 8))
    how = rng.choice(("no sampler", "iterable", "by hand"))
    helpers, begin = "", ""
    if how == "no sampler":
        order = "torch.Generator().manual_seed(3)"
        loader = f"{data}\nloader = DataLoader(data, {size}, shuffle=True, generator={order})"
    elif how == "iterable":
        helpers = dedent(
            """
            class Stream(torch.utils.data.IterableDataset):
                def __init__(self, x, y):
                    self.x, self.y = x, y

                def __iter__(self):
                    yield from zip(self.x, self.y)

            """
        )
        loader = data.replace("TensorDataset(", "Stream(") + f"\nloader = DataLoader(data, {size})"
    else:
        loader = (
            f"{data}\nx, y = data.tensors\nloader = list(zip(x.split({size}), y.split({size})))"
        )
    broken = replace(training, loader=loader, begin_epoch=begin, helpers=training.helpers + helpers)
    return Pair(broken, Expected(("DAT",), ("same", "equal", "repeat", "every rank")), training)


def _tp_own_samples(training: Training, rng: random.Random) -> Pair:
    broken = replace(
        training,
        loader=training.loader.replace("manual_seed(", "manual_seed(7 * rank + ").replace(
            "num_replicas=2, rank=dp_rank", "num_replicas=4, rank=rank"
        ),
    )
    return Pair(
        broken,
        Expected(("DAT", "SEQ", "REP", "SHD"), ("input", "sample", "batch", "given")),
        training,
    )


def _same_dropout(training: Training, rng: random.Random) -> Pair | None:
    if training.net.dropout is None:
        return None
    broken = replace(training, seed_after="")
    return Pair(
        broken, Expected(("DAT", "REP"), (training.net.dropout, "Dropout", "dropout")), training
    )


def _same_noise(training: Training, rng: random.Random) -> Pair:
    level = rng.choice((0.05, 0.1))
    noisy = training.passes.replace("model(x)", f"model(x + {level} * torch.randn_like(x))")
    twin = replace(training, passes=noisy)
    return Pair(
        replace(twin, seed_after=""),
        Expected(("DAT", "REP"), ("randn", "noise", "same numbers")),
        twin,
    )


def _tp_dropout(training: Training, rng: random.Random) -> Pair | None:
    if training.net.dropout is None:
        return None
    broken = replace(training, seed_after=f"torch.manual_seed({rng.randrange(99)} + rank)")
    return Pair(
        broken, Expected(("REP", "DAT"), ("random", "generator", "dropout", "Dropout")), training
    )


def _other_weights(training: Training, rng: random.Random) -> Pair:
    build = training.build.replace("\n", " + rank)\n", 1).replace(") + rank)", " + rank)")
    broken = replace(training, build=build, wrap="model = net")
    return Pair(broken, Expected(("REP",), ("weight", "bias")), training)


def _other_rate(training: Training, rng: random.Random) -> Pair | None:
    if "scheduler" not in training.optimizer:
        return None
    step = training.step.replace("scheduler.step()", "if rank == 0:\n    scheduler.step()")
    return Pair(
        replace(training, step=step),
        Expected(("REP", "PAR", "DAT"), ("learning rate", "lr")),
        training,
    )


def _other_order(training: Training, rng: random.Random) -> Pair | None:
    if "seed=" not in training.loader:
        return None
    broken = replace(training, loader=training.loader.replace("seed=", "seed=rank + "))
    return Pair(broken, Expected(("DAT",), ("order", "seed", "overlap", "sampl")), training)


def _state_of_rank_0(training: Training, rng: random.Random) -> Pair:
    resume = """\
sampler.set_epoch(99)
for batch in loader:
    optimizer.zero_grad()
    x, y = batch
    F.cross_entropy(model(x).flatten(0, -2), y.flatten()).backward()
    for p in net.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world
    optimizer.step()
saved = optimizer.state_dict()
optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
if rank == 0:
    optimizer.load_state_dict(saved)"""
    training = replace(
        training,
        optimizer="optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)",
        step="optimizer.step()",
    )
    broken = replace(training, loader=f"{training.loader}\n{resume}")
    everywhere = resume.replace("if rank == 0:\n    optimizer", "optimizer")
    twin = replace(training, loader=f"{training.loader}\n{everywhere}")
    return Pair(broken, Expected(("REP", "SHD", "CKP"), ("optimizer", "exp_avg", "state")), twin)


def _left_out(training: Training, rng: random.Random) -> Pair:
    role = rng.choice(("norm", "head", "first"))
    name = training.names[role]
    loop = f"""\
for name, p in net.named_parameters():
    if "{name}." in name:
        continue
    dist.all_reduce(p.grad)
    p.grad /= world"""
    names = (f"{name}.weight", f"{name}.bias", f"{name}.weight_ih_l0")
    return Pair(replace(training, reduce=loop), Expected(("SHD", "SEQ", "REP"), names), training)


def _reduced_twice(training: Training, rng: random.Random) -> Pair:
    name = training.names["head"]
    loop = f"""\
{_HAND}
for p in net.{name}.parameters():
    dist.all_reduce(p.grad)"""
    names = (f"{name}.weight", f"{name}.bias")
    return Pair(replace(training, reduce=loop, clip=""), Expected(("SHD", "COL"), names), training)


def _not_divided(training: Training, rng: random.Random) -> Pair:
    name = training.names[rng.choice(("head", "norm"))]
    loop = f"""\
for name, p in net.named_parameters():
    dist.all_reduce(p.grad)
    if "{name}." not in name:
        p.grad /= world"""
    names = (f"{name}.weight", f"{name}.bias")
    return Pair(replace(training, reduce=loop), Expected(("SHD",), names), training)


def _sync_too_early(training: Training, rng: random.Random) -> Pair | None:
    if "no_sync" not in training.passes:
        return None
    passes = training.passes.replace("nullcontext() if is_last else", "nullcontext() if first else")
    passes = passes.replace("with nullcontext", "first = number % 2 == 0\nwith nullcontext")
    return Pair(replace(training, passes=passes), Expected(("SHD",), ("weight", "bias")), training)


def _flag_after_forward(training: Training, rng: random.Random) -> Pair | None:
    if "no_sync" not in training.passes:
        return None
    lines = training.passes.splitlines()
    num = next(line for line in lines if "is_last =" in line).split("%")[1].split("==")[0].strip()
    passes = f"""\
x, y = batch
loss = F.cross_entropy(model(x).flatten(0, -2), y.flatten()) / {num}
is_last = (number + 1) % {num} == 0
model.require_backward_grad_sync = is_last
loss.backward()
number += 1
if not is_last:
    continue"""
    return Pair(replace(training, passes=passes), Expected(("SHD",), ("weight", "bias")), training)


def _kept_gradient(training: Training, rng: random.Random) -> Pair:
    head = training.names["head"]
    split = f"""\
others = [p for name, p in net.named_parameters() if "{head}." not in name]
optimizer = torch.optim.SGD(others, lr=0.02)
head_optimizer = torch.optim.SGD(net.{head}.parameters(), lr=0.02)"""
    broken = replace(
        training, optimizer=split, clip="", step="optimizer.step()\nhead_optimizer.step()"
    )
    names = (f"{head}.weight", f"{head}.bias")
    twin = replace(broken, zero="optimizer.zero_grad()\nhead_optimizer.zero_grad()")
    return Pair(broken, Expected(("SHD", "NUM"), names), twin)


def _local_norm(training: Training, rng: random.Random) -> Pair:
    clip = """\
grads = [p.grad.to_local() for p in net.parameters()]
norm = torch.stack([g.norm() for g in grads]).norm()
for g in grads:
    g.mul_((0.1 / (norm + 1e-6)).clamp(max=1.0))"""
    whole = "torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)"
    expected = Expected(("SHD",), ("factor", "scale", "norm"))
    return Pair(replace(training, clip=clip), expected, replace(training, clip=whole))


def _stage_norm(training: Training, rng: random.Random) -> Pair:
    twin = replace(training, clip=training.clip.replace("0.5 /", "0.05 /"))
    broken = replace(twin, clip=twin.clip.replace("dist.all_reduce(norm)\n", ""))
    return Pair(broken, Expected(("SHD",), ("factor", "scale", "norm")), twin)


def _expert_sum(training: Training, rng: random.Random) -> Pair:
    loop = training.reduce.replace("    p.grad /= world", "        p.grad /= world")
    return Pair(replace(training, reduce=loop), Expected(("MOE", "SHD"), ("expert",)), training)


def _not_held(training: Training, rng: random.Random) -> Pair:
    head = training.names["head"]
    text = training.optimizer.replace("net.parameters()", "chosen")
    choose = f"""\
chosen = [p for n, p in net.named_parameters() if rank == 0 or "{head}." not in n]"""
    broken = replace(training, optimizer=f"{choose}\n{text}")
    return Pair(broken, Expected(("SHD", "REP"), (f"{head}.weight", f"{head}.bias")), training)


def _one_key(training: Training, rng: random.Random) -> Pair:
    save = """\
folder = [tempfile.mkdtemp() if rank == 0 else None]
dist.broadcast_object_list(folder)
dcp.save({"model": net.state_dict()}, checkpoint_id=folder[0])
state = {"model": net.state_dict()}
dcp.load(state, checkpoint_id=folder[0])
net.load_state_dict(state["model"])"""
    imports = (*training.imports, "import tempfile", "import torch.distributed.checkpoint as dcp")
    named = """\
def named(net, rank):
    return {k.replace(".expert.", f".expert{rank}."): v for k, v in net.state_dict().items()}

"""
    own = save.replace("net.state_dict()", "named(net, rank)").replace(
        'net.load_state_dict(state["model"])',
        'own = {k.replace(f".expert{rank}.", ".expert."): v for k, v in state["model"].items()}\n'
        "net.load_state_dict(own)",
    )
    broken = replace(training, imports=imports, after=save)
    twin = replace(training, imports=imports, after=own, helpers=training.helpers + named)
    return Pair(broken, Expected(("CKP",), ("expert",)), twin)


def _stepped_twice(training: Training, rng: random.Random) -> Pair | None:
    """A schedule over the whole training is advanced once for each rank."""
    if "scheduler" not in training.optimizer:
        return None
    total = f"{training.epochs} * len(loader)"
    loader = training.loader
    if training.style == "accelerate":  # which advances a schedule once for each rank, too
        total, loader = f"world * {total}", loader.replace(", scheduler", "")
    kind = rng.choice(("CosineAnnealingLR", "PolynomialLR"))
    planned = f"scheduler = torch.optim.lr_scheduler.{kind}(optimizer, {total})"
    if training.style == "accelerate":
        planned += "\nscheduler = accelerator.prepare(scheduler)"
    optimizer = training.optimizer.splitlines()[0]
    twice = "for _ in range(world):\n    scheduler.step()"
    twin = replace(training, optimizer=optimizer, loader=f"{loader}\n{planned}")
    broken = replace(twin, step=training.step.replace("scheduler.step()", twice))
    return Pair(broken, Expected(("PAR",), (kind, "schedule")), twin)


def _own_metric(training: Training, rng: random.Random) -> Pair:
    helpers = dedent(
        """
        @torch.no_grad()
        def evaluate(model, loader):
            model.eval()
            total, count = 0.0, 0
            for x, y in loader:
                total += F.cross_entropy(model(x).flatten(0, -2), y.flatten()).item() * len(x)
                count += len(x)
            model.train()
            return total / count

        """
    )
    reduced = helpers.replace(
        "    return total / count",
        "    both = torch.tensor([total, count])\n    dist.all_reduce(both)\n"
        "    return (both[0] / both[1]).item()",
    )
    held = """\
held = TensorDataset(*make_data(64, 77))
held_loader = DataLoader(held, 8, sampler=DistributedSampler(held, shuffle=False))
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1)"""
    end = f"metric = evaluate(model, held_loader)\nplateau.step(metric)\n{training.end_epoch}"
    broken = replace(
        training,
        helpers=training.helpers + helpers,
        loader=f"{training.loader}\n{held}",
        end_epoch=end,
    )
    twin = replace(broken, helpers=training.helpers + reduced)
    return Pair(broken, Expected(("DAT", "PAR", "REP"), ("ReduceLROnPlateau", "metric")), twin)


def _same_shards(training: Training, rng: random.Random) -> Pair:
    source = training.net.source.replace("manual_seed(500 + dist.get_rank())", "manual_seed(500)")
    broken = replace(training, net=replace(training.net, source=source))
    names = ("shared.rows", "shared.columns")
    return Pair(broken, Expected(("REP", "SHD"), names), training)


def _forgotten_sum(training: Training, rng: random.Random) -> Pair:
    """The gradient of what goes into the shared layer is a part of it on each rank."""
    source = training.net.source.replace(
        "        grad = grad.contiguous()\n        dist.all_reduce(grad)\n", ""
    )
    broken = replace(training, net=replace(training.net, source=source))
    return Pair(broken, Expected(("SHD", "REP", "SEQ"), ("weight", "bias")), training)


def _sharded_sync_too_early(training: Training, rng: random.Random) -> Pair:
    num = rng.choice((2, 4))
    passes = f"""\
x, y = batch
is_last = (number + 1) % {num} == 0
model.set_requires_gradient_sync(is_last)
loss = F.cross_entropy(model(x).flatten(0, -2), y.flatten()) / {num}
loss.backward()
number += 1
if not is_last:
    continue"""
    twin = replace(
        training,
        begin_epoch=f"{training.begin_epoch}\nnumber = 0",
        zero="",
        passes=passes,
        clip="",
        step=f"{training.step}\noptimizer.zero_grad()",
    )
    early = passes.replace("gradient_sync(is_last)", f"gradient_sync(number % {num} == 0)")
    return Pair(replace(twin, passes=early), Expected(("SHD",), ("weight", "bias")), twin)


def _untied(training: Training, rng: random.Random) -> Pair | None:
    if "self.embed" not in training.net.source:
        return None
    head = training.names["head"]
    tie = f"net.{head}.weight = net.embed.weight"
    load = """\
state = {name: value.clone() for name, value in net.state_dict().items()}
net.load_state_dict(state, assign=True)"""
    broken = replace(training, build=f"{training.build}\n{tie}\n{load}")
    twin = replace(training, build=f"{training.build}\n{tie}\n{load}\n{tie}")
    return Pair(broken, Expected(("SHD", "CKP"), ("embed.weight", f"{head}.weight")), twin)


def _old_parameters(training: Training, rng: random.Random) -> Pair:
    broken = replace(
        training,
        imports=(*training.imports, "import copy"),
        build=f"{training.build}\nfirst = net\nnet = copy.deepcopy(net)",
        optimizer=training.optimizer.replace("net.parameters()", "first.parameters()"),
    )
    return Pair(
        broken, Expected(("SHD",), ("weight", "bias", "no optimizer", "optimizer")), training
    )


def _never_filled(training: Training, rng: random.Random) -> Pair:
    empty = 'if rank > 0:\n    net = net.to("meta").to_empty(device="cpu")\n    poison(net)'
    helpers = """\
def poison(net):
    for p in net.parameters():
        p.data.fill_(0.01)

"""
    send = "for p in net.parameters():\n    dist.broadcast(p.data, 0)"
    broken = replace(
        training, build=f"{training.build}\n{empty}", wrap="model = net", helpers=helpers
    )
    twin = replace(broken, wrap=f"{send}\nmodel = net")
    return Pair(broken, Expected(("REP",), ("weight", "bias")), twin)


def _best_by_own_metric(training: Training, rng: random.Random) -> Pair:
    pair = _own_metric(training, rng)
    keep = """\
metric = evaluate(model, held_loader)
if rank == 0 and metric < best:
    best = metric
    torch.save(net.state_dict(), os.path.join(tempfile.gettempdir(), f"best-{os.getpid()}.pt"))"""

    def kept(each: Training) -> Training:
        return replace(
            each,
            imports=(*each.imports, "import os", "import tempfile"),
            loader="\n".join(each.loader.splitlines()[:-1]) + '\nbest = float("inf")',
            end_epoch=f"{keep}\n{training.end_epoch}",
            epochs=3,
        )

    words = ("metric", "evaluat", "best")
    return Pair(kept(pair.broken), Expected(("DAT", "PAR"), words), kept(pair.right))


def _own_statistics(training: Training, rng: random.Random) -> Pair:
    """Each rank keeps batch-norm statistics of its own, and evaluates with them."""
    evaluated = _own_metric(training, rng).right
    norm = training.names["norm"]
    source = training.net.source.replace(
        f"self.{norm} = nn.LayerNorm(width)", f"self.{norm} = nn.BatchNorm1d(width)"
    )
    twin = replace(
        evaluated,
        net=replace(training.net, source=source),
        loader="\n".join(evaluated.loader.splitlines()[:-1]),
        end_epoch=f"metric = evaluate(model, held_loader)\n{training.end_epoch}",
    )
    broken = replace(twin, wrap="model = DDP(net, broadcast_buffers=False)")
    return Pair(broken, Expected(("REP",), ("running_mean", "running_var")), twin)


FAULTS: Final = (
    Fault("same-samples", "relation", ("ddp", "hand", "fsdp2", "fsdp1", "experts"), _same_samples),
    Fault("own-samples-in-tp", "relation", ("tp", "hybrid"), _tp_own_samples),
    Fault(
        "same-dropout",
        "relation",
        ("ddp", "hand", "fsdp2", "fsdp1", "accelerate"),
        _same_dropout,
        ("dropout",),
    ),
    Fault(
        "same-noise",
        "relation",
        ("ddp", "hand", "fsdp2", "fsdp1", "accelerate"),
        _same_noise,
        ("dense",),
    ),
    Fault("own-dropout-in-tp", "relation", ("tp",), _tp_dropout, ("dropout",)),
    Fault("other-weights", "relation", ("hand",), _other_weights),
    Fault("other-rate", "relation", ("ddp", "hand"), _other_rate, ("scheduler",)),
    Fault("other-order", "relation", ("ddp", "hand", "fsdp2", "fsdp1"), _other_order),
    Fault("state-of-rank-0", "relation", ("hand",), _state_of_rank_0),
    Fault("left-out", "contribution", ("hand",), _left_out),
    Fault("reduced-twice", "contribution", ("hand",), _reduced_twice),
    Fault("not-divided", "contribution", ("hand",), _not_divided),
    Fault("sync-too-early", "contribution", ("ddp",), _sync_too_early, ("accumulation",)),
    Fault("flag-after-forward", "contribution", ("ddp",), _flag_after_forward, ("accumulation",)),
    Fault("kept-gradient", "contribution", ("ddp", "hand", "fsdp2", "fsdp1"), _kept_gradient),
    Fault("local-norm", "contribution", ("fsdp2",), _local_norm),
    Fault("stage-norm", "contribution", ("pipeline",), _stage_norm),
    Fault("expert-sum", "contribution", ("experts",), _expert_sum),
    Fault("not-held", "write", ("hand", "ddp", "fsdp2", "fsdp1"), _not_held),
    Fault("one-key", "write", ("experts",), _one_key),
    Fault(
        "stepped-twice",
        "value",
        ("ddp", "hand", "fsdp2", "fsdp1", "accelerate"),
        _stepped_twice,
        ("scheduler",),
    ),
    Fault("same-shards", "relation", ("hand-tp",), _same_shards),
    Fault("forgotten-sum", "contribution", ("hand-tp",), _forgotten_sum),
    Fault("early-sharded-sync", "contribution", ("fsdp2",), _sharded_sync_too_early),
    Fault("untied", "write", ("ddp", "hand"), _untied, ("tokens",)),
    Fault("old-parameters", "write", ("ddp", "hand"), _old_parameters),
    Fault("never-filled", "write", ("hand",), _never_filled),
    Fault("best-by-own-metric", "value", ("ddp",), _best_by_own_metric),
    Fault("own-statistics", "relation", ("ddp",), _own_statistics, ("dense",)),
    Fault("own-metric", "value", ("ddp",), _own_metric),
)


def pair(fault: Fault, style: str, seed: int) -> Pair | None:
    """Write a training with this fault and its right twin; None where the fault has no place."""
    rng = random.Random(f"{fault.name}-{style}-{seed}")
    return fault.apply(right(style, rng, **dict.fromkeys(fault.wants, True)), rng)


def on_gpu(text: str) -> str:
    """Return the program with its model and samples on one GPU for each rank, in bfloat16."""
    replaced = (
        ('init_process_group("gloo")', 'init_process_group("nccl")'),
        ('init_device_mesh("cpu"', 'init_device_mesh("cuda"'),
        ("device_id=torch.device('cpu')", "device_id=torch.cuda.current_device()"),
        (
            "x, y = batch",
            "x, y = (t.cuda() for t in batch)\nx = x.bfloat16() if x.is_floating_point() else x",
        ),
    )
    lines = []
    for line in text.splitlines():
        for old, new in replaced:
            line = (
                indent(new, line[: len(line) - len(line.lstrip())])
                if line.strip() == old
                else line.replace(old, new)
            )
        lines.append(line)
        margin = line[: len(line) - len(line.lstrip())]
        if "rank, world = " in line:
            lines.append(f"{margin}torch.cuda.set_device(rank)")
        if line.strip().startswith("net = ") and line.strip().endswith("()"):
            lines.append(f"{margin}net = net.cuda().bfloat16()")
    return "\n".join((*lines, ""))
