"""Flight recorders of made-up ranks, which write dumps as torch does."""

import json
import pickle

TORCH = "/opt/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"
BEGIN_NS = 1_700_000_000_000_000_000
SECOND = 1_000_000_000


class FlightRecorder:
    """The recorder of one rank. Calls are completed unless it is said otherwise."""

    def __init__(self, rank, world, *, backend="nccl", version="2.10", capacity=2000):
        self.rank = rank
        self.backend = backend
        self.version = version
        self.capacity = capacity
        self.entries = []
        self.config = {}
        self.groups = {}
        self._frames = {}
        self._seq_ids = {}
        self._p2p_seq_ids = {}
        self.group("0", "default_pg", range(world))

    def group(self, name, desc, ranks):
        self.groups[name] = (name, desc)
        ranks = str(list(ranks)) if self.backend == "nccl" else "[]"
        key = name if self.backend == "nccl" else ""
        self.config[key] = {"name": key, "desc": desc if key else "", "ranks": ranks}

    def call(self, op="all_reduce", sizes=((4,),), outputs=None, *, group="0", line=10, **fields):
        """Record a collective; `fields` replace those of the entry."""
        if "collective_seq_id" not in fields:
            self._seq_ids[group] = self._seq_ids.get(group, 0) + 1
        return self._add(op, sizes, outputs, group, line, fields)

    def same_call(self, op, sizes=(), outputs=None, *, group="0", line=10, **fields):
        """Record a further part of the collective before, which is issued as one with it."""
        return self._add(op, sizes, outputs, group, line, fields)

    def message(self, op, sizes=((4,),), *, group="0", line=10, batch=False, **fields):
        """Record ``send 0->1``; a message of a batch has the number of the one before."""
        if not batch:
            self._p2p_seq_ids[group] = self._p2p_seq_ids.get(group, 0) + 1
        return self._add(op, sizes, sizes, group, line, {"is_p2p": True} | fields)

    def _add(self, op, sizes, outputs, group, line, fields):
        number = len(self.entries)
        entry = {
            "frames": [self._frame("all_reduce", TORCH, 99), self._frame("main", "train.py", line)],
            "record_id": number,
            "pg_id": int(group) if group.isdecimal() else 7,
            "process_group": self.groups[group],
            "thread_name": "python",
            "thread_id": "140302237354880",
            "collective_seq_id": self._seq_ids.get(group, 0),
            "p2p_seq_id": self._p2p_seq_ids.get(group, 0),
            "op_id": number,
            "profiling_name": f"{self.backend}:{op}",
            "time_created_ns": BEGIN_NS + number * SECOND,
            "input_sizes": [list(size) for size in sizes],
            "input_dtypes": ["Float"] * len(sizes),
            "output_sizes": [list(size) for size in (sizes if outputs is None else outputs)],
            "output_dtypes": ["Float"] * len(sizes if outputs is None else outputs),
            "state": "completed" if self.backend == "nccl" else "scheduled",
            "time_discovered_started_ns": None,
            "time_discovered_completed_ns": None,
            "retired": True,
            "timeout_ms": 600_000,
            "is_p2p": False,
        } | fields
        self.entries.append(entry)
        return entry

    def _frame(self, name, filename, line):
        fresh = {"name": name, "filename": filename, "line": line}
        return self._frames.setdefault((name, filename, line), fresh)

    def pending(self):
        """The newest entry has not ended."""
        self.entries[-1] |= {"state": "scheduled", "retired": False}
        return self

    def dump(self):
        return {
            "version": self.version,
            "pg_config": self.config,
            "pg_status": {},
            "entries": self.entries[-self.capacity :],
        }

    def pickle(self):
        return pickle.dumps(self.dump(), protocol=2)

    def json(self):
        """The JSON form has no stacks, and 0 where a time is unknown."""
        dump = self.dump()
        dump["entries"] = [
            {key: 0 if value is None else value for key, value in entry.items() if key != "frames"}
            for entry in dump["entries"]
        ]
        return json.dumps(dump).encode()


def recorders(world, **options):
    """One recorder for each rank."""
    return [FlightRecorder(rank, world, **options) for rank in range(world)]


def write_dumps(folder, ranks, name="nccl_trace_rank_"):
    """Write the dumps of all ranks into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for recorder in ranks:
        (folder / f"{name}{recorder.rank}").write_bytes(recorder.pickle())
    return folder
