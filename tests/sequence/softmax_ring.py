"""Ring attention with a backward pass written by hand, and the ways in which that can be wrong."""

import torch
import torch.distributed as dist

from tests.sequence.blocks import positions, rank, raw_gather, size, visible


class SoftmaxRing(torch.autograd.Function):
    """Softmax attention over parts that come round.

    `stale`: the backward pass takes the own keys and values in all steps. `local`: it takes the
    product of gradient and output over the own part only. `unscaled`: it forgets the scale.
    """

    @staticmethod
    def forward(ctx, query, key, value, causal, order, faults):  # noqa: PLR0913 (torch passes each)
        ctx.causal, ctx.order, ctx.faults = causal, order, faults
        keys, values = raw_gather(key), raw_gather(value)
        masks = [SoftmaxRing.mask(ctx, query.shape[1], owner) for owner in range(size())]
        scores = torch.cat(
            [SoftmaxRing.scores(query, k, mask) for k, mask in zip(keys, masks, strict=True)], -1
        )
        weights = scores.softmax(-1)
        out = torch.einsum("bhqk,bkhd->bqhd", weights, torch.cat(values, 1))
        ctx.save_for_backward(query, key, value, out, scores.logsumexp(-1, keepdim=True))
        return out

    @staticmethod
    def mask(ctx, length, owner):
        mine, theirs = (positions(length, ctx.order, each) for each in (rank(), owner))
        return visible(mine, theirs, causal=ctx.causal, documents=(), length=0)

    @staticmethod
    def scores(query, key, mask):
        scores = torch.einsum("bqhd,bkhd->bhqk", query, key) * query.shape[-1] ** -0.5
        return scores.masked_fill(~mask, float("-inf"))

    @staticmethod
    def backward(ctx, grad):
        query, key, value, out, total = ctx.saved_tensors
        keys, values = raw_gather(key), raw_gather(value)
        grad_query = torch.zeros_like(query)
        sent = torch.zeros(2, size(), *key.shape, dtype=key.dtype)
        for owner in range(size()):
            used = rank() if ctx.faults.get("stale") else owner
            scores = SoftmaxRing.scores(
                query, keys[used], SoftmaxRing.mask(ctx, query.shape[1], owner)
            )
            weights = (scores - total).exp()
            grad_weights = torch.einsum("bqhd,bkhd->bhqk", grad, values[used])
            if ctx.faults.get("local"):
                inner = (grad_weights * weights).sum(-1, keepdim=True)
            else:
                inner = torch.einsum("bqhd,bqhd->bhq", grad, out)[..., None]
            scale = 1.0 if ctx.faults.get("unscaled") else query.shape[-1] ** -0.5
            grad_scores = weights * (grad_weights - inner) * scale
            grad_query += torch.einsum("bhqk,bkhd->bqhd", grad_scores, keys[used])
            sent[0, owner] = torch.einsum("bhqk,bqhd->bkhd", grad_scores, query)
            sent[1, owner] = torch.einsum("bhqk,bqhd->bkhd", weights, grad)
        dist.all_reduce(sent)
        return grad_query, sent[0, rank()], sent[1, rank()], None, None, None


def softmax_ring(query, key, value, *, causal=False, order="contiguous", **faults):
    return SoftmaxRing.apply(query, key, value, causal, order, faults)
