"""``distdiag dump``: where the ranks of a job are now, even if it runs without the agent."""

import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Final, TypedDict, Unpack

import click

from distdiag.cli.show import format_option
from distdiag.events.errors import UsageError
from distdiag.live.hosts import ask_hosts, split_hosts, split_words
from distdiag.live.job_dump import JobDump, NodeDump, jobs_of, prepare, save, take_dump
from distdiag.live.ranks import LiveRank, find_ranks, ranks_of_pids
from distdiag.live.report import report_of
from distdiag.live.text import job_text
from distdiag.record.visible import visible
from distdiag.reports import load_reporter

REACHING_S: Final = 15
"""A host has so many seconds more than its ranks: to be reached, and to start Python."""
INCOMPLETE_STATUS: Final = 1


class _Options(TypedDict):
    pids: tuple[int, ...]
    job: str | None
    hosts: str | None
    via: str
    remote: str
    timeout_s: int
    out: Path | None
    all_threads: bool
    name: str


@click.command("dump")
@click.option(
    "--pid",
    "pids",
    type=click.IntRange(min=1),
    multiple=True,
    help="Look at this process and do not search; give it once for each rank.",
)
@click.option("--job", help="Only this job, as the command names it (node0:29500).")
@click.option("--hosts", help="Look at these hosts, not at this one: node0,node1,...")
@click.option(
    "--via",
    default="ssh",
    metavar="ssh|srun|COMMAND",
    help="How to reach a host; {host} in a COMMAND stands for its name [ssh].",
)
@click.option(
    "--remote",
    default="distdiag",
    metavar="COMMAND",
    help="How to call distdiag on the hosts [distdiag].",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=click.IntRange(min=1),
    default=20,
    metavar="SECONDS",
    help="Give up on the ranks of a host after this time [20].",
)
@click.option(
    *("-o", "--output", "--out", "out"),
    type=click.Path(path_type=Path),
    help="Keep the stacks of each rank in this new folder, for distdiag analyze.",
)
@click.option("--all-threads", is_flag=True, help="Show the other threads, too.")
@format_option(["text", "json"], "text", "How to write the stacks; JSON is one line")
def command(**options: Unpack[_Options]) -> int:
    """Show where the ranks of a running job are.

    The job need not run under distdiag. Exits with 0 if the stacks of all ranks that were found
    could be taken, else with 1, and with 2 if no rank was found.
    """
    out = options["out"]
    if options["hosts"] is not None and options["pids"]:
        raise UsageError("--pid names processes of this host; it does not go with --hosts")
    if out is not None:
        prepare(out)
    if options["hosts"] is not None:
        dumps, is_complete = _of_hosts(split_hosts(options["hosts"]), options)
    else:
        dumps, is_complete = [_of_this_node(options)], True
    jobs = jobs_of(dumps)
    if options["name"] == "json":
        ranks = tuple(stacks for dumped in jobs for stacks in dumped.ranks.values())
        click.echo(NodeDump(hostname=platform.node(), ranks=ranks).to_json())
    else:
        _show(jobs, all_threads=options["all_threads"])
    if out is not None:
        num_files = save(jobs, out)
        _say(f"the stacks of {num_files} rank{'' if num_files == 1 else 's'} are in {out}")
    is_complete &= not any(stacks.error for dumped in jobs for stacks in dumped.ranks.values())
    return 0 if is_complete else INCOMPLETE_STATUS


def _of_this_node(options: _Options) -> NodeDump:
    pids = options["pids"]
    ranks = ranks_of_pids(pids) if pids else _found(options["job"])
    return take_dump(ranks, timeout_s=options["timeout_s"], say=_say)


def _found(job: str | None) -> Sequence[LiveRank]:
    search = find_ranks()
    ranks = [rank for rank in search.ranks if job in (None, rank.job)]
    if ranks:
        return ranks
    others = ", ".join(sorted({rank.job for rank in search.ranks}))
    problem = f"no rank of {f'job {job}' if job else 'any job'} was found on {platform.node()}"
    if others:
        problem += f" (there are: {others})"
    if search.num_hidden:
        problem += (
            f"; {search.num_hidden} Python processes belong to others: run this as the user of the "
            "job or as root"
        )
    raise UsageError(f"{problem}; use --pid for processes that have no RANK in their environment")


def _of_hosts(hosts: Sequence[str], options: _Options) -> tuple[list[NodeDump], bool]:
    timeout_s, job = options["timeout_s"], options["job"]
    command = [*split_words(options["remote"], "--remote"), "dump", "--json"]
    command += ["--timeout", str(timeout_s), *(("--job", job) if job is not None else ())]
    answers = ask_hosts(
        hosts, via=options["via"], command=command, timeout_s=timeout_s + REACHING_S, say=_say
    )
    dumps = [answer.dump for answer in answers if answer.dump is not None]
    if not dumps:
        raise UsageError(f"none of the {len(hosts)} hosts gave a dump")
    return dumps, len(dumps) == len(hosts)


def _show(jobs: Sequence[JobDump], *, all_threads: bool) -> None:
    for dumped in jobs:
        click.echo(job_text(dumped, all_threads=all_threads))
        report = report_of(dumped)
        if report.findings:
            click.echo(load_reporter("terminal")().render(report))
        elif report.checked:
            click.echo(f"  the checks of stacks found nothing: {', '.join(report.checked)}\n")
        else:
            click.echo("  no check works on stacks alone: compare the groups above\n")


def _say(text: str) -> None:
    click.echo(f"distdiag: {visible(text)}", err=True)
