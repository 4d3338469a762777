"""Trains rightly with loops, losses and loaders of many styles.

``--style`` names one of `STYLES`: each gives on any number of ranks what it gives on one, but with
``--broken``, where the loss is divided by the number of ranks once more.
"""

import argparse
import contextlib
import copy
import itertools
import queue
import threading

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn
import torch.nn.functional as F
from right import CLASSES, IGNORED, Classifier, Net, Points, Texts, global_sum, padded, text
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    get_worker_info,
)

import distdiag.parity


def world():
    return dist.get_world_size()


def points(size=4, *, shuffle=True, **more):
    data = Points()
    return DataLoader(data, size, sampler=DistributedSampler(data, shuffle=shuffle), **more)


def texts(size=4, **more):
    data = Texts()
    return DataLoader(data, size, sampler=DistributedSampler(data), collate_fn=padded, **more)


def sgd(model, **more):
    return torch.optim.SGD(model.parameters(), **{"lr": 0.05, **more})


def classify(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def stepped(optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def word_share(labels):
    """Return what a sum over words is multiplied by, if gradients are averaged over ranks."""
    return world() / global_sum((labels != IGNORED).sum())


def word_sum(logits, labels):
    return F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
    )


# Loops


def passes_without_sync(scale, num=3):
    """Divide by the passes that a step really has: the last one of an epoch has fewer."""
    model = DDP(Classifier())
    optimizer, loader = sgd(model), points(2)
    for first in range(0, len(loader), num):
        batches = list(itertools.islice(loader, first, first + num))
        for number, batch in enumerate(batches, 1):
            is_last = number == len(batches)
            with contextlib.nullcontext() if is_last else model.no_sync():
                (classify(model, batch) * scale / len(batches)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


def epochs(scale):
    """Pass over few samples several times, with workers that stay and a schedule by epochs."""
    data = torch.utils.data.Subset(Points(), range(16))
    sampler = DistributedSampler(data, seed=3)
    loader = DataLoader(
        data, 4, sampler=sampler, num_workers=1, persistent_workers=True, drop_last=True
    )
    model = DDP(Classifier())
    optimizer = sgd(model, momentum=0.9, nesterov=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for batch in loader:
            stepped(optimizer, classify(model, batch) * scale)
        scheduler.step()


def evaluated(scale):
    """Evaluate all of a validation set, and what rank 0 holds of it, after each step."""
    model, held_out = DDP(Classifier()), DataLoader(Points(), 16)
    optimizer = sgd(model)
    for batch in points():
        model.train()
        stepped(optimizer, classify(model, batch) * scale)
        model.eval()
        with torch.no_grad():
            right = sum((model(each[0]).argmax(-1) == each[1]).sum() for each in held_out)
        dist.all_reduce(right)
        if dist.get_rank() == 0:
            with torch.inference_mode():
                classify(model.module, next(iter(held_out)))


def scheduled(scale):
    """Warm up and cool down over the length of the loader, with groups of parameters."""
    model, loader = DDP(Classifier()), points()
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=len(loader))
    for batch in loader:
        stepped(optimizer, classify(model, batch) * scale)
        scheduler.step()


def averaged(scale):
    """Keep a running average of the weights, and evaluate it."""
    model = DDP(Classifier())
    average = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = sgd(model)
    for batch in points():
        stepped(optimizer, classify(model, batch) * scale)
        average.update_parameters(model.module)
        with torch.no_grad():
            average(batch[0])


def taught(scale):
    """Follow a teacher that is a running average, and one that is frozen."""
    net = Classifier()
    teacher, frozen = copy.deepcopy(net).requires_grad_(False), Classifier().requires_grad_(False)
    model = DDP(net)
    optimizer = sgd(model)
    for batch in points():
        logits = model(batch[0])
        with torch.no_grad():
            soft = (teacher(batch[0]) + frozen(batch[0])).softmax(-1)
        loss = F.cross_entropy(logits, batch[1])
        loss = loss + F.kl_div(logits.log_softmax(-1), soft, reduction="batchmean")
        stepped(optimizer, loss * scale)
        for mine, theirs in zip(teacher.parameters(), net.parameters(), strict=True):
            mine.lerp_(theirs.detach(), 0.1)


def clipped_by_hand(scale):
    """Scale gradients down by their norm, without the function of torch."""
    model = DDP(Classifier())
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01)
    for batch in points():
        optimizer.zero_grad()
        (classify(model, batch) * scale).backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        for parameter in model.parameters():
            parameter.grad.mul_((0.3 / norm).clamp(max=1.0))
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.1)
        optimizer.step()


