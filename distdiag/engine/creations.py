"""Where the program made what findings name, as the ranks wrote it down."""

from collections.abc import Iterator

import msgspec

from distdiag.engine.bounded import MOST_FOLLOWED, Recent
from distdiag.events.base import Event, Frame
from distdiag.events.collectives import GroupCreated, group_label
from distdiag.events.models import ObjectCreated, ObjectKind
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import made_here
from distdiag.findings.finding import Evidence, Finding
from distdiag.findings.source import location_of
from distdiag.views.base import Thing, View, things_in


class Creations:
    """The places at which models, optimizers, loaders, groups and meshes were made, by rank."""

    def __init__(self) -> None:
        self._places: Recent[Thing, dict[int, Frame | None]] = Recent(16 * MOST_FOLLOWED)

    def feed(self, event: Event) -> None:
        """Take in one event of one rank."""
        match event:
            case ObjectCreated(object_kind=kind, name=name, place=place):
                self._add(Thing(kind, name), event.rank, place)
            case GroupCreated(name=name, desc=desc, site=site) if name:
                thing = Thing(ObjectKind.GROUP, group_label(name, desc))
                self._add(thing, event.rank, site.location)
            case _:
                pass

    def _add(self, thing: Thing, rank: int, place: Frame | None) -> None:
        known = self._places.of(thing, dict)
        # Two of one name: which of them is meant is not known.
        known[rank] = place if known.get(rank, place) == place else None

    def complete(self, finding: Finding, view: View | Event) -> Finding:
        """Return a finding with the places at which that was made which its view names."""
        things = view.things if isinstance(view, View) else things_in(view)
        made = tuple(each for thing in things for each in self._evidence(thing))
        if not made:
            return finding
        return msgspec.structs.replace(finding, evidence=(*finding.evidence, *made))

    def _evidence(self, thing: Thing) -> Iterator[Evidence]:
        ranks: dict[Frame, list[int]] = {}
        for rank, place in sorted(self._places.get(thing, {}).items()):
            if place is not None:
                ranks.setdefault(place, []).append(rank)
        for place, those in ranks.items():
            yield Evidence(
                ranks=RankSet(those),
                summary=made_here(thing.kind, thing.name),
                location=location_of(place),
            )
