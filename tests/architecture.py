"""The rules of the house, read from the syntax tree. Each yields what breaks it in one module.

A rule never imports what it judges, so code that needs a GPU or Ray is judged everywhere.
"""

from __future__ import annotations

import ast
import os
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).resolve().parent.parent
PACKAGE_ROOTS = {"rayhicache": "rayhicache", "actors": "rayhicache.actors"}
OTHER_ROOTS = {"benchmarks": "benchmarks", "examples": "examples", "tests": "tests"}
FILE_LINES_MAX = 400
FUNCTION_LINES_MAX = 70

# Lowest first. A room stands on the floors under its own; neighbours on a floor don't meet.
FLOORS = (
    ("errors",),
    ("config", "metrics", "logs"),
    ("core",),
    ("wire", "memory"),
    ("transport", "device"),
    ("pools",),
    ("requests",),
    ("client",),
    ("engines",),
    ("actors",),
    ("cli",),
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
FACADE, TESTING = "rayhicache", "testing"
RAY_TEST_TOOLS = "rayhicache.testing.ray"  # a module, or the beginning of its name

# Parts of the standard library with a clock, chance, threads or I/O: core gets values instead.
IMPURE_TEXT = """
    asyncio concurrent datetime fcntl io logging mmap multiprocessing os pathlib queue random
    secrets select selectors shutil signal socket subprocess tempfile threading time uuid
"""
IMPURE = frozenset(IMPURE_TEXT.split())
IMPURE_CALLS = frozenset({"input", "open", "print"})

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Import:
    """One imported name; `lazy` when it's inside a function or for the type checker only."""

    target: str
    line: int
    lazy: bool


@dataclass(frozen=True)
class Module:
    """One source file under the name by which it is imported."""

    name: str
    source: str
    is_package: bool = False

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source, filename=self.name)

    @property
    def room(self) -> str:
        """The part of the library that it belongs to, or the library's own name for its face."""
        parts = self.name.split(".")
        return parts[1] if len(parts) > 1 else parts[0]

    @cached_property
    def imports(self) -> tuple[Import, ...]:
        return tuple(_imports(self, self.tree, lazy=False))


def _imports(module: Module, node: ast.AST, *, lazy: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, child.lineno, lazy) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            base = _base(module, child)
            for alias in child.names:
                yield Import(f"{base}.{alias.name}", child.lineno, lazy)
        else:
            inner = lazy or isinstance(child, FunctionNode) or _is_for_type_checker(child)
            yield from _imports(module, child, lazy=inner)


