"""What README and docs/ name exists: paths, modules, pages and their sections, options."""

import importlib
import re
from pathlib import Path

import pytest

from distdiag.check import main

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FOLDERS = "distdiag|tests|scripts|configs|launchers|docs"
PATH = re.compile(rf"(?<![\w/.-])(?:{FOLDERS})/[\w/.-]*\w(?![\w*<…])")
NAME = re.compile(r"(?<![\w/.-])distdiag(?:\.[A-Za-z_]\w*)+")
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")
FILES = {"distdiag.toml"}

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def written_in(page: Path) -> set[str]:
    """Return the files that a page tells its reader to write, each before its code."""
    return set(re.findall(r"^`(\S+\.py)`:$", page.read_text(), re.M))


def is_there(name: str) -> bool:
    """Say whether a dotted name is a module, or what a module holds."""
    module, _, attribute = name.rpartition(".")
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        return bool(module) and hasattr(importlib.import_module(module), attribute)
    return True


def anchors_of(page: Path) -> set[str]:
    """Return the anchors of a page's sections, as code hosts make them of headings."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}


@each_page
def test_the_paths_that_a_page_names_exist(page):
    named = set(PATH.findall(page.read_text())) - written_in(page)
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


@each_page
def test_the_modules_that_a_page_names_exist(page):
    written = {path.removesuffix(".py").replace("/", ".") for path in written_in(page)}
    named = set(NAME.findall(page.read_text())) - FILES - written
    assert [name for name in sorted(named) if not is_there(name)] == []


@each_page
def test_the_links_of_a_page_lead_somewhere(page):
    broken = []
    for path, anchor in LINK.findall(page.read_text()):
        target = (page.parent / path).resolve() if path else page
        is_whole = target.exists() and (not anchor or anchor in anchors_of(target))
        broken += [] if is_whole else [f"{path}#{anchor}"]
    assert broken == []


def test_each_page_is_linked_from_another():
    linked = {
        (page.parent / path).resolve()
        for page in PAGES
        for path, _ in LINK.findall(page.read_text())
    }
    assert set(PAGES) - linked <= {ROOT / "README.md"}


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 130


def test_the_table_of_options_is_complete(capsys):
    main(["--help"])
    shown = set(re.findall(r"^  (?:-[vq], )?(--[a-z-]+)", capsys.readouterr().out, re.M))
    table = re.findall(r"^\| (`--.+?) \| ", (ROOT / "docs" / "reference.md").read_text(), re.M)
    documented = {option for row in table for option in re.findall(r"`(--[a-z-]+)", row)}
    assert documented == shown
