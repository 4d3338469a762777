"""Fine-tune a small image model whose text and image tokens attend to one another jointly."""

import logging

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

VOCAB = 40
DIM = 32
HEADS = 4
TEXT_LEN = 8
IMAGE_LEN = 24
BATCH = 4
BLOCKS = 2
STEPS = 6

logger = logging.getLogger("joint_transformer")


class Captions(Dataset[dict[str, torch.Tensor]]):
    """Noisy image tokens with captions of different lengths."""

    def __len__(self) -> int:
        return BATCH * STEPS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        prompt = torch.randint(1, VOCAB, (TEXT_LEN,), generator=generator)
        length = int(torch.randint(2, TEXT_LEN - 1, (), generator=generator))
        mask = torch.arange(TEXT_LEN) < length
        image = torch.randn(IMAGE_LEN, DIM, generator=generator) + prompt[0] / VOCAB
        noise = torch.randn(IMAGE_LEN, DIM, generator=generator)
        return {"prompt": prompt * mask, "mask": mask, "latents": image + noise, "target": noise}


class ExchangeHeads(torch.autograd.Function):
    """Exchange parts of the sequence for heads (or, `inverse`, heads for parts)."""

    @staticmethod
    def forward(ctx, tensor, inverse):
        ctx.inverse = inverse
        return all_to_all(tensor, inverse)

    @staticmethod
    def backward(ctx, grad):
        return all_to_all(grad, not ctx.inverse), None


def all_to_all(tensor: torch.Tensor, inverse: bool) -> torch.Tensor:
    """Cut one of batch, length, heads, width and join another over the ranks."""
    cut, join = (1, 2) if inverse else (2, 1)
    parts = torch.stack(tensor.chunk(dist.get_world_size(), dim=cut))
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts)
    return torch.cat(list(received), dim=join)


def gather_mask(mask: torch.Tensor) -> torch.Tensor:
    """Join the masks of all ranks."""
    parts = [torch.empty_like(mask) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mask.contiguous())
    return torch.cat(parts, dim=1)


def shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a stream."""
    return tensor.chunk(dist.get_world_size(), dim=1)[dist.get_rank()].contiguous()


class JointAttention(nn.Module):
    """Attention over the tokens of both streams."""

    def __init__(self) -> None:
        super().__init__()
        self.to_qkv = nn.Linear(DIM, 3 * DIM)
        self.add_qkv = nn.Linear(DIM, 3 * DIM)
        self.to_out = nn.Linear(DIM, DIM)
        self.to_add_out = nn.Linear(DIM, DIM)

    def forward(self, image, text, mask) -> tuple[torch.Tensor, torch.Tensor]:
        joint = torch.cat([self.add_qkv(text), self.to_qkv(image)], dim=1)
        heads = ExchangeHeads.apply(joint.unflatten(-1, (HEADS, -1)), False)
        query, key, value = heads.transpose(1, 2).chunk(3, dim=-1)
        allowed = gather_mask(mask)[:, None, None]
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=allowed)
        mixed = ExchangeHeads.apply(mixed.transpose(1, 2), True).flatten(2)
        text, image = mixed.split([text.shape[1], image.shape[1]], dim=1)
        return self.to_out(image), self.to_add_out(text)


class Block(nn.Module):
    """Joint attention and an MLP for the image."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.attn = JointAttention()
        self.ff = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))

    def forward(self, image, text, mask) -> tuple[torch.Tensor, torch.Tensor]:
        image_out, text_out = self.attn(self.norm(image), self.norm(text), mask)
        image = image + image_out
        return image + self.ff(image), text + text_out


class JointTransformer(nn.Module):
    """Predicts the noise of image tokens from them and a caption."""

    def __init__(self) -> None:
        super().__init__()
        self.context_embedder = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.proj_out = nn.Linear(DIM, DIM)

    def forward(self, latents, prompt, mask) -> torch.Tensor:
        image_mask = torch.ones(latents.shape[:2], dtype=torch.bool)
        mask = torch.cat([shard(mask), shard(image_mask)], dim=1)
        image, text = shard(latents), self.context_embedder(shard(prompt))
        for block in self.blocks:
            image, text = block(image, text, mask)
        return self.proj_out(image)


def main() -> None:
    dist.init_process_group("gloo")
    logging.basicConfig(level=logging.INFO)

    torch.manual_seed(0)
    model = JointTransformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step, batch in enumerate(DataLoader(Captions(), batch_size=BATCH)):
        predicted = model(batch["latents"], batch["prompt"], batch["mask"])
        loss = nn.functional.mse_loss(predicted, shard(batch["target"]))
        optimizer.zero_grad()
        loss.backward()
        for param in model.parameters():
            if param.grad is not None:
                dist.all_reduce(param.grad)
                param.grad /= dist.get_world_size()
        optimizer.step()
        if dist.get_rank() == 0:
            logger.info("step %d loss %.4f", step, loss.item())

    logger.info("training finished")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
