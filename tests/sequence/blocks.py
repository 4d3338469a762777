"""Building blocks of sequence parallelism, each with the ways in which it can be wrong."""

from functools import partial

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_functions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.functional import pad, scaled_dot_product_attention


def device():
    """Return the device of all tensors; threads of autograd know of no default."""
    on_gpus = dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpus else torch.device("cpu")


def size():
    return dist.get_world_size()


def rank():
    return dist.get_rank()


def raw_gather(part):
    parts = [torch.empty_like(part) for _ in range(size())]
    dist.all_gather(parts, part.detach().contiguous())
    return parts


def layout(length, order):
    """The positions of each rank."""
    places = torch.arange(length, device=device())
    if order == "contiguous":
        return list(places.chunk(size()))
    if order == "interleaved":
        return [places[r :: size()] for r in range(size())]
    chunks = places.chunk(2 * size())
    return [torch.cat([chunks[r], chunks[-1 - r]]) for r in range(size())]


class Narrow(torch.autograd.Function):
    """Takes places along a dim; `back` says what becomes of the gradient of this part.

    none: it stays where the part was; gather: all ranks get the gradients of all parts.
    """

    @staticmethod
    def forward(ctx, x, places, dim, back, factor):
        ctx.saved = (x.shape, places, dim, back, factor)
        return x.index_select(dim, places).clone()

    @staticmethod
    def backward(ctx, grad):
        shape, places, dim, back, factor = ctx.saved
        whole = grad.new_zeros(shape)
        if back == "gather":
            order = "contiguous"
            for other, part in zip(layout(shape[dim], order), raw_gather(grad), strict=True):
                whole.index_copy_(dim, other, part)
        else:
            whole.index_copy_(dim, places, grad)
        return whole * factor, None, None, None, None


class Gather(torch.autograd.Function):
    """Joins the parts; `back` says what becomes of the gradient of the whole.

    slice: a rank takes its own part. sum: it takes the sum of all ranks' gradients of its part.
    next: it takes the part of the next rank.
    """

    @staticmethod
    def forward(ctx, part, dim, order, back, factor):
        length = part.shape[dim] * size()
        ctx.saved = (dim, order, back, factor, length)
        whole = torch.cat(raw_gather(part), dim)
        return whole.index_select(dim, torch.cat(layout(length, order)).argsort())

    @staticmethod
    def backward(ctx, grad):
        dim, order, back, factor, length = ctx.saved
        grad = grad.contiguous()
        if back == "sum":
            grad = grad.clone()
            dist.all_reduce(grad)
        owner = (rank() + 1) % size() if back == "next" else rank()
        own = grad.index_select(dim, layout(length, order)[owner])
        return own * factor, None, None, None, None


def split(x, *, dim=1, order="contiguous", back="none", shift=0, factor=1.0):
    """A rank's part of the sequence; `shift`: the part of the rank so many further."""
    places = layout(x.shape[dim], order)[(rank() + shift) % size()]
    return Narrow.apply(x, places, dim, back, factor)


def gather(part, *, dim=1, order="contiguous", back="slice", factor=1.0):
    return Gather.apply(part, dim, order, back, factor)


def joined(part, *, join, dim=1):
    """A gather with a gradient for its own part, whose parts are put together by `join`."""
    parts = raw_gather(part)
    parts[rank()] = part
    return join(parts, dim)


def window(x, *, begin, dim=1):
    """A part of even size, `begin` places away from where it should begin, within the whole."""
    step = x.shape[dim] // size()
    first = min(max(rank() * step + begin, 0), x.shape[dim] - step)
    return x.narrow(dim, first, step).clone()


def padded_split(x, *, front=False, dim=1):
    missing = -x.shape[dim] % size()
    widths = (missing, 0) if front else (0, missing)
    x = pad(x, (0, 0, 0, 0, *widths))
    return split(x, dim=dim)


def cut(part, *, length, dim=1):
    """A gather that cuts padding behind off."""
    return gather(part, dim=dim).narrow(dim, 0, length)


def dropping_split(x, *, dim=1):
    """The tail that cannot be divided is dropped."""
    return split(x.narrow(dim, 0, x.shape[dim] // size() * size()), dim=dim)


def alias_gather(part):
    parts = [torch.empty_like(part)] * size()
    dist.all_gather(parts, part.detach().contiguous())
    parts = [each.clone() for each in parts]
    return torch.cat(parts, 1)


def viewed_gather(part):
    """Joins along the first dimension and only views the result as rows."""
    whole = torch.cat(raw_gather(part), 0)
    return whole.view(part.shape[0], part.shape[1] * size(), *part.shape[2:])


def summed_gather(part, *, stays):
    """Adds buffers of all ranks, in which the part is put once (or, `stays`, everywhere)."""
    step = part.shape[1]
    length = step * size()
    whole = part.repeat(1, size(), *[1] * (part.ndim - 2)) if stays else None
    if whole is None:
        whole = part.new_zeros(part.shape[0], length, *part.shape[2:])
        whole[:, rank() * step : (rank() + 1) * step] = part
    whole = whole.detach().clone()
    dist.all_reduce(whole)
    return whole


def torch_gather(part):
    return torch.cat(dist_functions.all_gather(part.contiguous()), 1)


def redistributed(x, before, after):
    """What torch's own tensors of many ranks do."""
    mesh = init_device_mesh(device().type, (size(),))
    spread = DTensor.from_local(x, mesh, [before], run_check=False)
    return spread.redistribute(placements=[after]).to_local()


dtensor_split = partial(redistributed, before=Replicate(), after=Shard(1))
dtensor_gather = partial(redistributed, before=Shard(1), after=Replicate())


# Attention over parts of the sequence, with the dimensions batch, length, heads and hidden.


def positions(length, order, owner=None):
    return layout(length * size(), order)[rank() if owner is None else owner]


def attend(query, key, value, mask):
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key)
    scores = scores.masked_fill(~mask, float("-inf"))
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), value)


