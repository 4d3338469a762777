"""Run the clean and the mutation matrix: ``python -m scripts.parity_matrix --jobs 8``.

Small models are trained under every kind of parallelism, unbroken and with twelve mutations, and
each run is compared with the same training on one rank as ``distdiag parity`` compares them. It
exits with 1 if a right run is accused, or if too few broken ones are found and blamed rightly.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Final

import msgspec

from scripts.parity_matrix.cells import CELLS
from scripts.parity_matrix.comparing import Verdict
from scripts.parity_matrix.models import KITS, PRECISIONS
from scripts.parity_matrix.mutations import MUTATIONS
from scripts.parity_matrix.plan import Part
from scripts.parity_matrix.table import is_good, summary, table

QUICK_CELLS: Final = tuple(name for name, cell in CELLS.items() if cell.num_ranks == 2)
QUICK_MODELS: Final = ("mlp", "llama")
TIMEOUT_S: Final = 3600.0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="parity_matrix", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two ranks, two models, one seed")
    parser.add_argument("--models", nargs="+", choices=tuple(KITS))
    parser.add_argument(
        "--precisions", nargs="+", choices=tuple(PRECISIONS), default=tuple(PRECISIONS)
    )
    parser.add_argument("--cells", nargs="+", choices=tuple(CELLS))
    parser.add_argument("--mutations", nargs="+", choices=tuple(MUTATIONS), metavar="NAME")
    parser.add_argument("--seeds", nargs="+", type=int)
    parser.add_argument("--jobs", type=int, default=1, help="how many parts run at a time")
    parser.add_argument("--table", type=Path, help="write the table in Markdown there")
    parser.add_argument(
        "--verdicts", type=Path, help="write what was said of each run there (JSON)"
    )
    parser.add_argument("--folder", type=Path, help="keep the recordings there")
    return parser.parse_args()


def _parts(args: argparse.Namespace, root: Path) -> list[Part]:
    models = args.models or (QUICK_MODELS if args.quick else tuple(KITS))
    return [
        Part(
            folder=str(root / f"{model}-{precision}"),
            model=model,
            precision=precision,
            seeds=tuple(args.seeds or ((0,) if args.quick else (0, 1, 2))),
            cells=tuple(args.cells or (QUICK_CELLS if args.quick else tuple(CELLS))),
            mutations=tuple(args.mutations or MUTATIONS),
        )
        for model in models
        for precision in args.precisions or PRECISIONS
    ]


def _python(part: Part, log: str, *arguments: str) -> None:
    command = [sys.executable, "-m", *arguments, str(Path(part.folder) / "part.json")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": _paths()}
    path = Path(part.folder) / f"{log}.log"
    with path.open("wb") as output:
        status = subprocess.run(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            timeout=TIMEOUT_S,
            check=False,
        ).returncode
    if status:
        raise RuntimeError(
            f"{part.label}: {log} ended with status {status}:\n{path.read_text()[-6000:]}"
        )


def _paths() -> str:
    root = str(Path(__file__).resolve().parents[2])
    return os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH", ""))))


def _run(part: Part) -> list[Verdict]:
    """Record a part, its references, and compare; each in processes of its own."""
    part.write()
    recording, launcher = "scripts.parity_matrix.recording", "torch.distributed.run"
    for number in sorted({cell.num_ranks for cell in part.used_cells()}):
        ranks = ("--standalone", "--nproc-per-node", str(number))
        _python(part, f"ranks-{number}", launcher, *ranks, "-m", recording)
    _python(part, "references", recording)
    _python(part, "comparing", "scripts.parity_matrix.comparing")
    path = Path(part.folder) / "verdicts.json"
    return msgspec.json.decode(path.read_bytes(), type=list[Verdict])


def _run_all(parts: Sequence[Part], jobs: int, *, keeps: bool) -> list[Verdict]:
    found: list[Verdict] = []
    begun = time.monotonic()
    with ThreadPoolExecutor(jobs) as pool:
        waiting = {pool.submit(_run, part): part for part in parts}
        for done in as_completed(waiting):
            part = waiting[done]
            if done.exception() is not None:
                pool.shutdown(wait=False, cancel_futures=True)
            verdicts = done.result()
            found += verdicts
            elapsed = time.monotonic() - begun
            print(f"{elapsed:.0f} s: {part.label}: {summary(verdicts)}", flush=True)
            for each in verdicts:
                if not each.is_as_due:
                    print(f"  {_line(each)}", flush=True)
            if not keeps:
                shutil.rmtree(part.folder)
    return found


def _line(verdict: Verdict) -> str:
    run = verdict.run
    what = "false alarm" if run.mutation == "clean" else "missed"
    if run.mutation != "clean" and verdict.is_found:
        what = "wrong blame"
    return f"{what}: {run.mutation} in {run.cell}, seed {run.seed}: {verdict.said or verdict.worst}"


def main() -> int:
    """Run what was asked for, and say how it went."""
    args = _arguments()
    with tempfile.TemporaryDirectory() as temporary:
        root = args.folder or Path(temporary)
        found = _run_all(_parts(args, root), args.jobs, keeps=args.folder is not None)
    print(table(found))
    if args.table is not None:
        args.table.write_text(table(found))
    if args.verdicts is not None:
        args.verdicts.write_bytes(msgspec.json.encode(found))
    return 0 if is_good(found) else 1


if __name__ == "__main__":
    sys.exit(main())
