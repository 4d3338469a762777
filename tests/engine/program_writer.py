"""Makes up small random programs of several ranks."""

from __future__ import annotations

import random

from tests.engine.programs import FROM_ROOT, TO_ROOT, Access, Call, Program, Step

TO_ALL = ("barrier", "all_reduce", "all_gather", "all_to_all", "monitored_barrier")
FILES = ("/d/a", "/d/b", "/d/sub/c")
ACTIONS = (
    *("read", "read", "write", "write", "write", "append", "rename", "remove"),
    *("list", "link", "remove-tree", "make-dir"),
)


class Writer:
    """Makes up a program that can always go on, unless steps are exchanged afterwards."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.num_ranks = self.chance.choice((2, 2, 3, 3, 4, 5, 6))
        self.program = Program([[] for _ in range(self.num_ranks)])
        self.pending: list[list[Step]] = [[] for _ in range(self.num_ranks)]
        self.open: list[list[Step]] = [[] for _ in range(self.num_ranks)]
        self.counts: dict[tuple, int] = {}
        self.has_folder = False
        self.num_keys = 0
        self.uses_streams = self.chance.random() < 0.3
        self.unique_lines = self.chance.random() < 0.7

    def write(self) -> Program:
        for rank in range(self.num_ranks if self.uses_streams else 0):
            self.step(rank, Step("sync"))
        most = {2: 12, 3: 12, 4: 11, 5: 10, 6: 10}[self.num_ranks]
        for _ in range(self.chance.randint(5, most)):
            self.act()
            if self.uses_streams and self.chance.random() < 0.2:
                self.step(self.rank(), Step("sync"))
            if self.chance.random() < 0.3:
                self.wait_for_one()
            if self.chance.random() < 0.6:
                self.close(self.rank())
        for rank in range(self.num_ranks):
            self.close(rank)
        if self.chance.random() < 0.15:
            steps = self.program.steps[self.rank()]
            del steps[self.chance.randint(0, len(steps)) :]
        return self.program

    def act(self) -> None:
        """Let one rank, or several together, do one more thing."""
        acts = (self.access, self.collective, self.message, self.store)
        self.chance.choices(acts, (5, 3, 1, 1))[0]()

    def rank(self) -> int:
        return self.chance.randrange(self.num_ranks)

    def step(self, rank: int, step: Step) -> None:
        steps = self.program.steps[rank]
        is_native = step.kind == "issue" and step.call.api is None
        waiting = [s for s in self.pending[rank] if s.kind == "native-wait"]
        if waiting and not is_native:
            # C++ has waited for its own calls when Python goes on.
            steps += waiting
            self.pending[rank] = [s for s in self.pending[rank] if s.kind != "native-wait"]
        steps.append(step)

    def wait_for_one(self) -> None:
        rank = self.rank()
        waits = [s for s in self.pending[rank] if s.kind in ("wait", "waited")]
        if waits:
            chosen = self.chance.choice(waits)
            self.pending[rank].remove(chosen)
            self.program.steps[rank].append(chosen)

    def number(self, *lane: object) -> int:
        number = self.counts.get(lane, 0)
        self.counts[lane] = number + 1
        return number

    def collective(self) -> None:
        members = tuple(range(self.num_ranks))
        if self.chance.random() < 0.4:
            size = self.chance.randint(min(2, self.num_ranks), self.num_ranks)
            members = tuple(sorted(self.chance.sample(members, size)))
        backend = "nccl" if self.uses_streams and self.chance.random() < 0.5 else "gloo"
        op = self.chance.choice((*TO_ALL, *FROM_ROOT, *TO_ROOT, "all_to_all_single", "create"))
        root = self.chance.choice(members) if op in (*FROM_ROOT, *TO_ROOT) else None
        if op == "create":
            members = tuple(range(self.num_ranks))
        is_async = op != "create" and self.chance.random() < 0.3
        is_native = is_async and backend == "gloo" and self.chance.random() < 0.3
        order = list(members)
        self.chance.shuffle(order)
        lane = ("create",) if op == "create" else (backend, members)
        for rank in order:
            call = Call(lane, self.number(*lane, rank), op, members, root, backend)
            call.is_async = is_async
            call.api = None if is_native else "call"
            if op == "all_to_all_single":
                call.splits = tuple(self.chance.randint(0, 1) for _ in members)
            self.put(rank, call, is_async=is_async, is_native=is_native)

    def put(self, rank: int, call: Call, *, is_async: bool, is_native: bool = False) -> None:
        self.step(rank, Step("issue", call))
        wait = Step("waited" if call.is_on_stream else "wait", call)
        if is_native:
            self.pending[rank].append(Step("native-wait", call))
        elif is_async:
            self.pending[rank].append(wait)
        else:
            self.program.steps[rank].append(wait)

    def message(self) -> None:
        source, destination = self.chance.sample(range(self.num_ranks), 2)
        members = tuple(range(self.num_ranks))
        lane = ("message", source, destination)
        for rank, op, peer in ((source, "send", destination), (destination, "recv", source)):
            call = Call(lane, self.number(op, *lane), op, members, None, "gloo", peer=peer)
            call.is_async = self.chance.random() < 0.3
            self.put(rank, call, is_async=call.is_async)

    def store(self) -> None:
        key = f"k{self.num_keys}"
        self.num_keys += 1
        setter = self.rank()
        self.step(setter, Step("set", key=key))
        for rank in range(self.num_ranks):
            if rank != setter and self.chance.random() < 0.5:
                self.step(rank, Step("get", key=key))

    def access(self) -> None:
        rank = self.rank()
        action = self.chance.choice(ACTIONS)
        path, origin = self.chance.choice(("/d/a", *FILES)), ""
        if action == "rename":
            origin = self.chance.choice(("/d/tmp", *FILES))
        if action in ("list", "remove-tree"):
            path = self.chance.choice(("/d", "/d/sub"))
        if action == "make-dir":
            action = "read" if self.has_folder else "make-dir"
            path = path if self.has_folder else "/d/sub"
            self.has_folder = True
        line = len(self.program.accesses) + 1
        # Listing again may be a way of waiting, and of replacing a file each time counts.
        if not self.unique_lines and action not in ("list", "rename", "link"):
            line = self.chance.randint(1, 3)
        takes_time = action in ("read", "write") and self.chance.random() < 0.5
        origin = "/d/tmp" if origin == path else origin
        access = Access(rank, action, path, line, origin, takes_time)
        self.program.accesses.append(access)
        self.step(rank, Step("begin" if takes_time else "access", access=access))
        if takes_time:
            self.open[rank].append(Step("end", access=access))

    def close(self, rank: int) -> None:
        self.program.steps[rank] += self.open[rank]
        self.open[rank] = []
