"""Who waits for whom at the end of a run that stands still."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Outcome, Report
from distdiag.reports.formats.html.calls import Call, Calls, GroupKey, group_key, place, spoken
from distdiag.reports.words import ranks_by_key

MOST_NODES: Final = 24
"""More nodes than these, each some ranks that stand in the same place, are no picture."""


class Node(msgspec.Struct):
    """Ranks that stand in the same place; `waits` says whether they are in a call."""

    ranks: str
    doing: str
    place: str
    waits: bool
    layer: int = 0


class Edge(msgspec.Struct):
    """The ranks of node `source` wait for those of node `target`; `text` says why."""

    source: int
    target: int
    text: str


class WaitGraph(msgspec.Struct):
    """Nodes and edges; those whom nobody waits for stand in layer 0."""

    nodes: list[Node]
    edges: list[Edge]


def waits_of(report: Report, calls: Calls) -> WaitGraph | None:
    """Return who waits for whom, None where nobody does or the run came to its end."""
    held = calls.held
    if report.run.outcome is Outcome.FINISHED or not held:
        return None
    fates = {info.rank: (info.fate, info.last) for info in report.run.ranks}
    awaited = {rank: _awaited(rank, call, calls) for rank, call in held.items()}
    ranks = sorted({*held, *(each for others in awaited.values() for each in others)})
    places = ranks_by_key((_stand(rank, held, fates), (rank,)) for rank in ranks)
    if len(places) > MOST_NODES:
        return None
    nodes = [_node(stand, members, held) for stand, members in places.items()]
    number = {rank: index for index, members in enumerate(places.values()) for rank in members}
    edges: dict[tuple[int, int], Edge] = {}
    for rank, others in awaited.items():
        for other in others:
            pair = (number[rank], number[other])
            edges.setdefault(pair, Edge(*pair, _why(other, held[rank], calls)))
    _lay_out(nodes, list(edges.values()))
    return WaitGraph(nodes, list(edges.values()))


def _stand(
    rank: int, held: Mapping[int, Call], fates: Mapping[int, tuple[str, str]]
) -> tuple[str, str]:
    """Return what a rank does, and where, in words that are equal for ranks in the same place."""
    fate, last = fates.get(rank, ("", ""))
    if rank in held:
        event = held[rank].event
        died = ", then it died" if fate == "died" else ""
        return f"in {spoken(event)}{died}", place(event)
    return (f"{fate}: {last}" if last else fate) or "nothing is known", ""


def _node(stand: tuple[str, str], members: RankSet, held: Mapping[int, Call]) -> Node:
    doing, where = stand
    return Node(members.phrase(), doing, where, waits=min(members) in held)


def _awaited(rank: int, call: Call, calls: Calls) -> list[int]:
    """Return the ranks that have not come to a call, or came to another one in its place."""
    event = call.event
    if event.collective_seq_id < 0:
        peer = event.signature.peer
        return [peer] if peer is not None and peer != rank else []
    known: GroupKey = group_key(event.group)
    there = calls.by_group.get(known, {})
    number = event.collective_seq_id
    missing = [each for each in event.group.ranks if number not in there.get(each, {})]
    if missing:
        return [each for each in missing if each != rank]
    return [
        each
        for each in event.group.ranks
        if each != rank and there[each][number].event.signature.op != event.signature.op
    ]


def _why(other: int, call: Call, calls: Calls) -> str:
    event = call.event
    if event.collective_seq_id < 0:
        return f"{event.signature.op} with peer {other}"
    number = event.collective_seq_id
    there = calls.by_group.get(group_key(event.group), {}).get(other, {})
    if number in there:
        return f"called {there[number].event.signature.op} as #{number} instead"
    return f"has not called #{number} of {event.group.label}"


def _lay_out(nodes: list[Node], edges: list[Edge]) -> None:
    """Put whoever is waited for to the right of those that wait; a cycle is cut somewhere."""
    for _ in range(len(nodes)):
        moved = False
        for edge in edges:
            layer = nodes[edge.source].layer + 1
            if nodes[edge.target].layer < layer < len(nodes):
                nodes[edge.target].layer = layer
                moved = True
        if not moved:
            break
