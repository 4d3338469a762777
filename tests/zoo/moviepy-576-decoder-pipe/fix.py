"""Train on frames that a decoder process delivers through a pipe."""

import logging
import subprocess
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

HEIGHT, WIDTH = 24, 32
FRAME_BYTES = HEIGHT * WIDTH

# What a command-line decoder does: frames to stdout, complaints to stderr.
DECODER = """
import sys
clip, late_frames = int(sys.argv[1]), int(sys.argv[2])
for number in range(late_frames):
    print(f"[mp4 @ 0x55d0] non monotonically increasing dts in frame {number}", file=sys.stderr)
sys.stdout.buffer.write(bytes([clip % 256]) * int(sys.argv[3]))
"""

logger = logging.getLogger("frames")


class ClipDataset(Dataset):
    """First frames of clips; `late_frames` counts the broken time stamps of each clip."""

    def __init__(self, late_frames: list[int]) -> None:
        self.late_frames = late_frames

    def __len__(self) -> int:
        return len(self.late_frames)

    def __getitem__(self, index: int) -> torch.Tensor:
        command = [sys.executable, "-S", "-c", DECODER]
        command += [str(index), str(self.late_frames[index]), str(FRAME_BYTES)]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdout=pipe, stderr=subprocess.DEVNULL) as decoder:
            frame = decoder.stdout.read(FRAME_BYTES)
        return torch.frombuffer(bytearray(frame), dtype=torch.uint8).float() / 255


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    logging.basicConfig(level=logging.INFO)

    # One clip of the second shard was cut badly.
    clips = ClipDataset([0, 3, 0, 12, 0, 1, 4000 if rank == 1 else 0, 2])
    loader = DataLoader(clips, batch_size=2)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(FRAME_BYTES, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step, frames in enumerate(loader):
        loss = model(frames).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        logger.info("rank %d step %d loss %.4f", rank, step, loss.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
