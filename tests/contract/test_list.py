"""`mrv2 list`: quick, complete, and without importing an adapter, whatever is installed."""

from __future__ import annotations

import pytest

HANG = "import threading\nthreading.Event().wait()\n"
RAISE = "raise RuntimeError('broken on purpose')\n"
NUM = 50


@pytest.mark.alone
def test_fifty_broken_or_hanging_adapters_are_listed_in_half_a_second(site):
    for k in range(NUM):
        site.add(f"acme{k:02d}", hooks=RAISE if k % 2 else HANG)
    site.mrv2("list")  # caches
    runs = [site.mrv2("list", "--json") for _ in range(5)]  # the best counts: other processes are no fault of ours
    listed = {a["name"]: a for a in runs[0].json()["adapters"] if a["name"].startswith("acme")}
    assert len(listed) == NUM
    for k in range(NUM):
        entry = listed[f"acme{k:02d}"]
        assert entry["architectures"] == [f"Acme{k:02d}ForCausalLM"]
        assert (entry["distribution"], entry["version"], entry["sdk_api"]) == (f"acme{k:02d}-adapter", "1.0", "0.1")
        assert entry["error"] is None
    assert min(r.seconds for r in runs) < 0.5
    text = site.mrv2("list")
    assert text.code == 0
    assert sum(line.startswith("acme") for line in text.out.splitlines()) == NUM


def test_a_broken_adapter_still_says_which_architectures_it_has(site):
    site.add("old", manifest=site.manifest("old", sdk_api="9.0", unheard_of=1))
    site.add_dist("needy", requires="mrv2>=7")
    site.add_package("needy")
    listed = {a["name"]: a for a in site.mrv2("list", "--json").json()["adapters"]}
    assert listed["old"]["architectures"] == ["OldForCausalLM"]
    assert listed["old"]["error"]["code"] == "MRV2-106"
    assert listed["needy"]["architectures"] == ["NeedyForCausalLM"]
    assert listed["needy"]["error"]["code"] == "MRV2-103"


@pytest.mark.parametrize("command", [["list"], ["--help"], ["list", "--help"], ["explain", "101"], ["catalog"]])
def test_light_commands_import_neither_torch_nor_transformers(site, command):
    site.add("acme")
    code = (
        "import sys\nfrom mrv2.cli.app import run\n"
        f"code = run({command!r})\n"
        "heavy = {'torch', 'transformers', 'triton', 'numpy', 'acme_pkg'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else code)"
    )
    done = site.python("-c", code)
    assert done.code == 0, done.err


@pytest.mark.alone
def test_help_comes_within_200_ms(site):
    assert min(site.mrv2("--help").seconds for _ in range(6)) < 0.2


def test_zipped_and_editable_adapters_are_found_and_work(site):
    site.env["EXTRA_PATH"] = str(site.add_zipped("zipped"))
    source = site.root / "checkout" / "src"
    site.add_package("edited", root=source)
    site.add_dist("edited")
    # As build back ends do it: a finder that knows where the source lies, installed by a .pth file or alike.
    (site.root / "sitecustomize.py").write_text(
        "import importlib.util, sys\n"
        "class Finder:\n"
        "    @staticmethod\n"
        "    def find_spec(name, path=None, target=None):\n"
        "        if name == 'edited_pkg':\n"
        f"            folder = {str(source / 'edited_pkg')!r}\n"
        "            return importlib.util.spec_from_file_location(\n"
        "                name, folder + '/__init__.py', submodule_search_locations=[folder])\n"
        "sys.meta_path.append(Finder)\n"
    )
    listed = {a["name"]: a for a in site.mrv2("list", "--json").json()["adapters"]}
    assert listed["zipped"]["error"] is None
    assert ".zip" in listed["zipped"]["manifest"]
    assert listed["edited"]["error"] is None
    code = "import mrv2\nfor n in ('Zipped', 'Edited'): print(mrv2.Registry.discover().resolve(n + 'ForCausalLM').name)"
    assert site.python("-c", code).out.split() == ["zipped", "edited"]


def test_adapters_are_known_in_spawned_and_forked_processes(site):
    site.add("acme")
    code = (
        "import multiprocessing as mp\n"
        "def names(): \n"
        "    import mrv2\n"
        "    return mrv2.Registry.discover().resolve('AcmeForCausalLM').name\n"
        "if __name__ == '__main__':\n"
        "    for method in ('spawn', 'fork'):\n"
        "        with mp.get_context(method).Pool(1) as pool:\n"
        "            print(pool.apply(names))\n"
    )
    script = site.root / "script.py"
    script.write_text(code)
    assert site.python(str(script)).out.split() == ["acme", "acme"]
