"""What the pages in `docs/` say of commands, options, variables and tests is there."""

import re
from pathlib import Path

import pytest

from mrv2 import SDK_API, __version__
from mrv2.cli.app import COMMANDS, load
from mrv2.manifest import accepts_api, parse_api

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
TEXTS = {page.name: page.read_text() for page in [*PAGES, ROOT / "README.md"]}
MAKEFILE = (ROOT / "Makefile").read_text()


def lines_of_code(text):
    """Lines of shell blocks and of inline code."""
    for block in re.findall(r"```(?:bash|console)\n(.*?)```", text, re.DOTALL):
        yield from block.splitlines()
    yield from re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


def options_of(command):
    """All option names of a command, both forms of a switch."""
    found = set()
    for parameter in load(command).params:
        found |= {*parameter.opts, *parameter.secondary_opts}
    return found


@pytest.mark.parametrize("name", TEXTS)
def test_commands_and_their_options_exist(name):
    for line in lines_of_code(TEXTS[name]):
        found = re.match(r"(?:\$ |! |[A-Z0-9_]+=\S+ )*mrv2 ([a-z-]+)\b(.*)", line)
        if found is None or found[1].startswith("-"):
            continue
        command, rest = found[1], found[2]
        assert command in COMMANDS, line
        own = re.split(r" -- |[#&|;]", rest)[0]
        known = options_of(command) | {"--help"}
        assert set(re.findall(r"(?<=\s)--[a-z-]+", own)) <= known, line


@pytest.mark.parametrize("name", TEXTS)
def test_targets_of_make_exist(name):
    for line in lines_of_code(TEXTS[name]):
        if line.startswith("make "):
            words = line.partition("#")[0].split()[1:]
            assert all(re.search(rf"^{re.escape(w)}:", MAKEFILE, re.M) for w in words if "=" not in w), line


@pytest.mark.parametrize("name", TEXTS)
def test_variables_of_ours_are_read_by_something(name):
    sources = "\n".join(f.read_text() for f in (ROOT / "core").rglob("*.py"))
    sources += MAKEFILE + "\n".join(f.read_text() for f in (ROOT / "tests").rglob("*.py"))
    for variable in set(re.findall(r"\bMRV2_[A-Z_]*[A-Z]\b", TEXTS[name])):
        assert variable in sources, variable


@pytest.mark.parametrize("name", [n for n in TEXTS if n != "README.md"])
def test_cited_tests_exist(name):
    for file, test in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", TEXTS[name]):
        assert re.search(rf"^def {test}\(", (ROOT / file).read_text(), re.M), f"{file}::{test}"


def test_the_security_page_has_every_command():
    page = TEXTS["security.md"]
    rows = "\n".join(re.findall(r"^\| `.*$", page, re.M))
    named = set(re.findall(r"`([a-z-]+)", rows))
    assert set(COMMANDS) <= named
    assert len(re.findall(r"`tests/", page)) > 20


def test_the_table_of_api_versions_is_the_codes():
    rows = re.findall(r"^\| (\d\.\d) \| (\d\.\d) \| (runs|refused)", TEXTS["version-policy.md"], re.M)
    assert len(rows) >= 5
    for adapter, core, verdict in rows:
        assert accepts_api(parse_api(adapter), parse_api(core)) == (verdict == "runs"), (adapter, core)
    assert f"now {SDK_API})" in TEXTS["version-policy.md"]
    assert f"now {__version__})" in TEXTS["version-policy.md"]


def test_the_bundled_package_is_named_as_it_is_fetched():
    from mrv2.loader.bundled import bundled_models

    assert f"{bundled_models()['smollm2'].requirement} " in TEXTS["offline.md"]


def test_options_are_found():
    assert {"--record", "--stream", "--no-stream"} <= options_of("generate")
