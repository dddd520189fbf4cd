"""The arrows between modules: an import never points back."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "xpress_hf"

# Lowest first; a module imports from its own rank or below. A dotted name is an exception to its folder's rank.
RANKS = (
    ("configuration", "rotary", "sources", "fingerprint", "version"),
    ("checkpoints",),
    ("modeling",),
    ("decoding", "checkpoints.export"),
    ("evaluation", "hub"),
    ("training",),
    ("demo",),
    ("cli",),
    ("registration", "__init__"),
)
FILES = sorted(PACKAGE.rglob("*.py"))


def rank_of(module: str) -> int:
    """Rank of a dotted name below the package, by its longest listed prefix."""
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        for rank, names in enumerate(RANKS):
            if ".".join(parts[:length]) in names:
                return rank
    raise AssertionError(f"{module} has no rank")


def imported_modules(path: Path) -> set[str]:
    """Names of our modules that a file imports, as paths below the package."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = parts[: len(parts) - node.level]
            target = [*base, *(node.module.split(".") if node.module else [])]
            found.add(".".join(target or [alias.name for alias in node.names]))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("xpress_hf."):
            found.add(node.module.removeprefix("xpress_hf."))
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_arrows_never_point_back(path):
    own = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    for module in imported_modules(path):
        assert rank_of(module) <= rank_of(own), f"{path.name} imports {module}"


def test_the_hook_is_imported_by_the_package_alone():
    importers = [path.name for path in FILES if "decoding.hook" in imported_modules(path)]
    assert importers == ["__init__.py"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_files_and_functions_stay_readable(path):
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            length = node.end_lineno - body[0].lineno + 1 if body else 0
            assert length <= 50, f"{node.name} has {length} lines"
