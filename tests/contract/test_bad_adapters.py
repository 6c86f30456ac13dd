"""Every kind of bad adapter gives its own error: right code, right words, right exit code, in bounded time."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

HOOKS = "import mrv2\n\n@mrv2.hookimpl\ndef mrv2_model(ctx):\n"


def installed(**parts):
    """An installed adapter with one part replaced."""
    return lambda site: site.add("acme", **parts)


def manifest(**changes):
    return lambda site: site.add("acme", manifest=site.manifest("acme", **changes))


def stale(site):
    site.add_dist("acme")


def no_manifest(site):
    site.add("acme")
    (site.root / "acme_pkg" / "adapter.toml").unlink()


def no_utf8(site):
    site.add("acme")
    (site.root / "acme_pkg" / "adapter.toml").write_bytes(b'name = "\xff"\n')


def single_module(site):
    site.add_dist("acme", points={"acme": "acme_single"})
    (site.root / "acme_single.py").write_text("")
    (site.root / "adapter.toml").write_text(site.manifest("acme"))


def outdated_core(site):
    site.add_dist("acme", requires="mrv2>=0.5")
    site.add_package("acme")


def damaged_requirement(site):
    site.add_dist("acme", requires="mrv2 >>> nothing")
    site.add_package("acme")


def damaged_entry_point(site):
    site.add_dist("acme", points={"acme": "not a module!"})
    site.add_package("acme")


def missing_attribute(site):
    site.add_dist("acme", points={"acme": "acme_pkg:plugin"})
    site.add_package("acme")


def installed_twice(site):
    site.add("acme")
    site.add_dist("acme", version="2.0")


def same_architecture(site):
    site.add("acme")
    site.add("rival", manifest=site.manifest("rival", architectures=["AcmeForCausalLM"]))


def same_name(site):
    site.add("acme")
    site.add_dist("acme", dist="rival-adapter", points={"acme": "rival_pkg"})
    site.add_package("rival", manifest=site.manifest("acme", architectures=["RivalForCausalLM"]))


def pipe_as_manifest(site):
    no_manifest(site)
    os.mkfifo(site.root / "acme_pkg" / "adapter.toml")


def undecodable_metadata(site):
    folder = site.add_dist("acme")
    site.add_package("acme")
    (folder / "METADATA").write_bytes(b"Metadata-Version: 2.1\nName: acme-adapter\nVersion: 1.0\nAuthor: \xff\n")


def undefined_marker(site):
    site.add_dist("acme", requires="mrv2>=0.1; os_name ~= 'linux'")
    site.add_package("acme")


def damaged_copy(site):
    site.add("acme")
    (site.add_dist("acme", version="2.0") / "METADATA").write_bytes(b"\xff")


UNSHOWABLE = "class E(Exception):\n    def __str__(self): raise ValueError\n\nraise E\n"
METACLASS_ABOVE = """
class Meta(type):
    def __getattribute__(cls, name): raise RuntimeError(name)
class Model(metaclass=Meta): pass
"""
METACLASS = """
    class Meta(type):
        def __getattribute__(cls, name): raise RuntimeError(name)
    class Model(metaclass=Meta): pass
    return Model
