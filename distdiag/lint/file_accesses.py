"""Which calls write or read a file, and which file that is."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from distdiag.lint.bindings import value_of
from distdiag.lint.modules import Function
from distdiag.lint.sites import Site

_MAX_NAMES: Final = 6


class Way(StrEnum):
    """What a call does to a path."""

    WRITE = "write"
    READ = "read"


@dataclass(frozen=True, slots=True)
class FileAccessSite:
    """A call that accesses a path. `path` is its text with names replaced by their values."""

    site: Site
    way: Way
    path: str


# The position of the path among the arguments, by the full name of the function.
_WRITERS: Final = {
    "torch.save": 1,
    "numpy.save": 0,
    "numpy.savez": 0,
    "numpy.savetxt": 0,
    "safetensors.torch.save_file": 1,
    "urllib.request.urlretrieve": 1,
    "shutil.copy": 1,
    "shutil.copy2": 1,
    "shutil.copyfile": 1,
    "shutil.copytree": 1,
    "shutil.move": 1,
    "os.rename": 1,
    "os.replace": 1,
    "joblib.dump": 1,
}
_READERS: Final = {
    "torch.load": 0,
    "numpy.load": 0,
    "numpy.loadtxt": 0,
    "numpy.memmap": 0,
    "safetensors.torch.load_file": 0,
    "safetensors.safe_open": 0,
    "datasets.load_from_disk": 0,
    "os.listdir": 0,
    "os.scandir": 0,
    "pandas.read_csv": 0,
    "pandas.read_parquet": 0,
    "joblib.load": 0,
}
_WRITING_METHODS: Final = {"save_pretrained": 0, "save_to_disk": 0, "to_csv": 0, "to_parquet": 0}
_READING_METHODS: Final = {"from_pretrained": 0}
_METHODS_OF_PATHS: Final = {
    "write_text": Way.WRITE,
    "write_bytes": Way.WRITE,
    "read_text": Way.READ,
    "read_bytes": Way.READ,
    "iterdir": Way.READ,
}
_KEYWORDS: Final = frozenset(
    {"f", "file", "filename", "path", "save_directory", "dataset_path", "dst", "fname"}
)


def file_access(site: Site) -> FileAccessSite | None:
    """Return what a call does to a file, None if it is not known to do anything to one."""
    call, function = site.call, site.function
    full = function.module.full_name(call.func)
    method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    if full == "open" or (method == "open" and not call.args and full.count(".") == 0):
        return _opened(site)
    if method in _METHODS_OF_PATHS and isinstance(call.func, ast.Attribute):
        return _access(site, _METHODS_OF_PATHS[method], call.func.value)
    for table, way in ((_WRITERS, Way.WRITE), (_READERS, Way.READ)):
        if full in table:
            return _access(site, way, _argument(call, table[full]))
    for table, way in ((_WRITING_METHODS, Way.WRITE), (_READING_METHODS, Way.READ)):
        if method in table:
            return _access(site, way, _argument(call, table[method]))
    return None


def path_text(expr: ast.expr, function: Function, depth: int = 0) -> str:
    """Return the text of a path with the names in it replaced by their only values."""
    value = value_of(expr, function)
    if value is not None and depth < _MAX_NAMES:
        return path_text(value, function, depth + 1)
    match expr:
        case ast.Call(func=func, args=[inner], keywords=[]) if ast.unparse(func) in _WRAPPERS:
            return path_text(inner, function, depth)
        case ast.Call(func=func, args=[first, *rest]) if ast.unparse(func).endswith("path.join"):
            return "/".join(path_text(part, function, depth) for part in (first, *rest))
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            return f"{path_text(left, function, depth)}/{path_text(right, function, depth)}"
        case ast.Constant(value=str() as text):
            return text
        case ast.JoinedStr(values=values):
            return "".join(_parts(values, function, depth))
        case _:
            return f"{{{ast.unparse(expr)}}}"


_WRAPPERS: Final = frozenset({"str", "Path", "pathlib.Path", "os.fspath"})


def _parts(values: list[ast.expr], function: Function, depth: int) -> Iterator[str]:
    for value in values:
        if isinstance(value, ast.FormattedValue):
            yield path_text(value.value, function, depth)
        else:
            yield path_text(value, function, depth)


def _opened(site: Site) -> FileAccessSite | None:
    path = _argument(site.call, 0)
    mode = site.call.args[1] if len(site.call.args) > 1 else None
    mode = next((k.value for k in site.call.keywords if k.arg == "mode"), mode)
    if mode is None:
        return _access(site, Way.READ, path)
    if not isinstance(mode, ast.Constant) or not isinstance(mode.value, str):
        return None
    if "a" in mode.value:
        return None
    return _access(site, Way.READ if mode.value.startswith("r") else Way.WRITE, path)


def _access(site: Site, way: Way, path: ast.expr | None) -> FileAccessSite | None:
    if path is None:
        return None
    text = path_text(path, site.function)
    return FileAccessSite(site, way, text) if text.strip("/{}") else None


def _argument(call: ast.Call, position: int) -> ast.expr | None:
    if len(call.args) > position and not isinstance(call.args[position], ast.Starred):
        return call.args[position]
    return next((k.value for k in call.keywords if k.arg in _KEYWORDS), None)