def dropping(scale):
    """Drop activations, which is switched off to compare."""
    net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, CLASSES))
    model = DDP(net)
    optimizer = sgd(model)
    for batch in points():
        stepped(optimizer, classify(model, batch) * scale)


def mixed(scale):
    """Compute in bfloat16 where autocast does, with activations computed again."""
    net = Classifier()
    inner = net.forward
    net.forward = lambda x: checkpoint(inner, x, use_reentrant=False)
    model = DDP(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for batch in points():
        with torch.autocast("cpu", torch.bfloat16):
            loss = classify(model, batch)
        stepped(optimizer, loss * scale)


def adversaries(scale):
    """Train two models against each other, each with its optimizer."""
    maker, judge = (
        DDP(nn.Linear(8, 8)),
        DDP(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))),
    )
    optimizers = sgd(maker), sgd(judge)
    for x, *_ in points():
        made = maker(x.flip(0))
        judged = judge(torch.cat((x, made.detach()))).chunk(2)
        loss = F.softplus(-judged[0]).mean() + F.softplus(judged[1]).mean()
        stepped(optimizers[1], loss * scale)
        for parameter in judge.parameters():
            parameter.requires_grad_(False)
        stepped(optimizers[0], F.softplus(-judge.module(maker(x.flip(0)))).mean() * scale)
        for parameter in judge.parameters():
            parameter.requires_grad_(True)


def sharpness(scale):
    """Take the gradient where the loss is larger, as sharpness-aware minimisation does."""
    model = DDP(Classifier())
    optimizer = sgd(model)
    for batch in points():
        (classify(model, batch) * scale).backward()
        held = [p.detach().clone() for p in model.parameters()]
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(parameter.grad, alpha=float(0.05 / norm))
        optimizer.zero_grad()
        (classify(model, batch) * scale).backward()
        with torch.no_grad():
            for parameter, old in zip(model.parameters(), held, strict=True):
                parameter.copy_(old)
        optimizer.step()
        optimizer.zero_grad()


def closures(scale):
    """Let the optimizer ask for the gradient."""
    model = DDP(Classifier())
    optimizer = sgd(model)
    for batch in points():

        def closure(batch=batch):
            optimizer.zero_grad()
            loss = classify(model, batch) * scale
            loss.backward()
            return loss

        optimizer.step(closure)


def prefetched(scale):
    """Fetch the next batch before the step, as to copy it to a device meanwhile."""
    model, loader = DDP(Classifier()), iter(points())
    optimizer = sgd(model)
    batch = next(loader)
    while batch is not None:
        following = next(loader, None)
        stepped(optimizer, classify(model, batch) * scale)
        batch = following


def threaded(scale):
    """Fetch batches in a thread, some ahead."""
    model, ahead = DDP(Classifier()), queue.Queue(2)

    def fetch():
        for batch in points():
            ahead.put(batch)
        ahead.put(None)

    thread = threading.Thread(target=fetch, daemon=True)
    thread.start()
    optimizer = sgd(model)
    while (batch := ahead.get()) is not None:
        stepped(optimizer, classify(model, batch) * scale)
    thread.join()


def listed(scale):
    """Hold all batches in memory, and go through them twice."""
    batches = list(points(8))
    model = DDP(Classifier())
    optimizer = sgd(model)
    for batch in itertools.chain(batches, reversed(batches)):
        stepped(optimizer, classify(model, batch) * scale)


def zipped(scale):
    """Take a batch of one loader and a larger one of another for each step."""
    model = DDP(Classifier())
    optimizer = sgd(model)
    for (x, y, _), (others, *_) in zip(points(2), points(6, shuffle=False), strict=False):
        logits = model(torch.cat((x, others)))
        known, unknown = logits[: len(x)], logits[len(x) :].softmax(-1)
        entropy = -(unknown * unknown.log()).sum(-1).mean()
        stepped(optimizer, (F.cross_entropy(known, y) + 0.1 * entropy) * scale)


