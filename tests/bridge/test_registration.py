"""What the plug-in tells vLLM, and what it leaves alone."""

import json
import os
import subprocess
import sys

import pytest

DUMP = """
import json, sys
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm import ModelRegistry
print("RESULT" + json.dumps({
    "models": {n: f"{m.module_name}:{m.class_name}" for n, m in ModelRegistry.models.items()},
    "imported": sorted(m for m in sys.modules if m.startswith("mrv2_adapter_")),
}))
"""


def registered(**env):
    result = subprocess.run(
        [sys.executable, "-c", DUMP], capture_output=True, text=True, timeout=280, env=os.environ | env
    )
    assert "RESULT" in result.stdout, result.stderr
    return json.loads(result.stdout.partition("RESULT")[2])


def test_nothing_changes_for_vllms_own_classes_and_no_adapter_is_imported():
    without, with_us = registered(VLLM_PLUGINS=""), registered()
    assert not [n for n in without["models"] if n.startswith("Mrv2")]
    assert {n: with_us["models"][n] for n in without["models"]} == without["models"]
    new = with_us["models"].keys() - without["models"].keys()
    assert {"Mrv2LlamaForCausalLM", "Mrv2Qwen3ForCausalLM", "ScaledForCausalLM", "Mrv2ScaledForCausalLM"} <= new
    assert with_us["imported"] == []


@pytest.fixture
def registry():
    from vllm import ModelRegistry
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    return ModelRegistry


def test_registering_again_changes_nothing(registry):
    from mrv2.bridge.plugin import register

    before = {name: repr(model) for name, model in registry.models.items()}
    register()
    assert {name: repr(model) for name, model in registry.models.items()} == before


@pytest.mark.parametrize(("name", "recurrent"), [("Mrv2LlamaForCausalLM", False), ("TidalForCausalLM", True)])
def test_what_vllm_finds_out_about_a_class(registry, name, recurrent):
    info = registry.models[name].inspect_model_cls()
    assert info.architecture == name
    assert info.is_text_generation_model
    assert info.supports_pp
    assert (info.is_hybrid, info.has_inner_state) == (recurrent, recurrent)
    cls = registry.models[name].load_model_cls()
    assert cls is registry.models[name].load_model_cls()
    assert cls.get_model_state_cls().__name__.startswith("RecurrentBridge" if recurrent else "PlainBridge")


def test_the_adapters_own_file_is_what_vllm_hashes(registry):
    import importlib.util

    spec = importlib.util.find_spec(registry.models["Mrv2LlamaForCausalLM"].module_name)
    assert spec.origin.endswith("mrv2_adapter_llama/__init__.py")