def _base(module: Module, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = module.name.split(".")
    package = parts[: len(parts) - node.level + module.is_package]
    return ".".join([*package, node.module] if node.module else package)


def _is_for_type_checker(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def floors(module: Module) -> Iterator[str]:
    """Imports point inward: to a lower floor, or within the room."""
    own = module.room
    if own not in {*FLOOR_OF, FACADE, TESTING}:
        yield f"{own} has no floor: give it one in tests/architecture.py"
        return
    for found in module.imports:
        if found.target.split(".")[0] != "rayhicache":
            continue
        parts = found.target.split(".")
        other = parts[1] if len(parts) > 1 else FACADE
        if other not in {*FLOOR_OF, TESTING}:
            other = FACADE
        if other != own and not _may_import(module, own, other):
            yield f"line {found.line}: {own} may not import {other} ({found.target})"


def _may_import(module: Module, own: str, other: str) -> bool:
    if own == TESTING:
        return other != "actors" or module.name.startswith(RAY_TEST_TOOLS)
    if other in (TESTING, FACADE):
        return False
    return own == FACADE or FLOOR_OF[other] < FLOOR_OF[own]


def core_is_pure(module: Module) -> Iterator[str]:
    """Core imports the pure part of the standard library, itself and the errors."""
    if module.room != "core":
        return
    for found in module.imports:
        top = found.target.split(".")[0]
        if found.target.startswith(("rayhicache.core", "rayhicache.errors")):
            continue
        if top not in sys.stdlib_module_names or top in IMPURE:
            yield f"line {found.line}: core may not import {found.target}"
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Name) and node.id in IMPURE_CALLS:
            yield f"line {node.lineno}: core may not call {node.id}"


def ray_stays_in_actors(module: Module) -> Iterator[str]:
    """Only actors and the command line import Ray; the face does so on first use."""
    if module.room in ("actors", "cli") or module.name.startswith(RAY_TEST_TOOLS):
        return
    for found in module.imports:
        parts = found.target.split(".")
        touches_ray = parts[0] == "ray" or parts[:2] == ["rayhicache", "actors"]
        if touches_ray and not (module.room == FACADE and found.lazy):
            yield f"line {found.line}: {module.name} may not import {found.target}"


def cuda_stays_in_device(module: Module) -> Iterator[str]:
    """CUDA is reached through the device protocols; only their room names it."""
    if module.room == "device":
        return
    for found in module.imports:
        if found.target.startswith("torch.cuda"):
            yield f"line {found.line}: {module.name} may not import torch.cuda"
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and node.attr == "cuda":
            yield f"line {node.lineno}: {module.name} may not use {ast.unparse(node)}"


def public_names_are_documented(module: Module) -> Iterator[str]:
    """A module, and each public class, function and method, says what it guarantees."""
    if not ast.get_docstring(module.tree):
        yield "line 1: the module has no docstring"
    yield from _undocumented(module.tree.body, "")


def _undocumented(body: list[ast.stmt], prefix: str) -> Iterator[str]:
    for node in body:
        if not isinstance(node, FunctionNode | ast.ClassDef) or node.name.startswith("_"):
            continue
        marks = {ast.unparse(mark).split(".")[-1] for mark in node.decorator_list}
        if not marks & {"overload", "override", "setter"} and not ast.get_docstring(node):
            yield f"line {node.lineno}: {prefix}{node.name} has no docstring"
        if isinstance(node, ast.ClassDef):
            yield from _undocumented(node.body, f"{node.name}.")


def files_and_functions_are_short(module: Module) -> Iterator[str]:
    """A file holds one idea, a function fits a screen."""
    lines = len(module.source.splitlines())
    if lines > FILE_LINES_MAX:
        yield f"the file has {lines} lines, at most {FILE_LINES_MAX} are allowed"
    for node in ast.walk(module.tree):
        if isinstance(node, FunctionNode):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES_MAX:
                yield f"line {node.lineno}: {node.name} has {length} lines"


def no_guessing_at_attributes(module: Module) -> Iterator[str]:
    """State is a type, never a question whether an attribute is there."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Name) and node.id == "hasattr":
            yield f"line {node.lineno}: hasattr"


def no_broad_except(module: Module) -> Iterator[str]:
    """A handler names what it expects.

    Two may catch `BaseException`: one that cleans up and raises, and one at a thread's end that
    keeps the fault for those who wait on the thread, by storing it or with `set_exception`.
    """
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ExceptHandler):
            caught = _names(node.type)
            if not caught or "Exception" in caught:
                yield f"line {node.lineno}: a handler that catches everything"
            elif "BaseException" in caught and not _passes_on(node):
                yield f"line {node.lineno}: BaseException is caught, not raised and not kept"
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("suppress"):
            suppressed = set().union(*(_names(arg) for arg in node.args))
            if suppressed & {"Exception", "BaseException"}:
                yield f"line {node.lineno}: everything is suppressed"


def _passes_on(handler: ast.ExceptHandler) -> bool:
    if isinstance(handler.body[-1], ast.Raise):
        return True
    for node in ast.walk(handler):
        match node:
            case ast.Assign(targets=[ast.Attribute()], value=ast.Name(id=name)):
                pass
            case ast.Call(func=ast.Attribute(attr="set_exception"), args=[ast.Name(id=name)]):
                pass
            case _:
                continue
        if name == handler.name:
            return True
    return False


def _names(node: ast.expr | None) -> set[str]:
    if node is None:
        return set()
    nodes = node.elts if isinstance(node, ast.Tuple) else [node]
    return {ast.unparse(each).removeprefix("builtins.") for each in nodes}


def actors_have_one_name(module: Module) -> Iterator[str]:
    """The folder `actors` is imported as `rayhicache.actors` only."""
    for found in module.imports:
        if found.target.split(".")[0] == "actors":
            yield f"line {found.line}: write rayhicache.{found.target}"


Rule: TypeAlias = "Callable[[Module], Iterator[str]]"
PACKAGE_RULES = (
    floors,
    core_is_pure,
    ray_stays_in_actors,
    cuda_stays_in_device,
    public_names_are_documented,
)
EVERYWHERE_RULES = (
    files_and_functions_are_short,
    no_guessing_at_attributes,
    no_broad_except,
    actors_have_one_name,
)


def files(root: str) -> list[Path]:
    """Python files under a folder of the repository; links to folders are not entered."""
    found = []
    for folder, _, names in os.walk(ROOT / root, followlinks=False):
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(found)


def modules(roots: dict[str, str]) -> Iterator[Module]:
    """The modules of some folders, each under the name by which it is imported."""
    for root, package in roots.items():
        for file in files(root):
            parts = [package, *file.relative_to(ROOT / root).with_suffix("").parts]
            is_package = parts[-1] == "__init__"
            name = ".".join(parts[:-1] if is_package else parts)
            yield Module(name, file.read_text(encoding="utf-8"), is_package)