def two_backwards(scale):
    """Call backward for each term of the loss."""
    net = Classifier()
    optimizer = sgd(net)
    for x, y, _ in points():
        optimizer.zero_grad()
        logits = net(x)
        (F.cross_entropy(logits, y) * scale).backward(retain_graph=True)
        (0.1 * logits.square().mean() * scale).backward()
        for parameter in net.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= world()
        optimizer.step()


def flattened(scale):
    """Ask for gradients by a function, and reduce all of them in one piece."""
    net = Classifier()
    parameters = list(net.parameters())
    for batch in points():
        found = torch.autograd.grad(classify(net, batch) * scale, parameters)
        flat = torch.cat([each.flatten() for each in found])
        dist.all_reduce(flat)
        pieces = (flat / world()).split([p.numel() for p in parameters])
        for parameter, piece in zip(parameters, pieces, strict=True):
            parameter.grad = piece.view_as(parameter)
        sgd(net).step()


def hooked(scale):
    """Reduce and apply each gradient as soon as it is there."""
    net = Classifier()
    optimizers = {p: torch.optim.SGD([p], lr=0.05) for p in net.parameters()}

    def apply(parameter):
        dist.all_reduce(parameter.grad)
        parameter.grad /= world()
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(apply)
    for batch in points():
        (classify(net, batch) * scale).backward()


def partly_frozen(scale):
    """Train the head, and all of the model after one step."""
    net = Classifier()
    net.up.requires_grad_(False)
    model = DDP(net)
    optimizer = sgd(net)
    for step, batch in enumerate(points()):
        if step == 1:
            net.up.requires_grad_(True)
            model = DDP(net)
        stepped(optimizer, classify(model, batch) * scale)


