"""Jobs of several nodes without torch: ranks and monitors of each node, all on this machine."""

import json
import os
import time
from contextlib import ExitStack

import msgspec

from distdiag.record.run_dir import Launch, LaunchFile, write_atomically
from tests.fake_ranks import FakeJob


class FakeNode(FakeJob):
    """One node of a job: its ranks, its monitor, its run directory."""

    def __init__(self, root, bodies, *, first, world, **options):
        super().__init__(root, bodies, **options)
        self.first, self.world = first, world

    def _write_launch_file(self):
        launch = Launch(
            rank=self.first,
            local_rank=0,
            world_size=self.world,
            local_world_size=len(self._bodies),
            attempt=self.run_dir.attempt,
            max_attempts=1,
            parent_pid=self._launcher,
            identity="test",
            started_s=time.time(),
            master_addr="127.0.0.1",
        )
        launch_file = LaunchFile(
            launch=launch,
            command=("train.py",),
            config=json.loads(self.config.to_json()),
            cwd=str(self.run_dir.root),
        )
        write_atomically(self.run_dir.launch, msgspec.json.encode(launch_file))

    def _start_rank(self, rank, body):
        return super()._start_rank(self.first + rank, body)


class FakeCluster:
    """Two nodes; the second one is told where the reporter listens, as a rank would do it."""

    def __init__(self, folder, bodies, *, is_connected=True, **options):
        half = len(bodies) // 2
        self.nodes = [
            FakeNode(folder / f"node-{n}", part, first=n * half, world=len(bodies), **options)
            for n, part in enumerate((bodies[:half], bodies[half:]))
        ]
        self._is_connected = is_connected
        self._stack = ExitStack()

    def __enter__(self):
        with self._stack as stack:
            for node in self.nodes:
                stack.enter_context(node)
            if self._is_connected:
                self.introduce()
            self._stack = stack.pop_all()
        return self

    def introduce(self):
        """Hand the address of the reporter to the second node."""
        first, second = (node.run_dir.reporter for node in self.nodes)
        self.nodes[0].until(first.exists)
        write_atomically(second, first.read_bytes())

    def wait(self, timeout_s=40):
        """Wait until both monitors have ended by themselves; return what each said."""
        return [node.wait(timeout_s) for node in self.nodes]

    @property
    def ranks(self):
        return [rank for node in self.nodes for rank in node.ranks]

    def kill(self, rank):
        self.ranks[rank].kill()
        self.ranks[rank].wait()

    def report(self):
        return self.nodes[0].report()

    def until_report(self, is_true, timeout_s=60):
        self.nodes[0].until_report(is_true, timeout_s)

    def __exit__(self, *error):
        return self._stack.__exit__(*error)


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
