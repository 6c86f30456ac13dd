"""Which adapter serves what: settings, local adapters, catalogues, and the typed facade."""

from __future__ import annotations

import json
import os
import sys

import pytest

from mrv2 import errors
from mrv2.adapter import require
from mrv2.context import AdapterContext
from mrv2.registry import Registry
from mrv2.settings import Settings

HOOKS = "import mrv2\nfrom types import SimpleNamespace\n\n"


def hook(name: str, value: str) -> str:
    return f"@mrv2.hookimpl\ndef {name}(ctx):\n    {value}\n\n"


def two_rivals(site):
    site.add("acme")
    site.add("rival", manifest=site.manifest("rival", architectures=["AcmeForCausalLM"], model_types=["acme"]))


# ---- settings ----------------------------------------------------------------------------------------------


def test_the_allowlist_keeps_the_named_distributions_only(local_site, monkeypatch):
    two_rivals(local_site)
    assert {e.name for e in Registry.discover(allowlist="ACME_Adapter").entries} == {"acme"}
    monkeypatch.setenv("MRV2_ADAPTERS", "rival-adapter, acme-adapter")
    assert {e.name for e in Registry.discover().entries} == {"acme", "rival"}
    assert {e.name for e in Registry.discover(allowlist="rival-adapter").entries} == {"rival"}


def test_an_absent_listed_distribution_is_an_error(local_site, monkeypatch):
    local_site.add("acme")
    monkeypatch.setenv("MRV2_ADAPTERS", "acme-adapter,gone-adapter")
    with pytest.raises(errors.SettingError, match="'gone-adapter'") as caught:
        Registry.discover()
    assert "MRV2_ADAPTERS=acme-adapter,gone-adapter" in caught.value.where


def test_a_conflict_is_decided_by_setting_or_argument_never_by_order(local_site, monkeypatch):
    two_rivals(local_site)
    with pytest.raises(errors.AdapterConflictError, match=r"acme-adapter.*rival-adapter"):
        Registry.discover().resolve("AcmeForCausalLM")
    assert Registry.discover(adapters=["acme"]).find("AcmeForCausalLM").name == "acme"
    assert Registry.discover(adapters=["rival-adapter"]).find("AcmeForCausalLM").name == "rival"
    with pytest.raises(errors.AdapterConflictError):
        Registry.discover(adapters=["rival", "acme"]).find("AcmeForCausalLM")
    for name in ("acme", "rival", "rival-adapter"):
        monkeypatch.setenv("MRV2_PREFER", f"AcmeForCausalLM={name}")
        assert Registry.discover().find("AcmeForCausalLM").name == name.removesuffix("-adapter")
    assert Registry.discover(adapters=["acme"]).find("AcmeForCausalLM").name == "acme"


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("MRV2_PREFER", "acme"),
        ("MRV2_PREFER", "=acme"),
        ("MRV2_PREFER", "A=x,A=y"),
        ("MRV2_IMPORT_TIMEOUT", "soon"),
        ("MRV2_IMPORT_TIMEOUT", "0"),
        ("MRV2_IMPORT_TIMEOUT", "nan"),
        ("MRV2_IMPORT_TIMEOUT", "inf"),
    ],
)
def test_senseless_settings_are_refused_by_name(local_site, monkeypatch, variable, value):
    local_site.add("acme")
    monkeypatch.setenv(variable, value)
    with pytest.raises(errors.SettingError) as caught:
        Registry.discover()
    assert variable in caught.value.where


def test_preferring_an_adapter_that_does_not_serve_it_is_an_error(local_site, monkeypatch):
    local_site.add("acme")
    local_site.add("other")
    monkeypatch.setenv("MRV2_PREFER", "AcmeForCausalLM=other")
    with pytest.raises(errors.SettingError, match="doesn't serve"):
        Registry.discover().find("AcmeForCausalLM")


@pytest.mark.parametrize(
    ("prefer", "words"),
    [
        ("AcmeForCausalLM=nobody", "AcmeForCausalLM is given to 'nobody', which is not installed"),
        ("AcmeForCausalLM=other", "AcmeForCausalLM is given to 'other', which doesn't serve it"),
        ("AkmeForCausalLM=acme", "AkmeForCausalLM is given to 'acme', and no adapter here serves"),
        ("akme=nobody", "akme is given to 'nobody', which is not installed"),
    ],
)
def test_a_preference_without_effect_is_told_and_stops_nothing_else(site, prefer, words):
    site.add("acme")
    site.add("other")
    told = site.mrv2("list", MRV2_PREFER=f"{prefer},acme=acme-adapter")
    assert (told.code, words in told.err, told.err.count("MRV2_PREFER")) == (0, True, 1)
    (notice,) = site.mrv2("list", "--json", MRV2_PREFER=prefer).json()["notices"]
    assert (notice["code"], notice["where"]) == ("MRV2-102", "MRV2_PREFER")
    checked = site.mrv2("doctor", "--json", MRV2_PREFER=prefer)
    assert words in checked.json()["general"][0]["what"]
    assert (checked.code, checked.json()["problems"]) == (1, 1)
    assert site.mrv2("doctor", "other", MRV2_PREFER=prefer).code == 0
    script = (
        "import mrv2\nregistry = mrv2.Registry.discover()\nprint(registry.find('OtherForCausalLM').name)\n"
        "try: print(registry.find('AcmeForCausalLM').name)\nexcept mrv2.Mrv2Error as e: print(e.code)\n"
    )
    concerned = prefer.startswith("AcmeForCausalLM")
    done = site.python("-c", script, MRV2_PREFER=prefer)
    assert done.out.split() == ["other", "MRV2-102" if concerned else "acme"]