def divided_states(scale):
    """Keep the states of the optimizer on one rank each, and compress nothing."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DDP(Classifier(), gradient_as_bucket_view=True, static_graph=True)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
    for batch in points():
        stepped(optimizer, classify(model, batch) * scale)


def sharded_passes(scale, num=2):
    """Accumulate under FSDP2, which reduces with the last pass."""
    from torch.distributed.fsdp import fully_shard

    net = Net()
    for part in (net.up, net.head, net):
        fully_shard(part)
    optimizer, batches = sgd(net), list(itertools.islice(texts(), 6))
    for first in range(0, len(batches), num):
        here = batches[first : first + num]
        count = global_sum(sum((labels != IGNORED).sum() for _, labels in here))
        for number, (ids, labels) in enumerate(here, 1):
            net.set_requires_gradient_sync(number == num)
            (word_sum(net(ids), labels) * world() / count * scale).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()


# Losses


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(8, 6), nn.Linear(8, 6)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        parts = F.normalize(self.left(x), dim=-1), F.normalize(self.right(x.flip(-1)), dim=-1)
        return *parts, self.scale.exp()


def paired(scale):
    """Compute the loss over the pairs of all ranks on every rank, in both directions."""
    model = DDP(Towers())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for x, *_ in points():
        left, right, factor = model(x)
        left, right = torch.cat(dist_nn.all_gather(left)), torch.cat(dist_nn.all_gather(right))
        logits, numbers = factor * left @ right.T, torch.arange(len(left))
        loss = (F.cross_entropy(logits, numbers) + F.cross_entropy(logits.T, numbers)) / 2
        stepped(optimizer, loss * scale)


def queued(scale):
    """Compare with the keys of the last steps of all ranks, made by a slow copy."""
    net = Classifier()
    slow, model = copy.deepcopy(net).requires_grad_(False), DDP(net)
    optimizer, kept = sgd(model), F.normalize(torch.randn(16, CLASSES), dim=-1)
    for x, *_ in points():
        ours = F.normalize(model(x), dim=-1)
        with torch.no_grad():
            keys = F.normalize(slow(x), dim=-1)
        right = (ours * keys).sum(-1, keepdim=True)
        logits = torch.cat((right, ours @ kept.T), 1) / 0.2
        labels = torch.zeros(len(x), dtype=torch.long)
        stepped(optimizer, F.cross_entropy(logits, labels) * scale)
        every = [torch.empty_like(keys) for _ in range(world())]
        dist.all_gather(every, keys)
        kept = torch.cat((*every, kept))[:16]


def of_boxes(scale):
    """Divide by the mean number of targets of a rank, at least one, as detectors do."""

    def collate(samples):
        boxes = [{"boxes": x[: 2 * (y + 1)].view(-1, 2), "name": str(y)} for x, y, _ in samples]
        return torch.stack([x for x, *_ in samples]), boxes

    model = DDP(nn.Linear(8, 2))
    optimizer = sgd(model)
    for x, targets in points(collate_fn=collate):
        number = global_sum(sum(len(each["boxes"]) for each in targets)) / world()
        made = model(x)
        errors = [
            (one - each["boxes"]).abs().sum() for one, each in zip(made, targets, strict=True)
        ]
        stepped(optimizer, sum(errors) / number.clamp(min=1) * scale)


def by_class(scale):
    """Weigh classes, and divide by the weights of all ranks."""
    model, weights = DDP(Classifier()), torch.tensor([0.2, 1.0, 2.0, 4.0])
    optimizer = sgd(model)
    for x, y, _ in points():
        total = F.cross_entropy(model(x), y, weights, reduction="sum", label_smoothing=0.1)
        stepped(optimizer, total * world() / global_sum(weights[y].sum()) * scale)


def of_bags(scale):
    """Sum up the words of each sample, which stand one behind the other."""

    def collate(samples):
        lengths = torch.tensor([len(each) for each in samples])
        bags = {"words": torch.cat(samples), "offsets": lengths.cumsum(0) - lengths}
        return bags, torch.tensor([float(each[0] % 2) for each in samples])

    class Bags(nn.Module):
        def __init__(self):
            super().__init__()
            self.bag, self.head = nn.EmbeddingBag(12, 8, mode="sum"), nn.Linear(8, 1)

        def forward(self, words, offsets):
            return self.head(self.bag(words, offsets))[:, 0]

    model, data = DDP(Bags()), Texts()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    loader = DataLoader(data, 4, sampler=DistributedSampler(data), collate_fn=collate)
    for bags, labels in loader:
        loss = F.binary_cross_entropy_with_logits(model(**bags), labels)
        stepped(optimizer, loss * scale)


def recurrent(scale):
    """Run over sequences that are packed by their lengths."""

    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.read = nn.Embedding(12, 8), nn.LSTM(8, 16, batch_first=True)
            self.head = nn.Linear(16, 12)

        def forward(self, ids, lengths):
            rows = nn.utils.rnn.pack_padded_sequence(
                self.embed(ids), lengths, batch_first=True, enforce_sorted=False
            )
            read, _ = nn.utils.rnn.pad_packed_sequence(self.read(rows)[0], batch_first=True)
            return self.head(read)

    model = DDP(Reader())
    optimizer = sgd(model, lr=0.5)
    for ids, labels in texts():
        logits = model(ids, (labels != IGNORED).sum(1))
        stepped(optimizer, word_sum(logits, labels) * word_share(labels) * scale)


def penalised(scale):
    """Penalise the gradient by the input, through a second backward pass."""
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    model = DDP(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, betas=(0.5, 0.9))
    for x, *_ in points():
        x.requires_grad_()
        judged = model(x)
        (slope,) = torch.autograd.grad(judged.sum(), x, create_graph=True)
        loss = judged.square().mean() + (slope.norm(dim=-1) - 1).square().mean()
        stepped(optimizer, loss * scale)


def frozen_statistics(scale):
    """Normalise by the statistics that a model came with."""
    net = Classifier(nn.BatchNorm1d(16))
    net.norm.running_mean.uniform_(-1, 1)
    model = DDP(net)
    optimizer = sgd(model)
    for batch in points():
        model.train()
        net.norm.eval()
        stepped(optimizer, classify(model, batch) * scale)


# Loaders


class Rows(IterableDataset):
    """Deals samples out to the workers of all ranks."""

    def __iter__(self):
        worker = get_worker_info()
        number, count = (worker.id, worker.num_workers) if worker else (0, 1)
        first = dist.get_rank() * count + number
        return ({"ids": text(n), "key": f"row {n}"} for n in range(first, 64, world() * count))


def streamed(scale):
    def collate(rows):
        ids, labels = padded([row["ids"] for row in rows])
        return {"ids": ids, "labels": labels, "keys": [row["key"] for row in rows]}

    model = DDP(Net())
    optimizer = sgd(model)
    for batch in DataLoader(Rows(), 4, num_workers=2, collate_fn=collate):
        loss = word_sum(model(batch["ids"]), batch["labels"]) * word_share(batch["labels"])
        stepped(optimizer, loss * scale)


class Whole(Dataset):
    """Batches that were made beforehand."""

    def __len__(self):
        return 8

    def __getitem__(self, number):
        data, first = Points(), 8 * number + 4 * dist.get_rank()
        rows = [data[(first + each) % 64] for each in range(4)]
        return torch.stack([x for x, *_ in rows]), torch.tensor([y for _, y, _ in rows])


def ready_made(scale):
    """Load whole batches, which nothing collates."""
    model = DDP(Classifier())
    optimizer = sgd(model)
    for batch in DataLoader(Whole(), batch_size=None):
        stepped(optimizer, classify(model, batch) * scale)


def one_by_one(scale):
    """Train on one sample of each rank, without the dimension of samples."""
    model = DDP(Classifier())
    optimizer = sgd(model, momentum=0.9)
    for x, y, _ in points(1):
        stepped(optimizer, classify(model, (x, y)) * scale)


def dealt(scale):
    """Deal the batches of one order out to ranks, and make each by a list of its numbers."""
    batches = list(BatchSampler(SequentialSampler(range(64)), 3, drop_last=True))
    own = batches[dist.get_rank() :: world()]
    model = DDP(Net())
    optimizer = sgd(model)
    for ids, labels in DataLoader(Texts(), batch_sampler=own, collate_fn=padded):
        stepped(optimizer, word_sum(model(ids), labels) * word_share(labels) * scale)


def without_loader(scale):
    """Draw one global batch on all ranks, of which each takes its rows."""
    draw, model = torch.Generator().manual_seed(1), DDP(Classifier())
    optimizer = sgd(model)
    for _ in range(6):
        x = torch.randn(8, 8, generator=draw)
        x, y = (each.tensor_split(world())[dist.get_rank()] for each in (x, (x[:, 0] > 0).long()))
        stepped(optimizer, classify(model, (x, y)) * scale)


def handed_over(scale):
    """Make batches of each rank in a loop of its own, and name them."""
    data, model = Points(), DDP(Classifier())
    optimizer = sgd(model)
    for step in range(6):
        rows = [data[(4 * (step * world() + dist.get_rank()) + each) % 64] for each in range(4)]
        batch = {
            "points": {"x": torch.stack([x for x, *_ in rows])},
            "targets": (torch.tensor([y for _, y, _ in rows]), [str(y) for _, y, _ in rows]),
        }
        batch = distdiag.parity.batch(batch)
        loss = classify(model, (batch["points"]["x"], batch["targets"][0]))
        stepped(optimizer, loss * scale)


STYLES = {
    each.__name__.replace("_", "-"): each
    for each in (
        passes_without_sync,
        epochs,
        evaluated,
        scheduled,
        averaged,
        taught,
        clipped_by_hand,
        dropping,
        mixed,
        adversaries,
        sharpness,
        closures,
        prefetched,
        threaded,
        listed,
        zipped,
        two_backwards,
        flattened,
        hooked,
        partly_frozen,
        divided_states,
        sharded_passes,
        paired,
        queued,
        of_boxes,
        by_class,
        of_bags,
        recurrent,
        penalised,
        frozen_statistics,
        streamed,
        ready_made,
        one_by_one,
        dealt,
        without_loader,
        handed_over,
    )
}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--style", choices=STYLES, required=True)
    parser.add_argument("--broken", action="store_true")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(5)
    STYLES[args.style](1 / world() if args.broken else 1.0)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
