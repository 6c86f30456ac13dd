"""`mrv2 doctor` about the vLLM host, from metadata and environment alone."""

import json
import os

import pytest

from mrv2.cli import app
from mrv2.cli.vllm_install import find_vllm

ADAPTER = """\
# /// adapter
# name = "own"
# sdk_api = "0.1"
# architectures = ["OwnForCausalLM"]
# model_types = ["own"]
# owner = "nobody"
# capabilities = { prefix_caching = "vllm", gguf = "native" }
# ///
from torch import nn
import mrv2
from mrv2.layers import WeightMap


class Own(nn.Module):
    weight_map, parts, recurrent = WeightMap(), (), False

    def __init__(self, L, c):
        super().__init__()

    def forward(self, input_ids, positions, ctx):
        return ctx


@mrv2.hookimpl
def mrv2_model(ctx):
    return Own
"""
BORROWED = """

@mrv2.hookimpl
def mrv2_vllm(ctx):
    return mrv2.VllmModel("LlamaForCausalLM")
"""


@pytest.fixture
def doctor(tmp_path, monkeypatch, capfd):
    """doctor(*args, vllm=version, **env): exit code and what is printed."""
    for name in [n for n in os.environ if n.startswith(("VLLM_", "MRV2_"))]:
        monkeypatch.delenv(name)

    def run(*args, vllm=None, adapter=ADAPTER, **env):
        file = tmp_path / "own.py"
        file.write_text(adapter)
        if vllm:
            info = tmp_path / "site" / f"vllm-{vllm}.dist-info"
            info.mkdir(parents=True)
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {vllm}\n")
        with monkeypatch.context() as inner:
            inner.syspath_prepend(str(tmp_path / "site"))
            for name, value in env.items():
                inner.setenv(name, value)
            code = app.run(["doctor", "own", "--adapter", str(file), *args])
        return code, capfd.readouterr().out

    return run


def test_what_an_adapter_would_be_in_vllm(doctor):
    code, out = doctor("--json", vllm="0.32.0")
    assert code == 0
    (about,) = json.loads(out)["adapters"]
    (model,) = about["vllm"]["models"]
    assert model["names"] == ["Mrv2OwnForCausalLM"]
    assert model["own_model"]
    assert model["model"].endswith(".Own")
    assert about["vllm"]["offered"] == ["prefix_caching"]
    assert about["vllm"]["native_only"] == ["gguf"]


def test_vllms_own_class_where_the_adapter_asks_for_it(doctor):
    code, out = doctor(adapter=ADAPTER + BORROWED, vllm="0.32.0")
    assert code == 0
    assert "in vLLM: Mrv2OwnForCausalLM: vLLM's class LlamaForCausalLM" in out


@pytest.mark.parametrize(
    ("version", "line"),
    [
        ("0.32.0", "vLLM: 0.32.0, a listed release; plug-in enabled"),
        ("0.32.0+cpu", "vLLM: 0.32.0, CPU build, a listed release; plug-in enabled"),
        ("0.99.0", "vLLM: 0.99.0, not a listed release; plug-in enabled"),
    ],
)
def test_which_vllm_is_there(doctor, version, line):
    code, out = doctor(vllm=version)
    assert code == 0
    assert line in out
    assert "not asked; `mrv2 doctor --vllm`" in out


def test_what_in_the_environment_keeps_vllm_from_running_adapters(doctor):
    _, out = doctor("--json", vllm="0.32.0", VLLM_PLUGINS="other", VLLM_USE_V2_MODEL_RUNNER="0")
    vllm = json.loads(out)["vllm"]
    assert not vllm["plugin_enabled"]
    assert [p["code"] for p in vllm["problems"]] == ["MRV2-604", "MRV2-602"]


@pytest.mark.skipif(find_vllm() is not None, reason="vLLM is installed here")
def test_without_vllm(doctor):
    code, out = doctor()
    assert code == 0
    assert "vLLM: not installed; pip install 'mrv2[vllm]'" in out
    code, out = doctor("--vllm", "--json")
    assert code == 2
    assert json.loads(out)["error"]["code"] == "MRV2-209"
