"""A training on one rank in which one part of the tool is made to fail; prints its losses.

With `--attach` it starts the tool itself, after that.
"""

import argparse
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

# Not a function of this file: what the script's own code raises is passed on to it on purpose.
NAMES: dict[str, Callable[..., None]] = {}
exec("def explode(*args, **kwargs): raise RuntimeError('injected')", NAMES)
explode = NAMES["explode"]


def inject(what: str) -> None:
    if what == "nothing":
        return
    from distdiag.probes.base import Probe
    from distdiag.record.recorder import Recorder

    if what.startswith("recorder."):
        setattr(Recorder, what.partition(".")[2], explode)
        return
    install = Probe.install

    def install_broken(self: Probe) -> None:
        if self.name == what:
            self._install = explode
        install(self)

    Probe.install = install_broken


def train() -> list[str]:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.utils.data import DataLoader

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    for batch in DataLoader(torch.randn(12, 4), batch_size=4):
        loss = model(batch).square().mean()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, async_op=True).wait()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
    with tempfile.TemporaryDirectory() as folder:
        torch.save(model.state_dict(), Path(folder, "model.pt"))
    dist.barrier()
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    parser = argparse.ArgumentParser()
    parser.add_argument("what")
    parser.add_argument("--attach", metavar="RUN_DIR")
    options = parser.parse_args()
    inject(options.what)
    if options.attach:
        import distdiag

        distdiag.attach(run_dir=options.attach, report=("json",))
    print("losses", *train())
