"""Which adapter serves what: settings, local adapters, catalogues, and the typed facade."""

from __future__ import annotations

import json
import os
import sys

import pytest

from mrv2 import errors
from mrv2.context import AdapterContext
from mrv2.registry import Registry
from mrv2.settings import Settings


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
        HEADER.format(name="lonely", architecture="LonelyForCausalLM")
        + "import mrv2\n\n@mrv2.hookimpl\ndef mrv2_model(ctx):\n    return 1\n\n"
        + model
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
        (tmp_path / f"{name}.py").write_text(HEADER.format(name=name, architecture="RivalForCausalLM"))
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
