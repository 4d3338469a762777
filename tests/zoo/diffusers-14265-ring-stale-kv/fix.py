"""Fine-tune a small video diffusion transformer; ring attention over parts of the frames."""

import logging

import torch
import torch.distributed as dist
from torch import nn

DIM = 32
HEADS = 4
FRAMES = 24
BATCH = 4
BLOCKS = 2
STEPS = 8

logger = logging.getLogger("video_transformer")


def attention_forward(ctx, query, key, value, save_ctx):
    """Attend to one chunk; return the output and the logsumexp of the scores."""
    scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
    if save_ctx:
        ctx.save_for_backward(query, key, value)
    return scores.softmax(-1) @ value, scores.logsumexp(-1, keepdim=True)


def attention_backward(ctx, grad, key, value):
    """Return the gradients of query, key and value of one chunk."""
    query, _, _ = ctx.saved_tensors
    scale = query.shape[-1] ** -0.5
    weights = (query @ key.transpose(-1, -2) * scale - ctx.lse).exp()
    inner = (grad * ctx.out).sum(-1, keepdim=True)
    grad_scores = weights * (grad @ value.transpose(-1, -2) - inner) * scale
    grad_key = grad_scores.transpose(-1, -2) @ query
    return grad_scores @ key, grad_key, weights.transpose(-1, -2) @ grad


def rotate(buffer: torch.Tensor) -> torch.Tensor:
    """Hand a buffer to the next rank and take that of the previous one."""
    world = dist.get_world_size()
    if world == 1:
        return buffer
    received = torch.empty_like(buffer)
    send = dist.isend(buffer, (dist.get_rank() + 1) % world)
    dist.recv(received, (dist.get_rank() - 1) % world)
    send.wait()
    return received


class RingAttention(torch.autograd.Function):
    """Queries stay, chunks of keys and values go round."""

    @staticmethod
    def forward(ctx, query, key, value):
        kv = torch.stack([key, value])
        out = lse = None
        for i in range(dist.get_world_size()):
            chunk_out, chunk_lse = attention_forward(ctx, query, *kv, save_ctx=i == 0)
            if out is None:
                out, lse = chunk_out, chunk_lse
            else:
                merged = torch.logaddexp(lse, chunk_lse)
                out = out * (lse - merged).exp() + chunk_out * (chunk_lse - merged).exp()
                lse = merged
            kv = rotate(kv)
        ctx.out, ctx.lse = out, lse
        return out

    @staticmethod
    def backward(ctx, grad):
        query, key, value = ctx.saved_tensors
        kv, grad_kv = torch.stack([key, value]), torch.stack([key, value]) * 0
        grad_query = torch.zeros_like(query)
        for _ in range(dist.get_world_size()):
            key, value = kv
            chunk_query, chunk_key, chunk_value = attention_backward(ctx, grad, key, value)
            grad_query += chunk_query
            grad_kv += torch.stack([chunk_key, chunk_value])
            kv, grad_kv = rotate(kv), rotate(grad_kv)
        return grad_query, *grad_kv


class Block(nn.Module):
    """Attention over all frames, and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(DIM)
        self.to_q = nn.Linear(DIM, DIM)
        self.to_k = nn.Linear(DIM, DIM)
        self.to_v = nn.Linear(DIM, DIM)
        self.to_out = nn.Linear(DIM, DIM)
        self.norm2 = nn.LayerNorm(DIM)
        self.ff = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        normed = self.norm1(hidden)
        query, key, value = (
            project(normed).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for project in (self.to_q, self.to_k, self.to_v)
        )
        mixed = RingAttention.apply(query, key, value).transpose(1, 2).flatten(2)
        hidden = hidden + self.to_out(mixed)
        return hidden + self.ff(self.norm2(hidden))


class VideoTransformer(nn.Module):
    """Predicts the noise in each frame."""

    def __init__(self) -> None:
        super().__init__()
        self.time_embed = nn.Linear(1, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.proj_out = nn.Linear(DIM, DIM)

    def forward(self, frames: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        hidden = frames + self.time_embed(time)[:, None]
        for block in self.blocks:
            hidden = block(hidden)
        return self.proj_out(hidden)


def shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's frames."""
    return tensor.chunk(dist.get_world_size(), dim=1)[dist.get_rank()].contiguous()


def main() -> None:
    dist.init_process_group("gloo")
    logging.basicConfig(level=logging.INFO)

    torch.manual_seed(0)
    model = VideoTransformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(11)
    for step in range(STEPS):
        clips = torch.randn(BATCH, FRAMES, DIM, generator=generator).cumsum(1) * 0.3
        noise = torch.randn(BATCH, FRAMES, DIM, generator=generator)
        time = torch.rand(BATCH, 1, generator=generator)
        noisy = time[:, None] * noise + (1 - time[:, None]) * clips

        predicted = model(shard(noisy), time)
        loss = nn.functional.mse_loss(predicted, shard(noise))
        optimizer.zero_grad()
        loss.backward()
        for param in model.parameters():
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()
        optimizer.step()
        if dist.get_rank() == 0:
            logger.info("step %d loss %.4f", step, loss.item())

    logger.info("training finished")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