def test_empty_variables_count_as_unset():
    names = ("MRV2_ADAPTERS", "MRV2_PREFER", "MRV2_CATALOG", "MRV2_IMPORT_TIMEOUT")
    assert Settings.from_env(dict.fromkeys(names, "")) == Settings.from_env({})


# ---- look-up -----------------------------------------------------------------------------------------------


def test_resolving_imports_the_one_adapter_concerned(local_site):
    local_site.add("acme")
    local_site.add("bystander")
    registry = Registry.discover()
    adapter = registry.resolve("AcmeForCausalLM")
    assert "acme_pkg" in sys.modules
    assert "bystander_pkg" not in sys.modules
    assert registry.resolve("AcmeForCausalLM") is adapter
    assert registry.for_model_type("acme") is adapter
    assert registry.for_model_type("unheard_of") is None
    assert adapter.model_class(AdapterContext(architecture="AcmeForCausalLM")).__name__ == "AcmeForCausalLM"


def test_equal_copies_of_metadata_are_one_adapter(local_site, monkeypatch):
    local_site.add("acme")
    again = local_site.root.parent / "source"
    local_site.add_dist("acme", root=again)
    monkeypatch.syspath_prepend(str(again))
    (entry,) = [e for e in Registry.discover().entries if e.name == "acme"]
    assert entry.error is None


def test_stale_metadata_earlier_on_the_path_hides_nothing(local_site, monkeypatch):
    local_site.add("acme")
    stale = local_site.root.parent / "stale"
    local_site.add_dist("acme", version="0.9", points={"unrelated": "nothing_pkg"}, root=stale)
    monkeypatch.syspath_prepend(str(stale))
    with pytest.raises(errors.AdapterConflictError, match=r"0\.9 in .*stale"):
        Registry.discover().resolve("AcmeForCausalLM")


def test_a_distribution_may_bring_several_adapters(local_site):
    local_site.add_dist("acme", points={"acme": "acme_pkg", "second": "second_pkg"})
    local_site.add_package("acme")
    local_site.add_package("second")
    registry = Registry.discover()
    assert registry.resolve("SecondForCausalLM").name == "second"
    with pytest.raises(errors.AdapterConflictError):
        registry.get("acme-adapter")


def test_unknown_names_list_the_known_ones(local_site):
    local_site.add("acme")
    with pytest.raises(errors.UnknownAdapterError) as caught:
        Registry.discover().get("acne")
    assert "acme" in caught.value.fix


