"""What adapters are written against changes only together with the SDK API's version."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path

import pytest

import mrv2
from mrv2.api import SDK_API
from mrv2.cli.changes import CHANGES, changes_since
from mrv2.hookspecs import HOOKS
from mrv2.testing import errors_page, hooks_page, surface

ROOT = Path(__file__).parents[2]
COMMITTED = Path(__file__).parent / "surface.json"


def test_the_surface_is_as_committed():
    difference = surface.compare(COMMITTED.read_text())
    assert not difference, (
        f"the public surface changed:\n{difference}\n\nIf meant: raise SDK_API in core/mrv2/api.py, add a line to "
        "CHANGES in core/mrv2/cli/changes.py and to CHANGELOG.md's section for adapter authors, then run\n"
        "  python -m mrv2.testing.surface tests/contract/surface.json --write"
    )


@pytest.mark.parametrize(
    "edit",
    [
        lambda s: s["hooks"].pop("mrv2_model"),
        lambda s: s["classes"]["mrv2.model_state.base:ModelState"].update(add_request="(self, row: int) -> None"),
        lambda s: s["dataclasses"]["mrv2.state.view:StepView"].pop("rows"),
        lambda s: s["classes"]["mrv2.layers.base:LayerSet"].pop("gated_mlp"),
        lambda s: s["functions"].update({"mrv2.layers:fresh": "(state: Tensor) -> Tensor"}),
        lambda s: s["adapters"][s["families"][0]].popitem(),
        lambda s: s.update(sdk_api="9.9"),
    ],
)
def test_a_change_of_any_kind_is_seen(edit):
    changed = json.loads(COMMITTED.read_text())
    edit(changed)
    assert surface.compare(json.dumps(changed, indent=1, sort_keys=True) + "\n")


def test_the_surface_has_every_family_of_the_repository():
    families = sorted(p.parent.name for p in (ROOT / "adapters").glob("*/pyproject.toml"))
    assert json.loads(COMMITTED.read_text())["families"] == families


def test_all_specifications_are_listed_in_hooks():
    specs = {name for name in vars(sys.modules["mrv2.hookspecs"]) if name.startswith("mrv2_")}
    assert specs == set(HOOKS)


def test_the_present_api_has_its_line_of_changes():
    assert SDK_API in CHANGES
    assert changes_since(SDK_API) == ()


def test_the_version_is_the_projects():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert mrv2.__version__ == project["version"]


def test_every_export_exists_and_is_typed():
    typed = (ROOT / "core/mrv2/__init__.py").read_text()
    for name in mrv2.__all__:
        assert getattr(mrv2, name) is not None
        assert name in typed.partition("# Name to module")[0]
    assert set(dir(mrv2)) == set(mrv2.__all__)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = mrv2.no_such_name


def test_the_page_of_errors_is_made_from_the_classes():
    page = (ROOT / "docs/errors.md").read_text()
    assert page == errors_page.render(), "run: python -m mrv2.testing.errors_page docs/errors.md"


def test_the_page_of_hooks_is_made_from_the_specifications():
    page = (ROOT / "docs/hooks.md").read_text()
    assert page == hooks_page.render(), "run: python -m mrv2.testing.hooks_page docs/hooks.md"
    assert all(f"## {name}\n" in page for name in HOOKS)
