"""Which vLLMs the bridge fits: signatures of everything it touches, per release it was tested with.

python -m mrv2.bridge.versions            # compare the installed vLLM with the table
python -m mrv2.bridge.versions --write    # add it, after the tests have passed with it
"""

from __future__ import annotations

import dis
import importlib
import inspect
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from types import FunctionType
from typing import Any

from packaging.version import Version

from mrv2.bridge.touched import FIELDS, NAMES, TOUCHED
from mrv2.errors import VllmVersionError

logger = logging.getLogger("mrv2.bridge")

Signatures = dict[str, str]


def signatures() -> Signatures:
    """What this vLLM has, by member; `absent` where it lacks one."""
    found: Signatures = {}
    for path, methods in TOUCHED.items():
        thing = _load(path)
        for name in methods:
            found[f"{path}.{name}"] = _parameters(getattr(thing, name, None))
        if not methods:
            found[path] = _parameters(thing)
    for path, names in FIELDS.items():
        thing = _load(path)
        found |= {f"{path}.{name}": "there" if _has(thing, name) else "absent" for name in names}
    found |= {path: "absent" if _load(path) is None else "there" for path in NAMES}
    return found


def _has(thing: Any, name: str) -> bool:
    """Whether objects of a class have an attribute: a field, one of the class's, or one that its methods set."""
    if not isinstance(thing, type):
        return False
    if hasattr(thing, name) or any(name in vars(one).get("__annotations__", ()) for one in thing.__mro__):
        return True
    methods = [f for one in thing.__mro__ for f in vars(one).values() if name in _names_in(f)]
    return any(
        step.opname == "STORE_ATTR" and step.argval == name
        for method in methods
        for step in dis.get_instructions(method)
    )


def _names_in(function: Any) -> tuple[str, ...]:
    return function.__code__.co_names if isinstance(function, FunctionType) else ()


def _load(path: str) -> Any:
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None


def _parameters(function: Any) -> str:
    """Names, kinds, and which may be left out; not annotations, whose spelling changes nothing."""
    if function is None:
        return "absent"
    if isinstance(function, property):
        return "property"
    shown = []
    for p in inspect.signature(function).parameters.values():
        star = "*" if p.kind is p.VAR_POSITIONAL else "**" if p.kind is p.VAR_KEYWORD else ""
        keyword = "*, " if p.kind is p.KEYWORD_ONLY else ""
        shown.append(f"{keyword}{star}{p.name}{'' if p.default is p.empty else '='}")
    return f"({', '.join(shown)})"


def table() -> dict[str, Signatures]:
    """The releases that the bridge was tested with."""
    loaded: dict[str, Signatures] = json.loads(files("mrv2.bridge").joinpath("versions.json").read_text("utf-8"))
    return loaded


def installed() -> str:
    """This vLLM's release, without what a build adds to it."""
    import vllm

    return Version(vllm.__version__).base_version


@cache
def check_version() -> None:
    """Compare once per process.

    Raises:
        VllmVersionError: a member differs from the table's, or from every listed release's if this one isn't listed.
    """
    compare(installed(), signatures(), table())


def compare(version: str, found: Signatures, known: Mapping[str, Signatures]) -> None:
    """As `check_version`, of given signatures."""
    if version not in known:
        same = [listed for listed, theirs in known.items() if theirs == found]
        if same:
            logger.warning("vLLM %s isn't listed; all that mrv2 touches is as in %s", version, same[-1])
            return
    listed = version if version in known else min(known, key=lambda v: len(_differences(found, known[v])))
    wrong = _differences(found, known[listed])
    if wrong:
        raise VllmVersionError(
            f"vLLM {version} differs from {listed} in {len(wrong)} of the members that mrv2 touches: "
            + "; ".join(f"{name} is {found.get(name, 'absent')}, was {known[listed].get(name)}" for name in wrong[:6]),
            where=f"vllm {version}",
            fix=f"install one of: {', '.join(known)}; or a newer mrv2",
        )


def _differences(found: Signatures, known: Signatures) -> list[str]:
    return [name for name in sorted(found.keys() | known.keys()) if found.get(name) != known.get(name)]


def main(argv: Sequence[str]) -> int:
    """Compare, or write."""
    if "--write" in argv:
        file = Path(__file__).with_name("versions.json")
        merged = table() | {installed(): signatures()}
        ordered = dict(sorted(merged.items(), key=lambda item: Version(item[0])))
        file.write_text(json.dumps(ordered, indent=1, sort_keys=False) + "\n", encoding="utf-8")
        return 0
    try:
        check_version()
    except VllmVersionError as error:
        print(error)
        return 1
    print(f"vLLM {installed()} fits")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