def visible(mine, theirs, *, causal, documents, length):
    """Which tokens see which; a token sees itself at least."""
    mask = torch.ones(len(mine), len(theirs), dtype=torch.bool)
    if causal:
        mask &= mine[:, None] >= theirs[None, :]
    if documents:
        number = torch.repeat_interleave(torch.arange(len(documents)), torch.tensor(documents))
        mask &= number[mine][:, None] == number[theirs][None, :]
    if length:
        mask &= (theirs < length)[None, :]
    return mask


def gathered_attention(query, key, value, *, order="contiguous", **seen):
    """Gathers keys and values, whose gradients are summed over the ranks."""
    key, value = (gather(each, back="sum") for each in (key, value))
    theirs = torch.cat(layout(key.shape[1], order))
    mine = positions(query.shape[1], seen.pop("believed", order))
    options = {"causal": False, "documents": (), "length": 0} | seen
    return attend(query, key, value, visible(mine, theirs, **options))


def torch_attention(query, key, value):
    """Torch's own, causal, over gathered keys and values."""
    begin = rank() * query.shape[1]
    key, value = torch_gather(key), torch_gather(value)
    mine = torch.arange(begin, begin + query.shape[1])
    mask = mine[:, None] >= torch.arange(key.shape[1])[None, :]
    heads_first = [each.transpose(1, 2) for each in (query, key, value)]
    return scaled_dot_product_attention(*heads_first, attn_mask=mask).transpose(1, 2)


def local_attention(query, key, value):
    mask = torch.ones(query.shape[1], key.shape[1], dtype=torch.bool)
    return attend(query, key, value, mask)


class Exchange(torch.autograd.Function):
    """All-to-all that cuts one dim and joins another; `turned`: from the ranks in reverse order."""

    @staticmethod
    def forward(ctx, x, cut_dim, join_dim, turned):
        ctx.saved = (cut_dim, join_dim, turned)
        return exchanged(x, cut_dim, join_dim, turned)

    @staticmethod
    def backward(ctx, grad):
        cut_dim, join_dim, turned = ctx.saved
        return exchanged(grad, join_dim, cut_dim, turned), None, None, None


def exchanged(x, cut_dim, join_dim, turned=False):
    # gloo has no all_to_all of lists.
    parts = [each.chunk(size(), cut_dim)[rank()] for each in raw_gather(x)]
    return torch.cat(parts[::-1] if turned else parts, join_dim)


def ulysses(query, key, value, *, causal=False, turned_back=False, mask_on=None):
    """Each rank has all tokens of some heads meanwhile."""
    query, key, value = (Exchange.apply(each, 2, 1, False) for each in (query, key, value))
    causal = causal and (mask_on is None or rank() == mask_on)
    places = torch.arange(query.shape[1])
    seen = visible(places, places, causal=causal, documents=(), length=0)
    out = attend(query, key, value, seen)
    return Exchange.apply(out, 1, 2, turned_back)


class Ring(torch.autograd.Function):
    """Averages over visible values that come round in a ring (queries and keys are zero).

    `skips` leaves that many of the last steps out, `again` counts the own part twice, `stale` is a
    backward pass that takes the part of the first step in all of them.
    """

    @staticmethod
    def forward(ctx, value, order, causal, faults):
        ctx.saved = (order, causal, faults, value.shape)
        total, count = torch.zeros_like(value), 0
        for owner, part in Ring.steps(raw_gather(value), faults):
            seen = Ring.mask(value.shape[1], order, causal, owner)
            total = total + torch.einsum("qk,bkhd->bqhd", seen.to(value.dtype), part)
            count = count + seen.sum(-1)
        ctx.count = count[None, :, None, None]
        return total / ctx.count

    @staticmethod
    def steps(parts, faults):
        owners = [(rank() - step) % size() for step in range(size() - faults.get("skips", 0))]
        if faults.get("again"):
            owners.append(rank())
        return [(owner, parts[owner]) for owner in owners]

    @staticmethod
    def mask(length, order, causal, owner):
        if not causal:
            return torch.ones(length, length, dtype=torch.bool, device=device())
        mine, theirs = (positions(length, order, each) for each in (rank(), owner))
        return mine[:, None] >= theirs[None, :]

    @staticmethod
    def backward(ctx, grad):
        order, causal, faults, shape = ctx.saved
        grad = grad / ctx.count
        sent = grad.new_zeros(size(), *shape)
        for owner, _ in Ring.steps([None] * size(), faults):
            seen = Ring.mask(shape[1], order, causal, owner).to(grad.dtype)
            target = rank() if faults.get("stale") else owner
            sent[target] += torch.einsum("qk,bqhd->bkhd", seen, grad)
        dist.all_reduce(sent)
        return sent[rank()], None, None, None


def ring(query, key, value, *, order="contiguous", causal=False, **faults):
    return Ring.apply(value, order, causal, faults)


def both(split_options=None, gather_options=None):
    """A split and its gather, with these options."""
    return partial(split, **split_options or {}), partial(gather, **gather_options or {})