def test_a_keyboard_interrupt_in_an_import_is_no_adapter_error(local_site):
    local_site.add("acme", hooks="raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        Registry.discover().resolve("AcmeForCausalLM")


# ---- catalogues --------------------------------------------------------------------------------------------


def test_install_hints_come_from_catalogues_only(local_site, monkeypatch, tmp_path):
    local_site.add("acme")
    with pytest.raises(errors.UnknownArchitectureError, match="AcmeForCausalLM") as caught:
        Registry.discover().resolve("SecretForCausalLM")
    assert "pip install" not in caught.value.fix
    catalog = tmp_path / "team.json"
    item = {"adapter": "secret", "install": "team-secret>=2", "architectures": ["SecretForCausalLM"]}
    catalog.write_text(json.dumps({"catalog": [item]}))
    monkeypatch.setenv("MRV2_CATALOG", str(catalog))
    with pytest.raises(errors.UnknownArchitectureError) as caught:
        Registry.discover().resolve("SecretForCausalLM")
    assert caught.value.fix == "pip install team-secret>=2"


def test_an_unreadable_adapter_is_mentioned_when_nothing_serves(local_site):
    local_site.add_dist("acme")
    with pytest.raises(errors.UnknownArchitectureError, match=r"acme \(acme-adapter 1.0\): MRV2-104"):
        Registry.discover().resolve("AcmeForCausalLM")


@pytest.mark.parametrize("text", [None, "{", '{"catalog": [{"adapter": "x"}]}', '{"catalogue": []}', "[]"])
def test_a_bad_catalogue_is_refused_and_does_not_hide_the_question(site, tmp_path, text):
    catalog = tmp_path / "team.json"
    if text is not None:
        catalog.write_text(text)
    done = site.mrv2("catalog", "--json", MRV2_CATALOG=str(catalog))
    assert done.code == 2
    assert done.json()["error"]["code"] == "MRV2-114"
    assert "team.json" in done.json()["error"]["where"]
    script = "import mrv2\ntry: mrv2.Registry.discover().resolve('XForCausalLM')\nexcept mrv2.Mrv2Error as e: print(e)"
    asked = site.python("-c", script, MRV2_CATALOG=str(catalog)).out
    assert "MRV2-101" in asked
    assert "team.json" in asked


# ---- local adapters ----------------------------------------------------------------------------------------

HEADER = """# A file of one's own.
# /// adapter
# name = "{name}"
# sdk_api = "0.1"
# architectures = ["{architecture}"]
# owner = "nobody"
#
# [capabilities]
# gguf = "native"
# ///
"""


def test_a_single_file_is_an_adapter_when_named(local_site, tmp_path):
    file = tmp_path / "lonely.py"
    model = "class LonelyForCausalLM: pass\n"
    file.write_text(
        HEADER.format(name="lonely", architecture="LonelyForCausalLM") + HOOKS + hook("mrv2_model", "return 1") + model
    )
    assert not any(e.name == "lonely" for e in Registry.discover().entries)
    registry = Registry.discover(adapters=[str(file)])
    entry = registry.get("lonely")
    assert entry.manifest.capabilities == {"gguf": "native"}
    assert entry.source == str(file)
    assert registry.resolve("LonelyForCausalLM").name == "lonely"
    assert sys.modules["lonely"].__file__ == str(file)


def test_a_local_folder_wins_over_an_installed_adapter(local_site, tmp_path):
    local_site.add("acme")
    local_site.add_package(
        "mine", root=tmp_path, manifest=local_site.manifest("mine", architectures=["AcmeForCausalLM"])
    )
    registry = Registry.discover(adapters=[str(tmp_path / "mine_pkg")])
    assert registry.find("AcmeForCausalLM").name == "mine"
    assert registry.load(registry.get("acme")).name == "acme"


@pytest.mark.parametrize("prepare", ["absent", "empty folder", "no manifest", "open header", "no identifier", "binary"])
def test_what_is_no_local_adapter_is_refused(tmp_path, prepare):
    path = tmp_path / ("9lives.py" if prepare == "no identifier" else "mine.py")
    if prepare == "empty folder":
        path = tmp_path / "mine"
        path.mkdir()
    elif prepare == "binary":
        path.write_bytes(b"\xff\xfe\x00")
    elif prepare != "absent":
        path.write_text("# /// adapter\n# name = 'mine'\n" if prepare == "open header" else "x = 1\n")
    with pytest.raises(errors.LocalAdapterError) as caught:
        Registry.discover(adapters=[str(path)])
    assert str(path) in caught.value.where


def test_a_local_adapter_named_twice_is_one(tmp_path, local_site, monkeypatch):
    folder = local_site.add_package("mine", root=tmp_path)
    monkeypatch.chdir(tmp_path)
    registry = Registry.discover(adapters=[str(folder), "./mine_pkg/"])
    assert registry.find("MineForCausalLM").source == str(folder)
    assert registry.conflicts() == ()


def test_two_local_adapters_for_one_architecture_are_a_conflict_that_names_both(tmp_path):
    for name in ("first", "second"):
        (tmp_path / f"{name}.py").write_text(HEADER.format(name=name, architecture="RivalForCausalLM") + HOOKS)
    registry = Registry.discover(adapters=[str(tmp_path / "first.py"), str(tmp_path / "second.py")])
    with pytest.raises(errors.AdapterConflictError, match=r"first\.py.*second\.py"):
        registry.find("RivalForCausalLM")


@pytest.mark.parametrize("path", ["~no_such_user/mine.py", "./" + "x" * 5000 + ".py", "circle/mine.py"])
def test_paths_that_the_system_refuses_are_no_local_adapters(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "circle").symlink_to("circle")
    with pytest.raises(errors.LocalAdapterError, match="doesn't exist"):
        Registry.discover(adapters=[path])


def test_a_pipe_beside_a_local_package_is_not_waited_for(tmp_path, local_site):
    folder = local_site.add_package("mine", root=tmp_path)
    (folder / "adapter.toml").unlink()
    os.mkfifo(folder / "adapter.toml")
    with pytest.raises(errors.LocalAdapterError, match="no regular file"):
        Registry.discover(adapters=[str(folder)])


def test_a_local_adapter_may_not_shadow_an_imported_module(tmp_path):
    file = tmp_path / "json.py"
    file.write_text(HEADER.format(name="json", architecture="JsonForCausalLM"))
    with pytest.raises(errors.LocalAdapterError, match="already imported"):
        Registry.discover(adapters=[str(file)]).resolve("JsonForCausalLM")


def test_local_adapters_work_through_the_command_line(site, tmp_path):
    folder = site.add_package("mine", root=tmp_path)
    listed = site.mrv2("list", "--adapter", str(folder), "--json").json()["adapters"]
    assert [a["source"] for a in listed if a["name"] == "mine"] == [str(folder)]
    shown = site.mrv2("show", "mine", "--adapter", str(folder), "--json")
    assert shown.json()["hooks"]["mrv2_model"] == f"{folder}/__init__.py:4"


# ---- the facade --------------------------------------------------------------------------------------------


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
