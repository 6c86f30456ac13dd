"""What a new project is made from: answers, those that follow from them, and which names can't be had."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from mrv2.errors import ScaffoldError

TEMPLATE = Path(__file__).parent / "template"
"""The skeleton, in the form that cookiecutter takes."""

NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
MAX_NAME = 50
"""Characters of a name: what is made of it stays within lines and file names."""


def choices(question: str) -> tuple[str, ...]:
    """What may be answered to `kind`, `ci` or `license`; the first is the default."""
    return tuple(_questions()[question])


def _questions() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((TEMPLATE / "cookiecutter.json").read_text(encoding="utf-8"))
    return found


def environment() -> Environment:
    """As cookiecutter's: an unknown variable is an error, and the last line's end is kept."""
    options: dict[str, Any] = _questions()["_jinja2_env_vars"]
    return Environment(undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False, **options)


def check_choice(option: str, value: str) -> None:
    """Refuse what isn't among an option's values.

    Raises:
        ScaffoldError: the message lists them.
    """
    known = choices(option)
    if value not in known:
        raise ScaffoldError(
            f"there is no {option} {value!r}",
            where=f"mrv2 new-adapter --{option}",
            fix=f"give one of {', '.join(known)}",
        )


def check_name(name: str) -> None:
    """Refuse a malformed name.

    Raises:
        ScaffoldError: see `NAME`.
    """
    if NAME.fullmatch(name) is None or len(name) > MAX_NAME:
        raise ScaffoldError(
            f"{name!r} is no name for an adapter",
            where="mrv2 new-adapter NAME",
            fix=f"lower-case letters and digits, words joined by single hyphens, at most {MAX_NAME} characters",
        )


def check_free(name: str, installed: Mapping[str, str], known: Mapping[str, str]) -> None:
    """Refuse a name that somebody has.

    Args:
        name: of the adapter.
        installed: adapters of this environment, name to where they come from.
        known: adapters of catalogues, name to how they are installed.

    Raises:
        ScaffoldError: the message says who has it.
    """
    package = package_of(name)
    if name in installed:
        taken = f"an installed adapter has it ({installed[name]})"
    elif name in known:
        taken = f"a catalogue has it: pip install {known[name]}"
    elif importlib.util.find_spec(package) is not None:
        taken = f"the package {package} can be imported already"
    else:
        return
    raise ScaffoldError(
        f"the name {name!r} is taken: {taken}",
        where="mrv2 new-adapter NAME",
        fix="choose another; `mrv2 list` shows all",
    )


def package_of(name: str) -> str:
    """The name of an adapter's Python package."""
    return f"mrv2_adapter_{name.replace('-', '_')}"


def complete(given: Mapping[str, Any]) -> dict[str, Any]:
    """The template's variables: answers given, defaults, and what follows from them, as cookiecutter works it out."""
    env, found = environment(), dict[str, Any]()
    for key, default in _questions().items():
        if key in given:
            found[key] = given[key]
        elif isinstance(default, Sequence) and not isinstance(default, str):
            found[key] = default[0]
        elif isinstance(default, str) and (key.startswith("__") or not key.startswith("_")):
            found[key] = env.from_string(default).render(cookiecutter=found)
        else:
            found[key] = default
    return found


def known_to_transformers(model_type: str) -> bool:
    """Whether transformers brings a config class for a model type, which every host would then take.

    Looked up in the text of its table: to import it takes seconds.
    """
    spec = importlib.util.find_spec("transformers")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    pattern = re.compile(rf"""["']{re.escape(model_type)}["']\s*[,:]""")
    files = [file for folder in folders for file in sorted(Path(folder, "models", "auto").glob("*auto*.py"))]
    return any(pattern.search(file.read_text(encoding="utf-8")) for file in files)
