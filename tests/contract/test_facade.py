"""An adapter's hooks behind their facade: defaults, wrong results, capabilities."""

from __future__ import annotations

import pytest

from mrv2 import errors
from mrv2.adapter import require
from mrv2.context import AdapterContext
from mrv2.registry import Registry

HOOKS = "import mrv2\nfrom types import SimpleNamespace\n\n"


def hook(name: str, value: str) -> str:
    return f"@mrv2.hookimpl\ndef {name}(ctx):\n    {value}\n\n"


def facade(site, body: str, **manifest):
    site.add("acme", hooks=HOOKS + body, manifest=site.manifest("acme", **manifest))
    return Registry.discover().resolve("AcmeForCausalLM")


CTX = AdapterContext(architecture="AcmeForCausalLM", model_type="acme")
MODEL = hook("mrv2_model", "from acme_pkg.model import AcmeForCausalLM; return AcmeForCausalLM")


def test_hooks_left_out_mean_the_default(local_site):
    adapter = facade(local_site, MODEL)
    assert adapter.config_class(CTX) is None
    assert adapter.tokenizer(CTX) is None
    assert adapter.weight_source(CTX) is None
    assert adapter.model_state_class(CTX) is None
    assert adapter.mm_processor(CTX) is None
    assert adapter.speculator(CTX) is None
    assert adapter.logits_processors(CTX) == ()
    assert adapter.test_target(CTX) is None
    assert adapter.vllm(CTX) is None
    assert adapter.hook_source("mrv2_vllm") is None


@pytest.mark.parametrize(
    ("method", "value", "words"),
    [
        ("config_class", "return SimpleNamespace()", "not a class"),
        ("config_class", "return type('C', (), {'model_type': 'other'})", "'other' and not 'acme'"),
        ("tokenizer", "return SimpleNamespace(encode=len)", "without decode"),
        ("tokenizer", "return type('T', (), {'encode': len, 'decode': len})", "a class"),
        ("weight_source", "return dict", "a class"),
        ("model_state_class", "return dict", "not a subclass of ModelState"),
        ("model_state_class", "return type('S', (mrv2.ModelState,), {})", "lacks add_request"),
        ("mm_processor", "return object()", "doesn't declare multimodal"),
        ("speculator", "return dict", "doesn't declare drafting"),
        ("logits_processors", "return [mrv2.LogitsProcessor]", "doesn't declare logits_processors"),
        ("test_target", "raise ValueError('tiny')", "raised ValueError: tiny"),
        ("vllm", "raise SystemExit", "raised SystemExit"),
    ],
)
def test_a_wrong_result_names_adapter_hook_file_and_line(local_site, method, value, words):
    name = f"mrv2_{method.removesuffix('_class')}"
    adapter = facade(local_site, MODEL + hook(name, value))
    with pytest.raises(errors.HookResultError, match=words) as caught:
        getattr(adapter, method)(CTX)
    assert name in caught.value.what
    assert "acme-adapter 1.0" in caught.value.where
    assert f"acme_pkg/__init__.py:{8}" in caught.value.where


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("weight_map = 3", "weight_map is no WeightMap"),
        ("parts = [1]", "parts are not a tuple"),
        ("recurrent = None", "recurrent is neither"),
        ("parts = (type('P', (), {'key': 'extra_ids'}),)", "doesn't take extra_ids"),
        ("def forward(self, input_ids, positions, ctx, **extra): ...", r"\*\*keywords"),
        ("def forward(self, input_ids, ctx): ...", "doesn't take positions"),
    ],
)
def test_a_model_class_is_checked_before_there_is_an_instance(local_site, change, words):
    body = hook("mrv2_model", "from acme_pkg.model import AcmeForCausalLM as A; return Changed(A)")
    body += f"def Changed(base):\n    class Changed(base):\n        {change}\n    return Changed\n"
    adapter = facade(local_site, body)
    with pytest.raises(errors.HookResultError, match=words):
        adapter.model_class(CTX)


def test_the_adapters_own_typed_errors_pass_unchanged(local_site):
    body = hook("mrv2_vllm", "from mrv2.errors import UnsupportedError; raise UnsupportedError('not here')")
    with pytest.raises(errors.UnsupportedError, match="not here"):
        facade(local_site, MODEL + body).vllm(CTX)


def test_capabilities_are_required_per_host(local_site):
    """What isn't declared is refused by name (O2)."""
    capabilities = {"gguf": "native", "lora": "vllm", "prefix_caching": "both", "quantization": "no"}
    lines = "".join(f'{k} = "{v}"\n' for k, v in capabilities.items())
    local_site.add("acme", manifest=local_site.manifest("acme") + "[capabilities]\n" + lines)
    entry = Registry.discover().get("acme")
    for capability, hosts in {"gguf": ["native"], "lora": ["vllm"], "prefix_caching": ["native", "vllm"]}.items():
        for host in ("native", "vllm"):
            if host in hosts:
                require(capability, host, entry)
                continue
            with pytest.raises(errors.UnsupportedError, match=f"{capability}.*acme.*{hosts[0]} only") as caught:
                require(capability, host, entry, setting="--it")
            assert caught.value.fix == f"do without --it, or run in host {hosts[0]}"
    for capability in ("quantization", "multimodal"):
        with pytest.raises(errors.UnsupportedError, match="no host"):
            require(capability, "native", entry)
