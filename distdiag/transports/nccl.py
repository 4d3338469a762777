"""Gathers the bytes of several processes at one of them, over NCCL or over gloo."""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from distdiag.transports.carriers import Errand

ROUND_BYTES: Final = 64 << 20
"""So much arrives at once, from all processes together."""


class Gathering:
    """One process group of carriers, made for one errand."""

    def __init__(self, errand: Errand) -> None:
        """Meet the other carriers.

        Raises:
            RuntimeError: they do not all come in time, or the backend cannot be used here.

        """
        carriage = errand.carriage
        patience = timedelta(seconds=carriage.deadline_s)
        self._number = errand.number
        self._num_carriers = len(carriage.groups)
        self._base = TCPStore(
            carriage.host,
            carriage.port,
            self._num_carriers,
            errand.number == 0,
            patience,
            wait_for_workers=False,
            master_listen_fd=errand.descriptor,
        )
        # Under the token, so that nobody takes part who was not asked.
        self._store = PrefixStore(carriage.token, self._base)
        self._device = torch.device("cpu")
        if carriage.backend == "nccl":
            if not torch.cuda.is_available():
                raise RuntimeError("torch sees no GPU here")
            self._device = torch.device("cuda", errand.device % torch.cuda.device_count())
            torch.cuda.set_device(self._device)
        dist.init_process_group(
            carriage.backend,
            store=self._store,
            rank=errand.number,
            world_size=self._num_carriers,
            timeout=patience,
        )

    def gather(self, payload: bytes, keep: Callable[[int, bytes], None]) -> None:
        """Bring the payloads of all to the first carrier, which hands them to `keep` by number.

        When this returns, the first one has kept everything.
        """
        sizes = self._exchange_sizes(len(payload))
        share = max(1, min(max(sizes), ROUND_BYTES // self._num_carriers))
        pieces: list[list[bytes]] = [[] for _ in sizes]
        for start in range(0, max(sizes), share):
            piece = torch.zeros(share, dtype=torch.uint8, device="cpu")
            data = payload[start : start + share]
            if data:
                piece[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            for number, part in enumerate(self._round(piece)):
                pieces[number].append(part[: max(0, sizes[number] - start)])
        if self._number == 0:
            for number, parts in enumerate(pieces):
                keep(number, b"".join(parts))
        self._agree_on_the_end()

    def _exchange_sizes(self, size: int) -> list[int]:
        self._store.set(f"size-{self._number}", str(size))
        return [int(self._store.get(f"size-{n}")) for n in range(self._num_carriers)]

    def _round(self, piece: torch.Tensor) -> list[bytes]:
        sent = piece.to(self._device)
        if self._number != 0:
            dist.gather(sent, None, dst=0)
            if sent.is_cuda:
                torch.cuda.synchronize(self._device)
            return []
        arrived = [torch.empty_like(sent) for _ in range(self._num_carriers)]
        dist.gather(sent, arrived, dst=0)
        return [tensor.cpu().numpy().tobytes() for tensor in arrived]

    def _agree_on_the_end(self) -> None:
        if self._number != 0:
            self._store.get("kept")
            self._store.add("left", 1)
            return
        self._store.set("kept", "1")
        # The store is in this process: it must not go before the others have read that.
        while self._store.add("left", 0) < self._num_carriers - 1:
            time.sleep(0.005)
