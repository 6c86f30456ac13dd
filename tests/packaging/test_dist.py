"""What `make dist` builds installs in a fresh environment, and an adapter brings the core with it."""

import json
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ADAPTERS = sorted(p.name for p in (ROOT / "adapters").iterdir() if p.is_dir())

PACKAGES = ["mrv2", *(f"mrv2-adapter-{a}" for a in ADAPTERS), "mrv2-vllm-cpu-interpreter"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def run(*command, cwd=None, env=None):
    done = subprocess.run(
        [str(c) for c in command], cwd=cwd, env=env, capture_output=True, text=True, timeout=800, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """The folder that `make dist` makes, built from a copy of what git tracks."""
    source = tmp_path_factory.mktemp("source") / "mrv2"
    run("git", "clone", "--quiet", ROOT, source)
    stamp = source.parent / "installed"  # the tools are those of this environment; nothing is installed
    for name in (
        "requirements-dev.txt",
        "requirements-docs.txt",
        "pyproject.toml",
        *(f"adapters/{a}/pyproject.toml" for a in ADAPTERS),
    ):
        os.utime(source / name, (1, 1))
    stamp.touch()
    run("make", "dist", f"STAMP={stamp}", f"BIN={Path(sys.executable).parent}", cwd=source)
    return source / "dist"


def test_wheels_carry_code_data_and_licence(dist):
    wheels = {w.name.split("-")[0]: w for w in dist.glob("*.whl")}
    assert sorted(wheels) == sorted(p.replace("-", "_") for p in PACKAGES)
    names = set(zipfile.ZipFile(wheels["mrv2"]).namelist())
    assert {"mrv2/py.typed", "mrv2/catalog.json", "mrv2/loader/bundled.json", "mrv2/cli/app.py"} <= names
    assert any(n.endswith("licenses/LICENSE") for n in names)
    assert "mrv2/_templates/report.html.jinja" in names
    core = ROOT / "core"
    skeleton = (core / "mrv2" / "scaffold" / "template").rglob("*")
    assert {f.relative_to(core).as_posix() for f in skeleton if f.is_file()} <= names
    assert not [n for n in names if n.startswith(("tests/", "adapters/", "core/"))]
    for name in ADAPTERS:
        files = set(zipfile.ZipFile(wheels[f"mrv2_adapter_{name}"]).namelist())
        carried = ("adapter.toml", "py.typed", "model.py", "testing.py", "conformance.json")
        assert {f"mrv2_adapter_{name}/{f}" for f in carried} <= files


def test_index_lists_every_wheel(dist):
    index = (dist / "simple" / "index.html").read_text()
    for name in PACKAGES:
        assert f'href="{name}/"' in index
        page = (dist / "simple" / name / "index.html").read_text()
        assert [w for w in (dist / "simple" / name).glob("*.whl") if f'href="{w.name}"' in page]


def test_wheels_are_enough_without_an_index(dist, tmp_path):
    """As `docs/offline.md` has it; what ours need from others is taken from this environment."""
    pip = (sys.executable, "-m", "pip", "install", "--no-index", "--find-links", dist, "--no-deps", "--quiet")
    run(*pip, "--target", tmp_path / "site", "mrv2", "mrv2-adapter-qwen")
    env = {k: v for k, v in os.environ.items() if not k.startswith("MRV2_")} | {"PYTHONPATH": str(tmp_path / "site")}
    listed = json.loads(run(sys.executable, "-P", "-m", "mrv2", "list", "--json", cwd=tmp_path, env=env))
    (qwen,) = (a for a in listed["adapters"] if a["name"] == "qwen")
    assert (qwen["manifest"].startswith(str(tmp_path)), qwen["error"]) == (True, None)


def lend(home):
    """Let a fresh environment have all of this one's packages but ours: gigabytes that needn't be installed again."""
    lent = home / "lent"
    lent.mkdir()
    for item in Path(sysconfig.get_path("purelib")).iterdir():
        if "mrv2" not in item.name and item.suffix != ".pth":
            (lent / item.name).symlink_to(item)
    (site,) = home.glob("lib/python*/site-packages")
    (site / "lent.pth").write_text(f"{lent}\n")


def test_an_adapter_installed_alone_brings_the_core(dist, tmp_path):
    home = tmp_path / "fresh"
    venv.create(home, with_pip=True)
    python = home / "bin" / "python"
    index = (dist / "simple").as_uri()
    lend(home)
    run(python, "-m", "pip", "install", "--quiet", "--index-url", index, "mrv2-adapter-qwen")
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "MRV2_"))}
    core = run(python, "-c", "import mrv2; print(mrv2.__file__)", cwd=tmp_path, env=env).strip()
    assert Path(core).is_relative_to(home / "lib")
    listed = json.loads(run(home / "bin" / "mrv2", "list", "--json", cwd=tmp_path, env=env))
    (entry,) = listed["adapters"]
    assert entry["name"] == "qwen"
    assert entry["distribution"] == "mrv2-adapter-qwen"
    assert entry["version"] == "0.1.0"
    assert entry["sdk_api"] == "0.1"
    assert entry["architectures"] == ["Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"]
    assert entry["capabilities"]["chunked_prefill"] == "both"
    assert "qwen" in run(python, "-m", "mrv2", "doctor", cwd=tmp_path, env=env)
