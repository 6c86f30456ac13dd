"""What the sources touch of vLLM is in the table of fingerprints; a release that changes it is refused by name."""

import ast
import importlib
from pathlib import Path

import pytest

from mrv2.bridge.touched import FIELDS, NAMES, TOUCHED
from mrv2.bridge.versions import installed, table

CORE = Path(__file__).parents[2] / "core" / "mrv2"
CONFIGS = {
    f"{name}_config": f"vllm.config:{name.capitalize()}Config"
    for name in ("model", "cache", "parallel", "scheduler", "compilation", "load")
}
"""Attributes under which vLLM's config has others."""

OBJECTS = {
    "vllm:ModelRegistry": "vllm.model_executor.models.registry:_ModelRegistry",
    "vllm.renderers.registry:RENDERER_REGISTRY": "vllm.renderers.registry:RendererRegistry",
    "vllm.tokenizers:TokenizerRegistry": "vllm.tokenizers.registry:_TokenizerRegistry",
}
"""Of what isn't a class or a function, the class."""

FREE = {"vllm.platforms:current_platform.device_type", "vllm.envs:VLLM_CACHE_ROOT", "vllm:__version__"}
"""What a release can't be without."""


def imported(tree):
    """Names of the file to what they are of vLLM's."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == "vllm":
            names |= {alias.asname or alias.name: f"{node.module}:{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            named = [a for a in node.names if a.name.split(".")[0] == "vllm"]
            names |= {alias.asname or "vllm": alias.name if alias.asname else "vllm" for alias in named}
    return names


def touched(source, *, hosted=True):
    """Everything of vLLM's in a source: "module:name", or "module:name.attribute".

    Args:
        source: its text.
        hosted: whether configs in it are vLLM's.
    """
    tree = ast.parse(source)
    names = imported(tree)
    found = {name for name in names.values() if ":" in name}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            of = node.value
            if isinstance(of, ast.Name) and of.id in names:
                what = names[of.id]
                found.add(f"{OBJECTS.get(what, what)}.{node.attr}" if ":" in what else f"{what}:{node.attr}")
            elif hosted and isinstance(of, ast.Attribute) and of.attr in CONFIGS:
                found.add(f"{CONFIGS[of.attr]}.{node.attr}")
        elif isinstance(node, ast.ClassDef):
            bases = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
            for base in (names[b.id] for b in bases if isinstance(b, ast.Name) and b.id in names):
                own = {n.name for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}
                found |= {f"{base}.{name}" for name in own if has(base, name)}
    return found


def has(path, name):
    """Whether a class of vLLM's has such a member, so that a method of that name overrides it."""
    module, _, cls = path.partition(":")
    found = getattr(importlib.import_module(module), cls)
    return any(name in vars(one) for one in found.__mro__ if one.__module__.startswith("vllm"))


LISTED = {f"{path}.{name}" for paths in (TOUCHED, FIELDS) for path, names in paths.items() for name in names}
LISTED |= TOUCHED.keys() | FIELDS.keys() | set(NAMES) | FREE


def test_nothing_is_touched_that_the_table_lacks():
    missing = {}
    for file in CORE.rglob("*.py"):
        hosted = file.is_relative_to(CORE / "bridge") or file.is_relative_to(CORE / "layers" / "vllm")
        missing[str(file.relative_to(CORE))] = touched(file.read_text("utf-8"), hosted=hosted) - LISTED
    assert len(missing) > 100
    assert {file: names for file, names in missing.items() if names} == {}


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("from vllm.config import DeviceConfig", "vllm.config:DeviceConfig"),
        ("import vllm.envs as envs\nenvs.VLLM_PORT", "vllm.envs:VLLM_PORT"),
        ("def f(c): return c.parallel_config.data_parallel_size", "vllm.config:ParallelConfig.data_parallel_size"),
        ("from vllm import SamplingParams as P\nP.clone", "vllm:SamplingParams.clone"),
        (
            "from vllm.tokenizers import TokenizerRegistry\nTokenizerRegistry.load_tokenizer",
            "vllm.tokenizers.registry:_TokenizerRegistry.load_tokenizer",
        ),
        (
            "from vllm.renderers.base import BaseRenderer\nclass R(BaseRenderer[int]):\n def shutdown(self): ...",
            "vllm.renderers.base:BaseRenderer.shutdown",
        ),
    ],
)
def test_what_the_table_lacks_is_found(source, what):
    """Control: each way of touching something."""
    assert touched(source) - LISTED == {what}


def test_every_release_was_asked_about_all_of_it():
    kinds = {release: members.keys() for release, members in table().items()}
    assert len(kinds) >= 3
    assert len({frozenset(members) for members in kinds.values()}) == 1


def test_nothing_that_every_release_lacks_is_listed():
    """Of a misspelt member nobody would notice a change."""
    releases = table().values()
    assert [m for m in table()[installed()] if all(r[m] == "absent" for r in releases)] == []


@pytest.mark.parametrize("owner", ["SamplingParams", "TokenizerLike", "TokenizerRegistry", "MODELS_CONFIG_MAP"])
def test_tokenizers_and_requests_are_among_it(owner):
    assert any(owner in member for member in table()[installed()])
