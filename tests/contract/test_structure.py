"""What the repository's parts may know of each other, and how large the core may get."""

from __future__ import annotations

import ast
import io
import json
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CORE = ROOT / "core" / "mrv2"
MODULES = sorted(CORE.rglob("*.py"))

# A module may import those of its own tier and of lower ones. Parts of `mrv2` not listed are the contract.
TIERS = {
    "state": 1,
    "kernels": 1,
    "layers": 2,
    "attn": 2,
    "model_state": 2,
    "sample": 2,
    "spec": 2,
    "mm": 2,
    "lora": 2,
    "loader": 2,
    "config": 2,
    "runner": 3,
    "debug": 4,
    "frontend": 5,
    "bench": 6,
    "bridge": 5,
    "testing": 6,
    "scaffold": 6,
    "templates": 6,
    "cli": 7,
    "__main__": 7,
}
DATA = {"mrv2.sample.params"}
"""Plain data that imports nothing heavy: the contract may name it."""
LINE_BOUND = 4000
MAX_FILE_LINES = 400


def part(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def name_of(file: Path) -> str:
    parts = file.relative_to(CORE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Modules imported anywhere, functions included, but for type checkers only."""
    for node in ast.iter_child_nodes(tree):
        if is_type_checking(node):
            for other in node.orelse:
                yield from imports(other)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            # `from mrv2 import hookspecs` names a module, `from mrv2.api import hookimpl` a thing in one.
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                is_module = (CORE.parent / Path(*full.split("."))).with_suffix(".py").exists()
                yield (full if is_module else str(node.module)), node.lineno
        else:
            yield from imports(node)


@pytest.mark.parametrize("file", MODULES, ids=lambda f: str(f.relative_to(CORE)))
def test_imports_point_one_way(file):
    own = name_of(file)
    tier = TIERS.get(part(own), 0)
    for module, line in imports(ast.parse(file.read_text())):
        if not module.startswith("mrv2.") or module in DATA:
            continue
        wanted = TIERS.get(part(module), 0)
        assert wanted <= tier, f"{file}:{line}: {own} imports {module}, which is above it"
        if part(module) in ("testing", "bridge"):
            assert part(own) in (part(module), "testing", "cli", "__main__"), f"{file}:{line}: {own} imports {module}"


def test_every_part_of_the_core_has_a_tier_or_is_contract():
    light = {name_of(f) for f in MODULES if part(name_of(f)) not in TIERS}
    packages = {p.name for p in CORE.iterdir() if p.is_dir() and (p / "__init__.py").exists()}
    assert packages <= set(TIERS)
    heavy = {"torch", "transformers", "triton", "safetensors", "tokenizers", "numpy"}
    for name in light:
        path = CORE.parent / Path(*name.split("."))
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        found = {m.partition(".")[0] for m, _ in imports(ast.parse(file.read_text()))} & heavy
        assert not found, f"{name} is contract and imports {found}"


NO_FAMILY = ('"llama3"',)
"""A `rope_type` as configs of many families spell it."""


def families() -> set[str]:
    """Words that name a family: those of the adapters here, of the catalogue, and common others."""
    words = {"llama", "qwen", "mistral", "mixtral", "gemma", "deepseek", "phi3", "glm", "granite", "olmo"}
    words |= {p.parent.name for p in (ROOT / "adapters").glob("*/pyproject.toml")}
    for entry in json.loads((CORE / "catalog.json").read_text())["catalog"]:
        words |= {entry["adapter"], *entry["model_types"]}
    return {w.lower() for w in words}


@pytest.mark.parametrize("file", MODULES, ids=lambda f: str(f.relative_to(CORE)))
def test_the_core_names_no_family(file):
    text = file.read_text()
    for name in NO_FAMILY:
        text = text.replace(name, "")
    pattern = re.compile("|".join(rf"(?<![a-z]){re.escape(w)}" for w in sorted(families())), re.I)
    found = [f"{file}:{text[: m.start()].count(chr(10)) + 1}: {m[0]}" for m in pattern.finditer(text)]
    assert not found


def code_lines(text: str) -> int:
    """Lines that hold code: neither blank, nor comment, nor docstring alone."""
    docs: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else []:
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                docs.update(range(statement.lineno, (statement.end_lineno or 0) + 1))
    skip = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in skip:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docs)


def test_the_core_stays_small(capsys):
    counted: dict[str, tuple[int, int]] = {}
    for group in ("contract", "state", "model_state", "runner"):
        files = [f for f in MODULES if (part(name_of(f)) or "") == group]
        if group == "contract":
            files = [f for f in MODULES if part(name_of(f)) not in TIERS]
        texts = [f.read_text() for f in files]
        counted[group] = (sum(map(code_lines, texts)), sum(len(t.splitlines()) for t in texts))
    total = sum(code for code, _ in counted.values())
    with capsys.disabled():
        listed = ", ".join(f"{name} {code} ({whole})" for name, (code, whole) in counted.items())
        print(f"\nlines of code (with comments and docs): {listed}; together {total} of {LINE_BOUND}")
    assert total < LINE_BOUND


def test_no_file_is_long():
    long = {str(f): n for f in MODULES if (n := len(f.read_text().splitlines())) > MAX_FILE_LINES}
    assert set(long) <= {str(CORE / "errors.py")}, long  # one class per error, mostly documentation


ADAPTER_FILES = sorted((ROOT / "adapters").glob("*/src/**/*.py"))


@pytest.mark.parametrize("file", ADAPTER_FILES, ids=lambda f: str(f.relative_to(ROOT / "adapters")))
def test_adapters_import_only_what_they_may(file):
    own = file.relative_to(ROOT / "adapters").parts[2]
    allowed = re.compile(rf"mrv2|mrv2\.(layers|kernels|testing)(\..*)?|{own}(\..*)?|torch(\..*)?")
    for module, line in imports(ast.parse(file.read_text())):
        top = module.partition(".")[0]
        assert allowed.fullmatch(module) or top in sys.stdlib_module_names, f"{file}:{line}: imports {module}"
