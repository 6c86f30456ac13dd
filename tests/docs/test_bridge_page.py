"""docs/bridge.md is what the bridge does: its tables name every member, and say rightly which the bridge has."""

import ast
import importlib.util
import inspect
import re
from dataclasses import fields
from pathlib import Path

import pytest

from mrv2.errors import all_error_classes
from mrv2.model_state.base import ModelState
from mrv2.state.view import StepView, TableView

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "bridge.md").read_text()
HAVE_VLLM = importlib.util.find_spec("vllm") is not None

OLDER = {"get_mm_embeddings"}
"""In the table for older releases alone."""


def rows(heading):
    """First cells (all names in them), and the other cells, of the table below a heading."""
    part = PAGE.partition(f"## {heading}")[2].partition("\n## ")[0]
    lines = [line for line in part.partition("\n|---|")[2].splitlines() if line.startswith("| `")]
    assert lines
    for line in lines:
        first, *rest = (cell.strip() for cell in line.strip("|").split(" | "))
        yield re.findall(r"`(\w+)`", first), rest


MEMBERS = {names[0]: rest for names, rest in rows("vLLM's `ModelState`")}


def bridged():
    """Methods of `BridgeMixin`, from its source: importing it needs vLLM."""
    tree = ast.parse((ROOT / "core" / "mrv2" / "bridge" / "state.py").read_text())
    (mixin,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "BridgeMixin")
    names = {n.name for n in mixin.body if isinstance(n, ast.FunctionDef)}
    return {n for n in names if not n.startswith("_") or n == "__init__"}


def test_the_table_says_which_members_the_bridge_has():
    kinds = {kind for kind, _ in MEMBERS.values()}
    assert kinds == {"bridged", "vLLM's"}
    assert {name for name, (kind, _) in MEMBERS.items() if kind == "bridged"} == bridged()


def test_every_member_of_our_model_state_is_on_the_page():
    part = PAGE.partition("## vLLM's `ModelState`")[2].partition("\n## ")[0]
    cells = " ".join(what for _, what in MEMBERS.values())
    prose = "\n".join(line for line in part.splitlines() if not line.startswith("|"))
    named = set(re.findall(r"`(\w+)", cells + prose))
    ours = {n for n, f in vars(ModelState).items() if inspect.isfunction(f) and not n.startswith("_")}
    assert ours
    assert ours <= named


def test_native_only_members_are_those_that_the_bridge_never_calls():
    source = (ROOT / "core" / "mrv2" / "bridge" / "state.py").read_text()
    called = set(re.findall(r"self\.ours\.(\w+)", source)) - {"groups"}
    cells = {what for _, what in MEMBERS.values()}
    for name in called:
        assert any(f"`{name}" in cell for cell in cells), f"{name} is called, and no row says from where"
    native = {
        n for cell in cells for clause in re.findall(r"[^:;]*native only", cell) for n in re.findall(r"`(\w+)`", clause)
    }
    assert {"prepare_attn", "get_mm_embeddings", "capture_inner", "graph_plan", "graph_support"} == native - {
        "cuda_graphs"
    }
    assert not native & called - {"prepare_attn"}


def test_the_views_rows_are_the_views_fields():
    named = [name for names, _ in rows("The views") for name in names]
    assert named == [f.name for f in fields(StepView)]
    table = next(rest for names, rest in rows("The views") if names == ["table"])[0]
    assert {f.name for f in fields(TableView)} <= set(re.findall(r"`(\w+)`", table))


def test_links_to_errors_lead_to_their_codes():
    linked = re.findall(r"\[(MRV2-\d+)\]\(errors\.md#(mrv2-\d+)\)", PAGE)
    assert linked
    assert all(code.lower() == anchor for code, anchor in linked)
    codes = {c.code for c in all_error_classes()}
    assert {code for code, _ in linked} <= codes
    assert {c for c in codes if c.startswith("MRV2-6")} - {"MRV2-606"} <= {code for code, _ in linked}


@pytest.mark.skipif(not HAVE_VLLM, reason="vLLM isn't installed (make test-vllm)")
def test_the_table_has_vllms_members_and_no_others():
    from vllm.v1.worker.gpu.model_states.interface import ModelState as VllmModelState

    theirs = {n for n in vars(VllmModelState) if not n.startswith("_")} | {"__init__"}
    assert theirs == set(MEMBERS) - OLDER


@pytest.mark.skipif(not HAVE_VLLM, reason="vLLM isn't installed (make test-vllm)")
def test_the_bridged_classes_have_every_member_where_the_table_says():
    from vllm.v1.worker.gpu.model_states.interface import ModelState as VllmModelState

    from mrv2.bridge.state import BridgeMixin, bridged_state
    from mrv2.model_state.default import DefaultModelState

    for recurrent in (False, True):
        made = bridged_state(DefaultModelState, recurrent=recurrent)
        assert issubclass(made, VllmModelState)
        for name, (kind, _) in MEMBERS.items():
            owner = next((c for c in made.__mro__ if name in vars(c)), None)
            if owner is not None:
                assert (owner is BridgeMixin) == (kind == "bridged"), name
