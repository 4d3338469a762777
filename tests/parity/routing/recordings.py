"""Recordings of two runs, made by hand."""

import numpy as np

from distdiag.events.routing import Choice
from distdiag.parity.routing.comparison import Comparison
from distdiag.parity.routing.recordings import Recording
from distdiag.record.recording import Ended, RecordingWriter, RouteRecord, Seen


def digest(values) -> str:
    return np.asarray(values, np.float64).tobytes().hex()


class Run:
    """Writes what one rank of a run records."""

    def __init__(self, folder, rank=0):
        self.folder = folder
        self.rank = rank
        self.writer = RecordingWriter(folder, rank)
        self.step = 0
        self.num_choices = 0

    def weights(self, **values):
        digests = {f"Net/{name}": digest(value) for name, value in values.items()}
        self.writer.write(self.record(Seen.WEIGHTS, "weights", digests=digests))

    def random(self, **states):
        self.writer.write(self.record(Seen.RANDOM, "generators", digests=states))

    def output(self, name, given, returned, outer="", **more):
        data = np.asarray(returned, np.float32)
        digests = {"given": digest(given), "returned": digest(data)}
        fields = {"digests": digests, "outer": outer and f"Net/{outer}", "dtype": "float32", **more}
        self.writer.write(self.record(Seen.OUTPUT, f"Net/{name}", **fields), data.tobytes())

    def gradient(self, name, values):
        data = np.asarray(values, np.float32)
        digests = {"returned": digest(data)}
        record = self.record(Seen.GRADIENT, f"Net/{name}", digests=digests, dtype="float32")
        self.writer.write(record, data.tobytes())

    def choice(self, layer, scores, k=1, given=(), **more):
        scores = np.asarray(scores, np.float32)
        order = np.argsort(-scores, -1, kind="stable")
        best = np.take_along_axis(scores, order, -1).astype(np.float64)
        indices = order[:, :k].astype(np.int32)
        more.setdefault("dtype", "float32")
        digests = {
            "given": digest(given),
            "scores": digest(scores),
            "chosen": digest(np.sort(indices, -1)),
        }
        choice = Choice("topk", len(scores), scores.shape[1], k, more["dtype"])
        record = self.record(Seen.CHOICE, f"Net/{layer}", digests=digests, choice=choice, **more)
        parts = (indices, best[:, k - 1], best[:, k], np.abs(best).max(-1))
        self.writer.write(record, b"".join(part.tobytes() for part in parts))
        self.num_choices += 1

    def record(self, seen, name, **more):
        return RouteRecord(seen, self.step, 0, name, **more)

    def close(self, num_steps=1):
        ended = Ended(rank=self.rank, num_steps=num_steps, num_choices=self.num_choices)
        self.writer.close(ended)


def compared(folder, write, ranks=(0,)):
    """Let `write(run, is_second)` write both runs, and compare them."""
    recordings = []
    for name in ("first", "second"):
        for rank in ranks:
            run = Run(folder / name, rank)
            write(run, name == "second")
            run.close()
        recordings.append(Recording(folder / name))
    return Comparison(*recordings).run()
