"""The stacks of all ranks as one tree: where they are together, and where their paths part."""

from __future__ import annotations

from typing import Final

import msgspec

from distdiag.events.base import Frame
from distdiag.events.stacks import Stacks
from distdiag.reports.base import phrase
from distdiag.reports.recording import Recording
from distdiag.reports.words import shown_path
from distdiag.views.stack_tree import MAIN, StackNode, StackTree

MOST_THREADS: Final = 8
MOST_NODES: Final = 1500
"""So many nodes of a tree are shown; a job of thousands of ranks stands in a few dozen places."""


class TreeNode(msgspec.Struct):
    """Frames that the same ranks pass through, the outermost first, and where they go on.

    A frame is ``(function, place, is the user's)``.
    """

    frames: list[tuple[str, str, bool]]
    ranks: str
    num_ranks: int
    children: list[TreeNode]


class Tree(msgspec.Struct):
    """The tree of one kind of thread."""

    thread: str
    num_ranks: int
    roots: list[TreeNode]


def trees_of(recording: Recording) -> list[Tree]:
    """Return the merged stacks, as they were taken last, of the main threads first."""
    last: dict[int, Stacks] = {}
    for stacks in recording.of(Stacks):
        if not stacks.is_native and not stacks.error and stacks.threads:
            last[stacks.rank] = stacks
    if not last:
        return []
    tree = StackTree.from_stacks(last.values())
    names = sorted(tree.threads, key=lambda name: (name != MAIN, name))
    found = []
    for name in names[:MOST_THREADS]:
        room = [MOST_NODES]
        root = tree.root(name)
        roots = [_node(child, room) for child in root.children]
        if roots:
            found.append(Tree(name, len(root.ranks), roots))
    return found


def _node(node: StackNode, room: list[int]) -> TreeNode:
    """Return a node with the frames below it up to where paths part."""
    frames = [_frame(node.frame)]
    ranks = node.ranks
    children = node.children
    while len(children) == 1 and children[0].frame is not None and len(frames) < MOST_NODES:
        (node,) = children
        frames.append(_frame(node.frame))
        children = node.children
    room[0] -= 1
    is_end = len(children) == 1 and children[0].frame is None
    deeper = [] if is_end or room[0] <= 0 else [_node(child, room) for child in children]
    return TreeNode(frames, phrase(ranks), len(ranks), deeper)


def _frame(frame: Frame | None) -> tuple[str, str, bool]:
    if frame is None:
        return ("(its innermost frame)", "", False)
    return (frame.function, f"{shown_path(frame.file)}:{frame.line}", frame.user)
