"""Two hosts on one machine: network namespaces with two cables between them.

Over the first cable the job's store and the monitors speak, over the second one the training.
"""

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import msgspec
import psutil

REPOSITORY = Path(__file__).resolve().parents[3]
PORT = 29500  # the namespaces are new: nobody else is in them
MASTER = "10.77.0.1"
_MARK = "DISTDIAG_TEST_MARK"


class NotPermittedError(Exception):
    """This machine does not let us make what is needed."""


def permitted(*command):
    """Run a command of the network's tools."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise NotPermittedError(f"{command[0]} is not installed") from None
    if done.returncode != 0:
        raise NotPermittedError(f"{' '.join(command)}: {done.stderr.strip()}")


class Hosts:
    """Two hosts and what runs on them; as a context manager it leaves nothing behind."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.mark = uuid.uuid4().hex
        self.names = [f"dd{self.mark[:6]}-{host}" for host in (0, 1)]
        self.processes = []
        self._outputs = []

    def __enter__(self):
        try:
            for name in self.names:
                permitted("ip", "netns", "add", name)
                permitted("ip", "-n", name, "link", "set", "lo", "up")
            for network in (77, 78):
                self._lay_cable(network)
        except NotPermittedError:
            self._remove()
            raise
        return self

    def cable(self, host, network):
        return f"d{self.mark[:6]}{network}{'ab'[host]}"

    def _lay_cable(self, network):
        ends = [self.cable(host, network) for host in (0, 1)]
        permitted("ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for host, (name, end) in enumerate(zip(self.names, ends, strict=True)):
            permitted("ip", "link", "set", end, "netns", name)
            address = f"10.{network}.0.{host + 1}/24"
            permitted("ip", "-n", name, "address", "add", address, "dev", end)
            permitted("ip", "-n", name, "link", "set", end, "up")

    def cut(self):
        """Cut the first cable; the training goes on over the second one."""
        permitted("ip", "-n", self.names[1], "link", "set", self.cable(1, 77), "down")

    def mend(self):
        permitted("ip", "-n", self.names[1], "link", "set", self.cable(1, 77), "up")

    def delay(self, milliseconds):
        """Delay whatever the first cable carries, in both directions."""
        for host, name in enumerate(self.names):
            where = ("dev", self.cable(host, 77), "root", "netem", "delay", f"{milliseconds}ms")
            permitted("tc", "-n", name, "qdisc", "add", *where)

    def run_dir(self, host):
        return self.folder / f"run-{host}"

    def start(self, host, *command, **environment):
        """Start a process on one of the hosts; what it says goes to a file."""
        path = self.folder / f"output-{host}"
        self._outputs.append(path)
        with path.open("w") as output:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.names[host], *command],
                env=self._environment(host) | environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.processes.append(process)

    def _environment(self, host):
        environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
        paths = [str(REPOSITORY), environment.get("PYTHONPATH", "")]
        return environment | {
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "GLOO_SOCKET_IFNAME": self.cable(host, 78),
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            _MARK: self.mark,
        }

    def _tool(self, host, script, args, options):
        run_dir = ("--run-dir", str(self.run_dir(host)), "--report", "json")
        return ["-m", "distdiag.check", *run_dir, *options, str(script), *args]

    def start_torchrun(self, script, *args, options=()):
        """Start one torchrun on each host, with one rank."""
        for host in (0, 1):
            launcher = [
                *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"),
                *("--node-rank", str(host), "--nproc-per-node", "1"),
                *("--master-addr", MASTER, "--master-port", str(PORT)),
            ]
            self.start(host, *launcher, *self._tool(host, script, args, options))

    def start_ranks(self, script, *args, options=()):
        """Start one rank on each host, without a launcher: rank 0 has the job's store."""
        for host in (0, 1):
            self.start(
                host,
                sys.executable,
                *self._tool(host, script, args, options),
                RANK=str(host),
                LOCAL_RANK="0",
                WORLD_SIZE="2",
                LOCAL_WORLD_SIZE="1",
                MASTER_ADDR=MASTER,
                MASTER_PORT=str(PORT),
            )

    def wait(self, timeout_s=100.0):
        """Wait until the job and its monitors have ended; return the statuses of the job."""
        deadline = time.monotonic() + timeout_s
        statuses = [p.wait(max(0.1, deadline - time.monotonic())) for p in self.processes]
        while left := self.marked():
            assert time.monotonic() < deadline, f"still there: {left}\n{self.describe()}"
            time.sleep(0.1)
        return statuses

    def marked(self):
        """Return the processes that were started here and still live."""
        found = []
        for process in psutil.process_iter():
            try:
                is_ours = process.environ().get(_MARK) == self.mark
                if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def monitor(self, host):
        """Return the monitor of a host, as soon as there is one."""
        path = self.run_dir(host) / "attempt-0" / "monitor.pid"
        self.until(path.exists)
        return psutil.Process(int(path.read_text()))

    def output(self, host):
        return self._outputs[host].read_text(errors="replace")

    def report(self):
        """Return the report as it stands, or None."""
        path = self.run_dir(0) / "report.json"
        return msgspec.json.decode(path.read_bytes()) if path.exists() else None

    def until(self, is_true, timeout_s=90.0):
        deadline = time.monotonic() + timeout_s
        while not is_true():
            assert time.monotonic() < deadline, f"it did not become true\n{self.describe()}"
            time.sleep(0.1)

    def until_report(self, is_true):
        self.until(lambda: (report := self.report()) is not None and is_true(report))

    def describe(self):
        """Return what a person needs to see when a test fails."""
        parts = [msgspec.json.format(msgspec.json.encode(self.report())).decode()[-6000:]]
        for host, path in enumerate(self._outputs):
            parts += [f"--- host {host}", path.read_text(errors="replace")[-5000:]]
        for path in sorted(self.folder.glob("run-*/attempt-0/monitor.log")):
            parts += [f"--- {path}", path.read_text()[-3000:]]
        return "\n".join(parts)

    def __exit__(self, *_):
        while alive := self.marked():
            for process in alive:
                try:
                    process.send_signal(signal.SIGKILL)
                except psutil.NoSuchProcess:
                    continue
            psutil.wait_procs(alive, timeout=1.0)
        for process in self.processes:
            process.wait()
        self._remove()

    def _remove(self):
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
