"""What the documents say is there, and what they show runs."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
PAGES += sorted(DOCS.rglob("*.md"))
ADRS = sorted((DOCS / "adr").glob("*.md"))
CODE = re.compile(r"`([^`\n]+)`")
TREES = ("actors", "benchmarks", "deploy", "docker", "docs", "examples", "rayhicache", "tests")
A_PATH = re.compile(rf"\.ci/run|(?:{'|'.join(TREES)})/[\w./-]*")

in_pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def _text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def _blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", _text(page), re.MULTILINE | re.DOTALL)


def _rows(page: Path, heading: str = "") -> list[list[str]]:
    """Cells of the table rows of a page, or of the part under a heading; no head, no rule."""
    text = _text(page).split(heading, 1)[1] if heading else _text(page)
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return [row for row in rows if row[0] not in ("word", "id")]


def _defined(path: str) -> set[str]:
    """Names that a module defines, methods and attributes as `Class.name`."""
    found = set()
    for node in ast.parse(_text(ROOT / path)).body:
        found |= _names(node)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{name}" for inner in node.body for name in _names(inner)}
    return found


def _names(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else []
    if isinstance(node, ast.AnnAssign):
        targets = [node.target]
    return {target.id for target in targets if isinstance(target, ast.Name)}


@in_pages
def test_every_path_that_a_page_names_is_there(page: Path) -> None:
    named = {word for code in CODE.findall(_text(page)) for word in A_PATH.findall(code)}
    missing = [name for name in sorted(named) if not (ROOT / name).exists()]
    assert not missing, f"{page.name} names {missing}"


@in_pages
def test_every_link_between_pages_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)\)", _text(page)):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@in_pages
def test_every_make_target_that_a_page_names_is_there(page: Path) -> None:
    targets = set(re.findall(r"^([a-z.]+):", _text(ROOT / "Makefile"), re.MULTILINE))
    pieces = [*CODE.findall(_text(page)), *re.findall(r"^    (.*)$", _text(page), re.MULTILINE)]
    named = {word for piece in pieces for word in re.findall(r"\bmake ([a-z]+)\b", piece)}
    assert named <= targets


@in_pages
def test_every_command_that_a_page_names_is_one(page: Path) -> None:
    said = subprocess.run(
        [sys.executable, "-m", "rayhicache.cli", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    commands = set(re.findall(r"^    (\w+)  ", said, re.MULTILINE))
    named = set(re.findall(r"(?:`|^    )rayhicache ([a-z]+)", _text(page), re.MULTILINE))
    assert named <= commands


@in_pages
def test_prose_fits_the_width(page: Path) -> None:
    wide = [line for line in _text(page).splitlines() if len(line) > 100 and line[0] != "|"]
    assert not wide


def test_every_glossary_word_has_a_code_home() -> None:
    rows = _rows(DOCS / "glossary.md")
    assert len(rows) > 50
    words = [row[0] for row in rows]
    assert len(words) == len(set(words)), "one line a word"
    for word, _, home in rows:
        path, name = CODE.findall(home)
        assert name in _defined(path), f"{word!r}: {path} doesn't define {name}"


@pytest.mark.parametrize("page", ADRS, ids=lambda page: page.name)
def test_a_decision_says_why_what_and_then(page: Path) -> None:
    headings = re.findall(r"^#+ (.*)$", _text(page), re.MULTILINE)
    assert headings[0].startswith(f"{page.name[:4]}. ")
    assert headings[1:] == ["Context", "Decision", "Consequences"]


def test_decisions_are_numbered_without_gaps() -> None:
    assert [int(page.name[:4]) for page in ADRS] == list(range(1, len(ADRS) + 1))


def test_the_changelog_has_the_package_s_version() -> None:
    project = tomllib.loads(_text(ROOT / "pyproject.toml"))["project"]
    assert f"## [{project['version']}]" in _text(ROOT / "CHANGELOG.md")


def test_every_regression_is_tested_where_the_page_says_or_named_as_not_yet() -> None:
    rows = _rows(DOCS / "testing.md", "## Faults that this field has had")
    assert sorted(int(row[0][1:]) for row in rows) == list(range(1, 39))
    for number, _, where in rows:
        for path in CODE.findall(where):
            assert re.search(rf"\b{number}\b", _text(ROOT / path)), f"{path} doesn't name {number}"


def test_devices_that_hold_a_race_open_are_there() -> None:
    section = _text(DOCS / "testing.md").split("## Holding a race open")[1].split("\n## ")[0]
    homes = re.findall(r"`([\w/]+\.py)` `(\w+)` \|$", section, re.MULTILINE)
    assert len(homes) > 5
    for path, name in homes:
        assert name in _defined(path), f"{path} doesn't define {name}"


def test_the_sizes_in_the_readme_are_what_its_snippet_prints(
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = ROOT / "README.md"
    (snippet,) = [block for block in _blocks(page) if "RecordLayout" in block]
    exec(compile(snippet, "README.md", "exec"), {"__name__": "readme"})
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 4
    assert "\n".join(printed) in _text(page)


def test_the_loop_in_the_readme_is_the_example_s() -> None:
    (loop,) = [block for block in _blocks(ROOT / "README.md") if "client.lookup" in block]
    assert textwrap.indent(loop, " " * 8) in _text(ROOT / "examples/own_engine.py")


@pytest.mark.ray
@pytest.mark.slow
def test_the_python_of_the_readme_runs() -> None:
    (block,) = [block for block in _blocks(ROOT / "README.md") if "hc.launch" in block]
    said = subprocess.run(
        [sys.executable, "-c", block],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert said.returncode == 0, said.stderr
    assert "node1" in said.stdout


def test_no_python_block_goes_unchecked() -> None:
    checked = ("RecordLayout", "client.lookup", "hc.launch")
    for page in PAGES:
        for block in _blocks(page):
            assert any(mark in block for mark in checked), f"{page.name}: {block[:40]!r}"
