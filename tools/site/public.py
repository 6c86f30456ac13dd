"""The public names, which are those of `tests/contract/surface.json`, as sections of the API reference."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import griffe
from comments import Comments

ROOT = Path(__file__).parents[2]
SOURCES = [ROOT / "core", *sorted((ROOT / "adapters").glob("*/src"))]
SURFACE = ROOT / "tests" / "contract" / "surface.json"
SUITES = ROOT / "core" / "mrv2" / "testing" / "suites"
STANDARD = "test_"

Members = Mapping[str, Sequence[str]]
"""Of a public class, by path: the names that are public."""


class Reference:
    """What is public, and its documentation, read without importing anything."""

    def __init__(self) -> None:
        self.surface: dict[str, Any] = json.loads(SURFACE.read_text())
        loader = griffe.GriffeLoader(search_paths=SOURCES, extensions=griffe.load_extensions(Comments()))
        for name in ("mrv2", *(f"mrv2_adapter_{family}" for family in self.surface["families"])):
            loader.load(name)
        loader.resolve_aliases(implicit=True, external=False)
        self._modules = loader.modules_collection

    def find(self, path: str) -> Any:
        """The object behind a path such as `mrv2.layers:fresh`, wherever it is defined."""
        found: Any = self._modules[path.replace(":", ".")]
        return found.final_target if found.is_alias else found

    # -- documentation -----------------------------------------------------------------------------------

    def undocumented(self) -> Iterator[str]:
        """Public names without a word on them."""
        whole = [f"mrv2.{name}" for name in self.surface["exports"] if not name.startswith("_")]
        for path in [*whole, *self.surface["functions"], *self._classes()]:
            if self.find(path).docstring is None:
                yield path
        for path, members in self._classes().items():
            cls = self.find(path)
            listed = _listed(cls)
            for name in members:
                if not self._is_documented(cls, name) and name not in listed:
                    yield f"{path}.{name}"

    def _classes(self) -> Members:
        families = self.surface["adapters"].values()
        found: dict[str, Sequence[str]] = {**self.surface["classes"], **self.surface["dataclasses"]}
        for classes in families:
            found |= dict.fromkeys(classes, ())
        return {path: _own(members) for path, members in found.items()}

    def _is_documented(self, cls: Any, name: str) -> bool:
        homes = [cls, *cls.mro()]
        return any(name in home.members and home.members[name].docstring is not None for home in homes)

    # -- sections ----------------------------------------------------------------------------------------

    def sections(self) -> str:
        """Directives for mkdocstrings, public names by where an adapter imports them from."""
        classes = self._classes()
        exports = {self.find(f"mrv2.{n}").path: n for n in self.surface["exports"] if not n.startswith("_")}
        parts = ["## mrv2", *(self._directive(path, f"mrv2.{name}", classes) for path, name in exports.items())]
        rest = [p for p in [*self.surface["functions"], *classes] if self.find(p).path not in exports]
        for title, wanted in (
            ("mrv2.layers", r"mrv2\.(layers|attn|state)\b"),
            ("mrv2.testing", r"mrv2\.testing\b"),
            ("Other data and classes", r"mrv2\.(?!layers|attn|state|testing)"),
            ("Families", r"mrv2_adapter_"),
        ):
            chosen = [p for p in rest if re.match(wanted, p)]
            parts += [f"## {title}", *(self._directive(self.find(p).path, "", classes) for p in chosen)]
            if title == "mrv2.testing":
                parts.append(self._standard_tests())
        return "\n\n".join(parts) + "\n"

    def _directive(self, path: str, heading: str, classes: Members) -> str:
        names = next((m for p, m in classes.items() if self.find(p).path == path), None)
        lines = [f"::: {path}", "    options:"]
        if heading:
            lines.append(f"      heading: {heading}")
        if names is not None:
            cls, listed = self.find(path), _listed(self.find(path))
            # What the class's own documentation lists isn't said again.
            own = [n for n, m in cls.members.items() if n in names and (m.docstring is not None or n not in listed)]
            lines.append(f"      members: [{', '.join(own)}]" if own else "      members: false")
        return "\n".join(lines) if len(lines) > 2 else lines[0]

    def _standard_tests(self) -> str:
        rows = ["### Standard tests of AdapterConformance", "", "| test | what holds |", "|---|---|"]
        tests = self.surface["classes"]["mrv2.testing.conformance:AdapterConformance"]
        chosen = (t for t in tests if t.startswith(STANDARD))
        return "\n".join([*rows, *(f"| `{name}` | {self._first_sentence(name)} |" for name in chosen)])

    def _first_sentence(self, test: str) -> str:
        for name, suite in self._modules["mrv2.testing.suites"].modules.items():
            check = test.removeprefix(f"{STANDARD}{name}_")
            if check in suite.members:
                text: str = suite.members[check].docstring.value
                return text.partition("\n\n")[0].replace("\n", " ")
        raise LookupError(f"{test} is no check of a suite")


def _own(members: Mapping[str, Any] | Sequence[str]) -> list[str]:
    """Neither special methods nor standard tests, which stand in a table."""
    return [m for m in members if not m.startswith(("__", STANDARD)) and m != "mrv2_subject"]


def _listed(cls: Any) -> set[str]:
    """Names in the sections `Args` and `Attributes` of a class's documentation and of its bases'."""
    found: set[str] = set()
    for home in [cls, *cls.mro()]:
        for section in home.docstring.parse("google") if home.docstring else ():
            if section.kind.value in ("parameters", "attributes"):
                found |= {item.name for item in section.value}
    return found
