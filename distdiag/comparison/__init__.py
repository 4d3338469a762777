"""What differs between two runs, and which of it matters most."""

from distdiag.comparison.differences import Difference, compare
from distdiag.comparison.facts import RunFacts, facts_of, own_facts

__all__ = ["Difference", "RunFacts", "compare", "facts_of", "own_facts"]