"""

BAD: dict[str, tuple[Callable, str, tuple[str, ...]]] = {
    "stale metadata": (stale, "MRV2-104", ("'acme_pkg' doesn't exist", "acme-adapter 1.0", "from its folder or wheel")),
    "no manifest": (no_manifest, "MRV2-104", ("no adapter.toml", "acme_pkg")),
    "no package": (single_module, "MRV2-104", ("no adapter.toml", "acme_single")),
    "not TOML": (installed(manifest="name = acme"), "MRV2-105", ("not valid TOML", "line 1")),
    "endless number": (installed(manifest=f"a = {'9' * 5000}\n"), "MRV2-105", ("not valid TOML",)),
    "endless nesting": (installed(manifest=f"a = {'[' * 50_000}\n"), "MRV2-105", ("not valid TOML",)),
    "manifest is a pipe": (pipe_as_manifest, "MRV2-104", ("no adapter.toml",)),
    "undecodable metadata": (undecodable_metadata, "MRV2-115", ("isn't UTF-8",)),
    "undefined marker": (undefined_marker, "MRV2-115", ("can't be parsed",)),
    "damaged copy": (damaged_copy, "MRV2-107", ("an unreadable version", "installed more than once")),
    "not UTF-8": (no_utf8, "MRV2-105", ("not UTF-8", "adapter.toml")),
    "field missing": (manifest(owner=None), "MRV2-105", ("owner: Field required",)),
    "field unknown": (manifest(colour="red"), "MRV2-105", ("colour: Extra inputs",)),
    "no architectures": (manifest(architectures=[]), "MRV2-105", ("architectures: ",)),
    "architecture twice": (manifest(architectures=["A", "A"]), "MRV2-105", ("listed twice: A",)),
    "another name": (manifest(name="other"), "MRV2-105", ("'other'", "'acme'")),
    "no API": (manifest(sdk_api=None), "MRV2-105", ("sdk_api is missing",)),
    "API no text": (manifest(sdk_api=0.1), "MRV2-105", ("sdk_api is 0.1",)),
    "API malformed": (manifest(sdk_api="0.1.2"), "MRV2-105", ("'0.1.2'",)),
    "newer API": (manifest(sdk_api="0.2", novelty=True), "MRV2-106", ("SDK API 0.2", "offers 0.1", "upgrade mrv2")),
    "other major": (manifest(sdk_api="1.0"), "MRV2-106", ("SDK API 1.0",)),
    "outdated": (outdated_core, "MRV2-103", ("mrv2>=0.5", "is running")),
    "damaged requirement": (damaged_requirement, "MRV2-115", ("can't be parsed",)),
    "damaged entry point": (damaged_entry_point, "MRV2-115", ("'not a module!'",)),
    "installed twice": (installed_twice, "MRV2-107", ("installed more than once", "1.0 in", "2.0 in")),
    "same architecture": (same_architecture, "MRV2-107", ("acme-adapter", "rival-adapter", "MRV2_PREFER")),
    "same name": (same_name, "MRV2-107", ("the name acme", "acme-adapter", "rival-adapter")),
    "import raises": (
        installed(hooks="\nraise RuntimeError('no\\nluck')\n"),
        "MRV2-108",
        ("RuntimeError: no luck", "acme_pkg/__init__.py:2"),
    ),
    "dependency absent": (installed(hooks="import no_such_thing\n"), "MRV2-108", ("provides 'no_such_thing'",)),
    "syntax error": (installed(hooks="def (:\n"), "MRV2-108", ("SyntaxError",)),
    "import leaves": (installed(hooks="import sys\nsys.exit(0)\n"), "MRV2-108", ("end the process",)),
    "import kills": (installed(hooks="import os\nos._exit(7)\n"), "MRV2-108", ("died with exit code 7",)),
    "import crashes": (installed(hooks="import os\nos.abort()\n"), "MRV2-108", ("died with SIGABRT",)),
    "import ends a generator": (installed(hooks="\nraise GeneratorExit\n"), "MRV2-108", ("acme_pkg/__init__.py:2",)),
    "import raises at the base": (
        installed(hooks="class E(BaseException): pass\n\nraise E('x')\n"),
        "MRV2-108",
        ("E: x", "acme_pkg/__init__.py:3"),
    ),
    "import raises what can't be shown": (
        installed(hooks=UNSHOWABLE),
        "MRV2-108",
        ("can't be shown", "acme_pkg/__init__.py:4"),
    ),
    "attribute absent": (missing_attribute, "MRV2-108", ("AttributeError", "plugin")),
    "import sleeps": (installed(hooks="import time\ntime.sleep(9999)\n"), "MRV2-109", ("acme_pkg/__init__.py:2",)),
    "import spins": (installed(hooks="while True:\n    pass\n"), "MRV2-109", ("acme_pkg/__init__.py:",)),
    "hook hangs": (
        installed(hooks=HOOKS + "    import time\n    time.sleep(9999)\n"),
        "MRV2-109",
        ("calling the hooks", "acme_pkg/__init__.py:6"),
    ),
    "hook misspelt": (
        installed(hooks="import mrv2\n\n@mrv2.hookimpl\ndef mrv2_modle(ctx): ...\n"),
        "MRV2-110",
        ("mrv2_modle is not a hook", "did you mean mrv2_model?", "acme_pkg/__init__.py:3"),
    ),
    "hook unmarked": (installed(hooks="def mrv2_model(ctx): ...\n"), "MRV2-110", ("@mrv2.hookimpl",)),
    "hook argument": (
        installed(hooks="import mrv2\n\n@mrv2.hookimpl\ndef mrv2_model(ctx, extra): ...\n"),
        "MRV2-110",
        ("takes extra", "def mrv2_model(ctx)"),
    ),
    "no hook": (installed(hooks=""), "MRV2-110", ("no hook mrv2_model",)),
    "hook raises": (
        installed(hooks=HOOKS + "    return {}[ctx.architecture]\n"),
        "MRV2-111",
        ("KeyError: 'AcmeForCausalLM'", "acme_pkg/__init__.py:5"),
    ),
    "hook raises at the base": (
        installed(hooks=HOOKS + "    raise type('E', (BaseException,), {})('x')\n"),
        "MRV2-111",
        ("E: x", "acme_pkg/__init__.py:5"),
    ),
    "hook raises what can't be shown": (
        installed(hooks=UNSHOWABLE.replace("raise E\n", "") + HOOKS + "    raise E\n"),
        "MRV2-111",
        ("can't be shown", "acme_pkg/__init__.py:8"),
    ),
    "hook calls itself": (
        installed(hooks=HOOKS + "    return mrv2_model(ctx)\n"),
        "MRV2-111",
        ("RecursionError", "acme_pkg/__init__.py:5"),
    ),
    "result raises when looked at": (
        installed(hooks=HOOKS + METACLASS),
        "MRV2-111",
        ("RuntimeError: ", "acme_pkg/__init__.py:7"),
    ),
    "attribute raises when looked at": (
        installed(hooks=HOOKS.replace("def mrv2_model(ctx):\n", "def mrv2_model(ctx): ...\n") + METACLASS_ABOVE),
        "MRV2-110",
        ("looking for its hooks failed", "acme_pkg/__init__.py:7"),
    ),
    "hook leaves": (installed(hooks=HOOKS + "    raise SystemExit(3)\n"), "MRV2-111", ("SystemExit: 3",)),
    "returns nothing": (
        installed(hooks=HOOKS + "    return None\n"),
        "MRV2-111",
        ("None for AcmeForCausalLM", "adapter.toml claims", "acme_pkg/__init__.py:3"),
    ),
    "returns an instance": (
        installed(hooks="from torch import nn\n" + HOOKS + "    return nn.Linear(1, 1)\n"),
        "MRV2-111",
        ("a Linear, an instance",),
    ),
    "returns no module": (installed(hooks=HOOKS + "    return dict\n"), "MRV2-111", ("torch.nn.Module",)),
    "returns a bare module": (
        installed(hooks=HOOKS + "    from torch import nn\n    return nn.Linear\n"),
        "MRV2-111",
        ("weight_map, parts, recurrent",),
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_doctor_names_the_fault(site, kind):
    make, code, words = BAD[kind]
    make(site)
    done = site.mrv2("doctor", "acme", MRV2_IMPORT_TIMEOUT="2" if code == "MRV2-109" else "60")
    assert done.code == 1, done.out + done.err
    assert code in done.out, done.out
    for word in (*words, "where:", "fix:"):
        assert word in done.out, done.out
    assert done.seconds < 30
    assert "Traceback" not in done.err


@pytest.mark.parametrize("kind", ["stale metadata", "newer API", "import raises", "import sleeps", "no hook"])
def test_show_ends_with_the_fault_and_exit_code_2(site, kind):
    make, code, _ = BAD[kind]
    make(site)
    done = site.mrv2("show", "acme", "--json", MRV2_IMPORT_TIMEOUT="2")
    assert done.code == 2
    assert done.json()["error"]["code"] == code
    assert done.err == ""


@pytest.mark.parametrize(
    "kind",
    [
        "outdated",
        "newer API",
        "import sleeps",
        "import leaves",
        "import ends a generator",
        "import raises at the base",
        "import raises what can't be shown",
        "attribute raises when looked at",
        "same architecture",
        "hook misspelt",
    ],
)
def test_resolving_raises_the_fault_in_process_and_others_go_on(site, kind):
    make, code, _ = BAD[kind]
    make(site)
    site.add("fine")
    script = (
        "import mrv2\n"
        "registry = mrv2.Registry.discover()\n"
        "print(registry.resolve('FineForCausalLM').name)\n"
        "try: registry.resolve('AcmeForCausalLM')\n"
        "except mrv2.Mrv2Error as e: print(e.code)\n"
    )
    done = site.python("-c", script, MRV2_IMPORT_TIMEOUT="2")
    assert done.out.split() == ["fine", code]
    assert done.code == 0, done.err


def test_a_bad_adapter_does_not_touch_a_good_one(site):
    site.add("broken", hooks="raise RuntimeError\n")
    site.add("fine")
    done = site.mrv2("doctor", "--json")
    found = {a["name"]: a["error"] for a in done.json()["adapters"]}
    assert done.code == 1
    assert found["broken"]["code"] == "MRV2-108"
    assert found["fine"] is None


def test_a_good_adapter_passes_and_is_shown_with_its_code(site):
    site.add("fine")
    done = site.mrv2("doctor", "fine")
    assert done.code == 0, done.out + done.err
    assert "changed since: nothing" in done.out
    shown = site.mrv2("show", "fine", "--json").json()
    assert shown["hooks"]["mrv2_model"].endswith("fine_pkg/__init__.py:4")
    assert shown["hooks"]["mrv2_tokenizer"] is None
    (model,) = shown["models"]
    assert model["source"].endswith("fine_pkg/model.py:5")
    assert len(model["methods"]) == 6
    for method in model["methods"].values():
        path, _, line = method["source"].rpartition(":")
        name = method["by"].rpartition(".")[2]
        assert f"def {name}(" in "".join(
            Path(path).read_text().splitlines(keepends=True)[int(line) - 1 : int(line) + 2]
        )
    text = site.mrv2("show", "fine").out
    assert "prepare_dummy_inputs" in text
    assert "FineForCausalLM" in text


@pytest.mark.parametrize(
    "kind",
    [
        "import raises at the base",
        "import raises what can't be shown",
        "hook calls itself",
        "hook raises at the base",
        "hook raises what can't be shown",
        "result raises when looked at",
    ],
)
def test_no_failure_of_an_adapter_leaves_generate_without_its_json(site, tmp_path, kind):
    make, code, _ = BAD[kind]
    make(site)
    config = {"architectures": ["AcmeForCausalLM"], "model_type": "llama", "vocab_size": 8, "num_hidden_layers": 1}
    config |= {"hidden_size": 8, "num_attention_heads": 1, "intermediate_size": 8, "max_position_embeddings": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"x.0.y": torch.zeros(1)}, tmp_path / "model.safetensors")
    done = site.mrv2("generate", str(tmp_path), "hi", "--json")
    assert done.json()["error"]["code"] == code, done.err
    assert done.code == 2


NOISE = """
import mrv2
print("noise at import")

