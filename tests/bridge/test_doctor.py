"""`mrv2 doctor --vllm`: the real vLLM is asked, and its answers about sound and broken classes arrive."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SAMPLES = Path(__file__).parent / "samples"

BORROWED = """\
# /// adapter
# name = "borrower"
# sdk_api = "0.1"
# architectures = ["LentForCausalLM", "AskedForCausalLM"]
# owner = "tests"
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


@mrv2.hookimpl
def mrv2_vllm(ctx):
    return mrv2.VllmModel("LlamaForCausalLM" if ctx.architecture == "LentForCausalLM" else "NobodyForCausalLM")
"""


def doctor(*args, **env):
    clean = {k: v for k, v in os.environ.items() if k != "MRV2_LOCAL_ADAPTERS"}
    command = [sys.executable, "-m", "mrv2", "doctor", "--vllm", "--json", *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, env=clean | env)
    return done.returncode, json.loads(done.stdout)


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    file = tmp_path_factory.mktemp("doctor") / "borrower.py"
    file.write_text(BORROWED)
    code, report = doctor("--adapter", file, "--adapter", SAMPLES / "scaled.py")
    return code, report, {a["name"]: a["vllm"] for a in report["adapters"]}


def test_names_classes_and_states_as_vllm_has_them(asked):
    _, _, adapters = asked
    models = {m["architecture"]: m for a in adapters.values() for m in a["models"]}
    assert models["LlamaForCausalLM"]["names"] == ["Mrv2LlamaForCausalLM"]
    assert models["LlamaForCausalLM"]["own_model"]
    assert models["LlamaForCausalLM"]["model"].startswith("mrv2_adapter_llama.")
    assert models["ScaledForCausalLM"]["names"] == ["ScaledForCausalLM", "Mrv2ScaledForCausalLM"]
    assert not models["LentForCausalLM"]["own_model"]
    assert models["LentForCausalLM"]["model"] == "vllm.model_executor.models.llama.LlamaForCausalLM"


def test_what_would_be_raised_when_a_model_is_built(asked):
    code, report, adapters = asked
    (wrong,) = [m for m in adapters["borrower"]["models"] if m["architecture"] == "AskedForCausalLM"]
    assert wrong["error"]["code"] == "MRV2-111"
    assert "'NobodyForCausalLM', which is no class of vLLM's" in wrong["error"]["what"]
    assert (code, report["problems"]) == (1, 1)


def test_the_vllm_that_is_here(asked):
    _, report, _ = asked
    vllm = report["vllm"]
    assert vllm["fingerprint"] == {
        "version": vllm["version"],
        "listed": True,
        "compared_with": vllm["version"],
        "differences": [],
    }
    assert vllm["platform"] == {"device": "cpu", "triton": True, "interpreted": True}


def test_every_member_that_differs_is_named_with_both_signatures(monkeypatch):
    from mrv2.bridge import versions
    from mrv2.cli.doctor_vllm import _unusable
    from mrv2.cli.vllm_probe import fingerprint

    here = versions.signatures()
    name = next(n for n in here if n.endswith("DefaultModelState.prepare_inputs"))
    monkeypatch.setattr(versions, "signatures", lambda: here | {name: "(self, everything)"})
    monkeypatch.setattr(versions, "installed", lambda: "0.99.0")
    found = fingerprint()
    assert not found["listed"]
    assert [d["member"] for d in found["differences"]] == [name]
    (error,) = _unusable({"fingerprint": found, "platform": {"device": "cpu", "triton": True}})
    assert error.code == "MRV2-601"
    assert f"{name}: (self, everything), in {found['compared_with']}: {here[name]}" in error.what


def test_a_plugin_list_without_us():
    code, report = doctor("llama", VLLM_PLUGINS="")
    assert code == 1
    assert [e["code"] for e in report["general"]] == ["MRV2-604"]
    models = report["adapters"][0]["vllm"]["models"]
    assert models
    assert not any(m["names"] for m in models)
