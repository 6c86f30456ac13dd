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


BUILD = """
import json
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm import ModelRegistry
try:
    ModelRegistry.models["TwinForCausalLM"].load_model_cls()(vllm_config=None)
except Exception as error:
    print("RESULT" + json.dumps([type(error).__name__, str(error)]))
"""

TWIN = """# /// adapter
# name = "{name}"
# sdk_api = "0.1"
# architectures = ["TwinForCausalLM"]
# owner = "tests"
# ///
import mrv2
from mrv2_adapter_llama.model import LlamaForCausalLM

@mrv2.hookimpl
def mrv2_model(ctx):
    return LlamaForCausalLM
"""


def run(code, **env):
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=280, env=os.environ | env
    )
    assert "RESULT" in result.stdout, result.stderr
    return json.loads(result.stdout.partition("RESULT")[2])


def registered(**env):
    return run(DUMP, **env)


def test_nothing_changes_for_vllms_own_classes_and_no_adapter_is_imported():
    without, with_us = registered(VLLM_PLUGINS=""), registered()
    assert not [n for n in without["models"] if n.startswith("Mrv2")]
    assert {n: with_us["models"][n] for n in without["models"]} == without["models"]
    new = with_us["models"].keys() - without["models"].keys()
    assert {"Mrv2LlamaForCausalLM", "Mrv2Qwen3ForCausalLM", "ScaledForCausalLM", "Mrv2ScaledForCausalLM"} <= new
    assert with_us["imported"] == []


@pytest.fixture
def twins(tmp_path):
    """Two adapters for one architecture, as the environment names them."""
    files = [tmp_path / f"{name}.py" for name in ("twin_a", "twin_b")]
    for file in files:
        file.write_text(TWIN.format(name=file.stem))
    return os.pathsep.join(map(str, files))


def test_two_adapters_for_one_architecture(twins):
    """vLLM starts, for the sake of other models; this one says what is wrong when it is built."""
    error, said = run(BUILD, MRV2_LOCAL_ADAPTERS=twins)
    assert error == "AdapterConflictError"
    assert "TwinForCausalLM is claimed by twin_a" in said
    assert "MRV2_PREFER=TwinForCausalLM=twin_a" in said


def test_a_setting_picks_one_of_them(twins):
    env = {"MRV2_LOCAL_ADAPTERS": twins, "MRV2_PREFER": "TwinForCausalLM=twin_b"}
    models = registered(**env)["models"]
    module, _, name = models["TwinForCausalLM"].partition(":")
    assert (module.endswith("twin_b"), name) == (True, "TwinForCausalLM")
    assert models["Mrv2TwinForCausalLM"] == f"{module}:Mrv2TwinForCausalLM"
    assert not any("twin_a" in model for model in models.values())


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


@pytest.fixture
def asked_apart(inspected_here, monkeypatch, tmp_path):
    """vLLM asks a fresh process about a class, and has stored nothing."""
    from vllm.model_executor.models import registry

    monkeypatch.setattr(registry, "_run_in_subprocess", inspected_here)
    monkeypatch.setattr(registry._LazyRegisteredModel, "_get_cache_dir", staticmethod(lambda: tmp_path))


@pytest.mark.parametrize(("name", "recurrent"), [("Mrv2LlamaForCausalLM", False), ("TidalForCausalLM", True)])
def test_what_vllm_finds_out_about_a_class(registry, asked_apart, name, recurrent, tmp_path):
    info = registry.models[name].inspect_model_cls()
    assert list(tmp_path.iterdir())
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
