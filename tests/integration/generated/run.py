"""Run trainings that are written at random under distdiag, and count what it says.

    python -m tests.integration.generated.run --num 20 --only same-dropout left-out

Each case is a broken training and its right twin. A broken one is found if a finding of warning or
above is of an expected family and holds an expected name; a right one is accused by any finding of
warning or above.
"""

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
from rich.console import Console

from tests.integration.generated.trainings import FAULTS, Expected, Training, on_gpu, pair
from tests.integration.launch import Launch, Launcher, Outcome

__all__ = ["Case", "cases", "judge", "main", "run_case"]

Kind = Literal["broken", "right"]
Device = Literal["cpu", "cuda"]
OPTIONS: Final = ("--hang-timeout", "20", "--on-hang", "abort", "--fail-on", "never")
ACCUSED: Final = "accused"
WRONG: Final = ("missed", "other words", ACCUSED, "failed")


class Case(msgspec.Struct, frozen=True):
    """One program to run; `expected` is None for a right one."""

    label: str
    kind: Kind
    text: str
    nproc: int
    expected: Any = None


class Verdict(msgspec.Struct, frozen=True):
    """How one program was judged: found, other words, missed, silent, accused or failed."""

    label: str
    kind: Kind
    answer: str
    alarms: tuple[str, ...]
    text: str = ""


def cases(num: int, only: list[str], first: int = 0) -> Iterator[Case]:
    """Yield `num` pairs for each fault, over its styles in turn."""
    for fault in FAULTS:
        if only and fault.name not in only:
            continue
        for number in range(first, first + num):
            style = fault.styles[number % len(fault.styles)]
            found = pair(fault, style, number)
            if found is None:
                continue
            label = f"{fault.name}/{style}/{number}"
            yield _case(label, "broken", found.broken, found.expected)
            yield _case(label, "right", found.right, None)


def _case(label: str, kind: Kind, training: Training, expected: Expected | None) -> Case:
    return Case(label, kind, training.text(), training.nproc, expected)


def run_case(case: Case, device: Device = "cpu") -> Verdict:
    """Run one program on real ranks and judge what was reported."""
    launcher: Launcher = "forked" if device == "cpu" else "torchrun"  # CUDA cannot be forked
    if device == "cuda":
        case = msgspec.structs.replace(case, text=on_gpu(case.text))
    with tempfile.TemporaryDirectory(prefix="generated-") as temporary:
        script = Path(temporary, "train.py")
        script.write_text(case.text)
        outcome = Launch(folder=Path(temporary), launcher=launcher).checked(
            script, options=OPTIONS, nproc=case.nproc, timeout=120
        )
    return judge(case, outcome)


def judge(case: Case, outcome: Outcome) -> Verdict:
    """Compare the findings of a run with what its program deserves."""
    alarms = tuple(
        f"{each['code']} {each['severity']} {each['ranks']} {each['message'][:160]}"
        for each in outcome.alarms
    )
    has_ended = outcome.exit_status in (0, 1) or outcome.aborted_at_exit
    if outcome.report is None or not has_ended or "Traceback" in outcome.stderr:
        return Verdict(case.label, case.kind, "failed", (*alarms, outcome.describe()), case.text)
    if case.expected is None:
        return Verdict(case.label, case.kind, ACCUSED if alarms else "silent", alarms, case.text)
    families = [each for each in outcome.alarms if each["code"][:3] in case.expected.families]
    answer = "missed"
    if families:
        is_named = any(_names(each, case.expected) for each in families)
        answer = "found" if is_named else "other words"
    return Verdict(case.label, case.kind, answer, alarms, case.text)


def _names(finding: dict[str, Any], expected: Expected) -> bool:
    words = " ".join((finding["message"], *finding["subjects"]))
    return not expected.names or any(name in words for name in expected.names)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.integration.generated.run")
    parser.add_argument("--num", type=int, default=3, help="pairs for each fault")
    parser.add_argument("--first", type=int, default=0, help="the number of the first")
    parser.add_argument("--only", nargs="+", default=[], metavar="FAULT")
    parser.add_argument("--jobs", type=int, default=1, help="programs that run at a time")
    parser.add_argument("--style", nargs="+", default=[], help="only these styles")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--keep", type=Path, help="keep programs that were judged wrongly here")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run and count; return 1 if a program was judged wrongly."""
    args, console = _parse(argv), Console()
    counts: Counter[tuple[Kind, str]] = Counter()
    with ThreadPoolExecutor(args.jobs) as pool:
        chosen = [
            case
            for case in cases(args.num, args.only, args.first)
            if not args.style or case.label.split("/")[1] in args.style
        ]
        for verdict in pool.map(partial(run_case, device=args.device), chosen):
            counts[verdict.kind, verdict.answer] += 1
            line = f"{verdict.label} {verdict.kind}: {verdict.answer}"
            console.print(line, *verdict.alarms, sep="\n    ", markup=False, highlight=False)
            if args.keep and verdict.answer in WRONG:
                args.keep.mkdir(parents=True, exist_ok=True)
                name = f"{verdict.label}-{verdict.kind}".replace("/", "-")
                Path(args.keep, f"{name}.py").write_text(verdict.text)
    for (kind, answer), number in sorted(counts.items()):
        console.print(f"{kind}: {answer} {number}", highlight=False)
    return int(any(answer in WRONG for _, answer in counts))


if __name__ == "__main__":
    sys.exit(main())
