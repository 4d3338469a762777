"""CKP006: a distributed checkpoint keeps one rank's value where each rank has its own."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from distdiag.checks.base import Check
from distdiag.checks.shared.replicas import first_and_more
from distdiag.events.checkpoints import StateEntry, StateRestored, StateSaved
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.alignment import RankStateView

_HARMLESS: Final = re.compile(
    r"rng|random|generator|seed|rank|pid|host|device|time|stamp|elapsed|path|dir|name|loss|metric",
    re.IGNORECASE,
)
"""In the last part of a key: random generators, who a rank is, when it was, what it measured."""

_STATE_KINDS: Final = frozenset({"int", "bytes", "bytearray", "BytesIO", "ndarray", "Tensor"})
_Differing = dict[str, dict[int, StateEntry]]


class DeduplicatedRankState(Check[RankStateView]):
    """A distributed checkpoint keeps one rank's value where each rank has its own.

    ## What you see
    After a resume all ranks continue with the state of one rank, so samples are read twice or
    never. A distributed checkpoint writes a value that is not sharded only once under its key, and
    all ranks load this one value.

    ## Example
        # wrong: every rank saves its own position under one key
        dcp.save({"model": model_state, "loader": loader.state_dict()}, checkpoint_id=path)

        # right: a key for each rank
        state = {"model": model_state, f"loader_{rank}": loader.state_dict()}
        dcp.save(state, checkpoint_id=path)

    ## How to fix
    Put the rank into the key where the state is added to the state dict:
    `state[f"loader_{rank}"] = loader.state_dict()`, and load it with the same key. Or save one file
    for each rank.

    Changes: The keys of new checkpoints; old ones cannot be loaded under the new keys.

    Leaves: Checkpoints that were already written: they lack the state of the other ranks.

    ## When it is not a defect
    The ranks do not need these values, or set them again after a load.

    Random generators, measurements and values that name the rank itself are a note.

    Random generators, measurements and what names the rank itself are a note. To silence it, set
    `ignore = ["CKP006"]` in `distdiag.toml`.

    ## References
    - https://github.com/PrimeIntellect-ai/prime-rl/issues/1035
    """

    code = "CKP006"
    name = "deduplicated-rank-state"
    severity = Severity.WARNING

    def check(self, alignment: RankStateView) -> Iterator[Finding]:
        """Compare what ranks have saved, or name what came back as that of another rank."""
        saved = {r: e for r, e in alignment.by_rank.items() if isinstance(e, StateSaved)}
        restored = {r: e for r, e in alignment.by_rank.items() if isinstance(e, StateRestored)}
        if len({event.checkpoint for event in saved.values()}) == 1:
            yield from self._judge_save(saved)
        yield from self._judge_load(restored)

    def _judge_save(self, saved: Mapping[int, StateSaved]) -> Iterator[Finding]:
        by_key: _Differing = {}
        for rank, entry in ((r, each) for r, event in saved.items() for each in event.entries):
            by_key.setdefault(entry.key, {})[rank] = entry
        differing = {k: e for k, e in by_key.items() if len({x.digest for x in e.values()}) > 1}
        needed = {k: e for k, e in differing.items() if _is_needed(k, e)}
        for found in (needed, {k: e for k, e in differing.items() if k not in needed}):
            if found:
                grade = Grade.LIKELY if found is needed else Grade.NOTE
                yield self._of_save(found, saved, grade=grade)

    def _of_save(
        self, found: _Differing, saved: Mapping[int, StateSaved], *, grade: Grade
    ) -> Finding:
        keys = tuple(found)
        ranks = RankSet(rank for entries in found.values() for rank in entries)
        event = saved[min(ranks)]
        return self.finding(
            f"{first_and_more(keys)} {'differs' if len(keys) == 1 else 'differ'} between "
            f"{ranks.phrase()}, but a distributed checkpoint keeps the value of one rank only",
            ranks=ranks,
            step=event.step,
            location=user_location(event.site.frames),
            subjects=keys[:32],
            grade=grade,
            confidence=0.8,
            evidence=_evidence(
                {r: [e[r] for e in found.values() if r in e] for r in sorted(ranks)}, "saved "
            ),
        )

    def _judge_load(self, restored: Mapping[int, StateRestored]) -> Iterator[Finding]:
        for is_harmless in (False, True):
            found = {
                rank: [each for each in event.entries if _is_harmless(each) is is_harmless]
                for rank, event in restored.items()
            }
            found = {rank: entries for rank, entries in found.items() if entries}
            if found:
                grade = Grade.NOTE if is_harmless else Grade.PROVEN
                yield self._of_load(found, restored[min(found)], grade=grade)

    def _of_load(
        self, found: Mapping[int, Sequence[StateEntry]], event: StateRestored, *, grade: Grade
    ) -> Finding:
        ranks = RankSet(found)
        keys = tuple(dict.fromkeys(each.key for entries in found.values() for each in entries))
        return self.finding(
            f"{ranks.phrase()} saved {first_and_more(keys)} and got another rank's value back",
            ranks=ranks,
            step=event.step,
            location=user_location(event.site.frames),
            subjects=keys[:32],
            grade=grade,
            evidence=_evidence(found),
        )


def _is_harmless(entry: StateEntry) -> bool:
    return bool(_HARMLESS.search(entry.key)) or entry.kind not in _STATE_KINDS


def _is_needed(key: str, entries: Mapping[int, StateEntry]) -> bool:
    """Say whether values that differ are the state of something, and not about the rank itself."""
    first = next(iter(entries.values()))
    if any(_is_harmless(entry) for entry in entries.values()):
        return False
    if all(entry.text == str(rank) for rank, entry in entries.items()):
        return False
    # A tensor beside weights may be a buffer, which other checks compare.
    return first.is_stateful or ("." in key and first.kind != "Tensor")


def _evidence(found: Mapping[int, Sequence[StateEntry]], verb: str = "") -> tuple[Evidence, ...]:
    return tuple(
        Evidence(ranks=RankSet([rank]), summary=verb + _values(found[rank]))
        for rank in sorted(found)[:8]
    )


def _values(entries: Sequence[StateEntry]) -> str:
    return ", ".join(f"{entry.key}: {entry.text}" for entry in entries[:5])
