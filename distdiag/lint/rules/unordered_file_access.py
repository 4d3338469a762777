"""BAR001: nothing orders what one rank writes and what another one reads."""

import ast
import re
from collections.abc import Iterator, Sequence
from typing import Final

from distdiag.checks.bar.unordered_file_access import UnorderedFileAccess as Check
from distdiag.findings.finding import Severity
from distdiag.lint.base import LintFinding, Rule, related
from distdiag.lint.file_accesses import FileAccessSite, Way, file_access
from distdiag.lint.guarded import short
from distdiag.lint.mentions import mentions, mentions_ranks
from distdiag.lint.modules import Function, Module
from distdiag.lint.operations import Family
from distdiag.lint.reach import EVERY, deciding_test, reach
from distdiag.lint.sites import Site, sites_of

# Whoever calls something of such a name means that ranks meet there.
_MEETING: Final = re.compile(
    r"barrier|synchroni[sz]e|sync_|_sync|wait|rendezvous|broadcast|gather|reduce|prepare|process_first"
    r"|rank_zero_first|(^|\.)(DDP|FSDP|DistributedDataParallel|FullyShardedDataParallel)$|init_process_group",
    re.IGNORECASE,
)
_WRITING: Final = (
    "open(",
    "save",
    "copy",
    "move",
    "rename",
    "replace",
    "write",
    "dump",
    "retrieve",
    "to_",
)
_POLLING: Final = re.compile(r"exists|is_file|is_dir|sleep|access$")


# A file that is written under a condition that holds on some ranks only, and that the others read
# further on in the same function, with no collective, barrier or polling between.
class UnorderedFileAccess(Rule):
    """Nothing orders what one rank writes and what another one reads.

    ## What you see
    A rank finds no file, half a file, or the one of the last run. It happens once in many runs, and
    most often on large clusters.

    ## Example
        # wrong: the others may load before the file is there
        if rank == 0:
            torch.save(state, path)
        state = torch.load(path)
        # right: with a barrier between the two, outside of the condition
        if rank == 0:
            torch.save(state, path)
        dist.barrier()
        state = torch.load(path)

    ## How to fix
    Put a barrier of all ranks between the write and the reads.

    ## When it is not a defect
    Something that lint does not see makes the readers wait, such as a call in another file.

    To silence a line, end it with `# distdiag: ignore[BAR001]`.

    ## References
    - https://github.com/deepspeedai/Megatron-DeepSpeed/issues/356
    - https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.barrier
    """

    code = Check.code
    name = Check.name
    severity = Severity.WARNING

    def look(self, module: Module) -> Iterator[LintFinding]:
        """Yield the reads that nothing keeps behind the write of another rank."""
        for function in module.functions:
            if mentions_ranks(function) and mentions(function, _WRITING):
                yield from self._look_at(function)

    def _look_at(self, function: Function) -> Iterator[LintFinding]:
        sites = sites_of(function)
        accesses = [a for site in sites if (a := file_access(site)) is not None]
        writes = [a for a in accesses if a.way is Way.WRITE and reach(a.site) != EVERY]
        for write in writes:
            reads = (r for r in accesses if r.way is Way.READ and self._races(write, r, sites))
            read = next(reads, None)
            if read is None:
                continue
            module, test = function.module, deciding_test(write.site)
            under = f" under `{short(test)}`" if test is not None else ""
            yield self.finding(
                module,
                read.site.call,
                f"{short(read.site.call)} may read before {short(write.site.call.func)} in line "
                f"{write.site.call.lineno}{under} has written: no barrier is between them",
                related=(related(module, write.site.call, "the write"),),
            )

    def _races(self, write: FileAccessSite, read: FileAccessSite, sites: Sequence[Site]) -> bool:
        if write.path != read.path or read.site.order <= write.site.order:
            return False
        if read.site.is_tried or not reach(read.site) - reach(write.site):
            return False
        if not _names_no_rank(write.path) or _are_exclusive(write.site, read.site):
            return False
        between = sites[write.site.order + 1 : read.site.order]
        return not any(self._orders(site) for site in between)

    def _orders(self, site: Site) -> bool:
        name = ast.unparse(site.call.func)
        if _MEETING.search(name):
            return True
        if _POLLING.search(name) and any(isinstance(loop, ast.While) for loop in site.loops):
            return True
        effects = self.effects.of_site(site)
        return any(effect.operation.family is not Family.CHECKPOINT for effect in effects)


def _names_no_rank(path: str) -> bool:
    return re.search(r"rank|pid|process_index|uuid|tmp|temp", path, re.IGNORECASE) is None


def _are_exclusive(first: Site, second: Site) -> bool:
    """Say whether no run of the function makes both calls on any two ranks."""
    answers = {condition.test: condition.answer for condition in first.conditions}
    others = ((c.test, c.answer) for c in second.conditions)
    rank_tests = {deciding_test(first), deciding_test(second)}
    if any(t in answers and answers[t] != a and t not in rank_tests for t, a in others):
        return True
    return any(
        way.conditions
        and all(answers.get(c.test) == c.answer for c in way.conditions)
        and not any(c.test in rank_tests for c in way.conditions)
        for way in second.exits
    )
