"""The contract of a check."""

import inspect
import re
from collections.abc import Iterator
from types import UnionType
from typing import ClassVar, Generic, TypeVar, get_args, get_origin

from distdiag.events.base import Event
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Evidence, Finding, Grade, Location, Severity
from distdiag.views.base import View

V = TypeVar("V", bound=View | Event)


class Check(Generic[V]):
    """Judge views: ``class StaleGradient(Check[GradientView])``, or ``Check[A | B]`` for several.

    A check is pure: it gets frozen values and yields findings. It prints, stores and waits for
    nothing. The runner catches an exception, switches the check off and reports DIA001.

    The docstring is the page of ``distdiag explain``. Its sections "What you see", "How to fix"
    (with the paragraphs "Changes:" and "Leaves:") and "When it is not a defect" are also the
    `why`, `fix`, `fix_changes`, `fix_leaves` and `disproof` of a finding that says nothing more
    specific.
    """

    code: ClassVar[str]
    name: ClassVar[str]
    severity: ClassVar[Severity]
    views: ClassVar[tuple[type[View | Event], ...]] = ()
    """The types of view that the check judges: what stands in the brackets of `Check`."""
    covers: ClassVar[tuple[str, ...]] = ()
    """Codes of findings that are evidence for one of this check if they name the same line."""
    explains: ClassVar[tuple[str, ...]] = ()
    """Codes of findings that follow from one of this check on the same ranks: its evidence."""
    gives_way: ClassVar[bool] = False
    """What it finds is but a note where another check has proven something as severe."""

    why: ClassVar[str] = ""
    fix: ClassVar[str] = ""
    fix_changes: ClassVar[str] = ""
    fix_leaves: ClassVar[str] = ""
    disproof: ClassVar[str] = ""

    def __init_subclass__(cls) -> None:
        """Read the types of view from the brackets, and the texts from the docstring."""
        super().__init_subclass__()
        for base in cls.__dict__.get("__orig_bases__", ()):
            if isinstance(get_origin(base), type) and issubclass(get_origin(base), Check):
                (kind,) = get_args(base)
                if not isinstance(kind, TypeVar):
                    cls.views = get_args(kind) if isinstance(kind, UnionType) else (kind,)
        for attribute, text in _texts(cls.__doc__ or "").items():
            if attribute not in cls.__dict__:
                setattr(cls, attribute, text)

    def check(self, view: V) -> Iterator[Finding]:
        """Judge one view."""
        raise NotImplementedError

    def finding(  # noqa: PLR0913 (a finding has as many parts; all but one are keywords)
        self,
        message: str,
        *,
        ranks: RankSet,
        evidence: tuple[Evidence, ...] | str,
        step: int | None = None,
        location: Location | None = None,
        subjects: tuple[str, ...] = (),
        severity: Severity | None = None,
        grade: Grade = Grade.PROVEN,
        confidence: float = 0.95,
        **texts: str,
    ) -> Finding:
        """Build a finding that carries this check's code, name and texts.

        `texts` may replace why, fix, fix_changes, fix_leaves and disproof by more specific ones.
        A note always has severity info. A text as evidence is what these ranks saw at this place.
        """
        if isinstance(evidence, str):
            evidence = (Evidence(ranks=ranks, summary=evidence, location=location),)
        standing = {
            key: texts.get(key, getattr(self, key))
            for key in ("why", "fix", "fix_changes", "fix_leaves", "disproof")
        }
        return Finding(
            code=self.code,
            name=self.name,
            severity=Severity.INFO if grade is Grade.NOTE else severity or self.severity,
            grade=grade,
            confidence=confidence,
            message=message,
            ranks=ranks,
            evidence=evidence,
            step=step,
            location=location,
            subjects=subjects,
            **standing,
        )


def sections(doc: str) -> dict[str, str]:
    """Return the sections of an explain page by their titles."""
    parts = re.split(r"^## (.+)$", inspect.cleandoc(doc), flags=re.M)
    return {title: text.strip() for title, text in zip(parts[1::2], parts[2::2], strict=True)}


def _texts(doc: str) -> dict[str, str]:
    """Return the texts of a finding that the sections of a docstring hold."""
    found = sections(doc)
    fix = [_flat(each) for each in found.get("How to fix", "").split("\n\n")]
    texts = {
        "why": _flat(found.get("What you see", "").split("\n\n")[0]),
        "fix": fix[0],
        "fix_changes": _after("Changes: ", fix),
        "fix_leaves": _after("Leaves: ", fix),
        "disproof": _flat(found.get("When it is not a defect", "").split("\n\n")[0]),
    }
    return {attribute: text for attribute, text in texts.items() if text}


def _flat(text: str) -> str:
    return " ".join(text.split())


def _after(label: str, paragraphs: list[str]) -> str:
    return next((each.removeprefix(label) for each in paragraphs if each.startswith(label)), "")
