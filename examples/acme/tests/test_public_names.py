"""We may use what mrv2 promises, and nothing else: everything else may change without notice."""

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[1]
PUBLIC = {"mrv2", "mrv2.layers", "mrv2.kernels", "mrv2.testing"}


def imported(file: Path) -> Iterator[tuple[str, str]]:
    """Each module of mrv2's that a file imports, with each name of it that the file uses."""
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "mrv2" and not node.level:
            yield from ((node.module or "", alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "__name__") for alias in node.names if alias.name.partition(".")[0] == "mrv2")
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "mrv2":
            yield "mrv2", node.attr


@pytest.mark.parametrize("file", sorted(PROJECT.glob("src/**/*.py")), ids=lambda file: file.name)
def test_the_package_uses_public_names_only(file: Path) -> None:
    """Modules that are public, and of them what they list."""
    for module, name in imported(file):
        assert module in PUBLIC
        assert name == "__name__" or name in importlib.import_module(module).__all__


@pytest.mark.parametrize("file", sorted(PROJECT.glob("training/*.py")), ids=lambda file: file.name)
def test_training_knows_nothing_of_mrv2(file: Path) -> None:
    """It runs elsewhere."""
    assert not list(imported(file))