@mrv2.hookimpl
def mrv2_config(ctx):
    print("noise in a hook")

@mrv2.hookimpl
def mrv2_model(ctx):
    print("noise in a hook")
    class Meta(type):
        @property
        def weight_map(cls): print("noise in a check")
    return Meta("Model", (__import__("torch").nn.Module,), {"parts": (), "recurrent": False})
"""


def test_what_an_adapter_prints_stays_off_stdout(site):
    site.add("acme", hooks=NOISE)
    script = (
        "import sys, mrv2\n"
        "from mrv2.context import AdapterContext\n"
        "adapter = mrv2.Registry.discover().resolve('AcmeForCausalLM')\n"
        "ctx = AdapterContext(architecture='AcmeForCausalLM', model_type='acme')\n"
        "adapter.config_class(ctx)\n"
        "try: adapter.model_class(ctx)\n"
        "except mrv2.Mrv2Error as e: print(e.code)\n"
        "assert sys.stdout is sys.__stdout__\n"
    )
    done = site.python("-c", script)
    assert done.out == "MRV2-111\n", done.err
    for words in ("noise at import", "noise in a hook", "noise in a check"):
        assert words in done.err


def test_stdout_comes_back_after_an_import_that_hangs(site):
    site.add("acme", hooks="import time\ntime.sleep(9999)\n")
    script = (
        "import mrv2\n"
        "try: mrv2.Registry.discover().resolve('AcmeForCausalLM')\n"
        "except mrv2.Mrv2Error as e: print(e.code)\n"
    )
    assert site.python("-c", script, MRV2_IMPORT_TIMEOUT="1").out == "MRV2-109\n"


def test_ctrl_c_in_an_adapter_is_still_ctrl_c(site):
    site.add("acme", hooks="raise KeyboardInterrupt\n")
    script = (
        "import mrv2\n"
        "try: mrv2.Registry.discover().resolve('AcmeForCausalLM')\n"
        "except KeyboardInterrupt: print('stopped')\n"
    )
    assert site.python("-c", script).out == "stopped\n"
