"""`mrv2 new-adapter`: which files it writes, what it refuses, and that cookiecutter writes the same."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

import mrv2
from mrv2.cli.app import run
from mrv2.errors import ScaffoldError
from mrv2.manifest import validate
from mrv2.scaffold.answers import TEMPLATE, check_name, choices, complete

pytestmark = pytest.mark.usefixtures("own_folder")

KINDS = ("decoder", "moe", "hybrid")
LICENSES = ("proprietary", "apache-2.0", "mit")
COMMON = {
    ".gitignore", ".mrv2-template.json", "CHANGELOG.md", "LICENSE", "README.md", "pyproject.toml",
    "src/mrv2_adapter_apex_x/__init__.py", "src/mrv2_adapter_apex_x/adapter.toml",
    "src/mrv2_adapter_apex_x/config.py", "src/mrv2_adapter_apex_x/model.py", "src/mrv2_adapter_apex_x/py.typed",
    "src/mrv2_adapter_apex_x/testing.py", "src/mrv2_adapter_apex_x/weights.py", "tests/test_conformance.py",
}  # fmt: skip
OF_KIND = {
    "decoder": set(),
    "moe": set(),
    "hybrid": {
        "src/mrv2_adapter_apex_x/mixers.py", "src/mrv2_adapter_apex_x/kernels.py",
        "tests/conftest.py", "tests/test_kernels.py",
    },
}  # fmt: skip
OF_CI = {"github": {".github/workflows/check.yml"}, "gitlab": {".gitlab-ci.yml"}, "none": set()}


# -- what is written -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ci", OF_CI)
@pytest.mark.parametrize("kind", KINDS)
def test_the_files_are_exactly_these(kind, ci, capsys, make, contents):
    make("apex-x", "--kind", kind, "--ci", ci, "--json")
    told = json.loads(capsys.readouterr().out)
    assert set(contents("mrv2-adapter-apex-x")) == COMMON | OF_KIND[kind] | OF_CI[ci] == set(told["files"])
    assert Path(told["folder"]) == Path.cwd() / "mrv2-adapter-apex-x"
    assert [p.name for p in Path.cwd().iterdir()] == ["mrv2-adapter-apex-x"]


@pytest.mark.parametrize("license", LICENSES)
def test_the_licence(license, make):
    make("apex", "--kind", "decoder", "--license", license)
    project = tomllib.loads(Path("mrv2-adapter-apex/pyproject.toml").read_text())["project"]
    text = Path("mrv2-adapter-apex/LICENSE").read_text()
    words = {"proprietary": "All rights reserved", "apache-2.0": "Apache License", "mit": "MIT License"}
    assert [name for name, word in words.items() if word in text] == [license]
    assert ("Private :: Do Not Upload" in project["classifiers"]) == (license == "proprietary")
    assert project["license"].lower().removeprefix("licenseref-") == license


@pytest.mark.parametrize("ci", ["github", "gitlab"])
def test_ci_is_valid_and_runs_all_checks(ci, make, contents):
    make("apex", "--kind", "decoder", "--ci", ci)
    (file,) = {".github/workflows/check.yml", ".gitlab-ci.yml"} & set(contents("mrv2-adapter-apex"))
    job = yaml.safe_load(Path("mrv2-adapter-apex", file).read_text())
    lines = job["check"]["script"] if ci == "gitlab" else [s.get("run", "") for s in job["jobs"]["check"]["steps"]]
    for word in ("pip install -e", "ruff format --check", "ruff check", "mypy", "pytest --mrv2-require L1"):
        assert [line for line in lines if word in line], word


def test_defaults_are_private_and_for_github(make):
    make("apex", "--kind", "moe")
    answers = json.loads(Path("mrv2-adapter-apex/.mrv2-template.json").read_text())["cookiecutter"]
    assert (answers["kind"], answers["ci"], answers["license"]) == ("moe", "github", "proprietary")
    assert answers["_template_version"] == "1"


def test_the_template_says_which_core_it_is_for():
    versions = complete({"name": "apex"})
    major, minor = mrv2.__version__.split(".")[:2]
    assert versions["_mrv2"] == f">={major}.{minor},<{major}.{int(minor) + 1}"
    assert versions["_sdk_api"] == str(mrv2.SDK_API)


@pytest.mark.parametrize("kind", KINDS)
def test_the_manifest_is_valid(kind, make):
    make("apex", "--kind", kind)
    raw = tomllib.loads(Path("mrv2-adapter-apex/src/mrv2_adapter_apex/adapter.toml").read_text())
    manifest = validate(raw, "here")
    assert (manifest.name, manifest.architectures, manifest.model_types) == ("apex", ("ApexForCausalLM",), ("apex",))


# -- cookiecutter --------------------------------------------------------------------------------------------


DIFFERENT = [("decoder", "github", "proprietary"), ("moe", "gitlab", "mit"), ("hybrid", "none", "apache-2.0")]


@pytest.mark.parametrize(("kind", "ci", "license"), DIFFERENT)
def test_cookiecutter_writes_the_same(kind, ci, license, tmp_path, make, contents):
    main = pytest.importorskip("cookiecutter.main")
    make("apex-x", "--kind", kind, "--ci", ci, "--license", license)
    config = tmp_path / "cookiecutter.yaml"
    config.write_text(f"cookiecutters_dir: {tmp_path / 'cc'}\nreplay_dir: {tmp_path / 'replay'}\n")
    answers = {"name": "apex-x", "kind": kind, "ci": ci, "license": license}
    other = main.cookiecutter(
        str(TEMPLATE), no_input=True, extra_context=answers, output_dir="theirs", config_file=str(config)
    )
    assert contents(other) == contents("mrv2-adapter-apex-x")


def test_cookiecutter_replays_the_recorded_answers(tmp_path, make, contents):
    main = pytest.importorskip("cookiecutter.main")
    Path("config.json").write_text(
        json.dumps({"architectures": ["Own"], "model_type": "own", "hidden_size": 640, "z": "'\"<é"})
    )
    make("apex", "--kind", "hybrid", "--from-config", "config.json")
    config = tmp_path / "cookiecutter.yaml"
    config.write_text(f"cookiecutters_dir: {tmp_path / 'cc'}\nreplay_dir: {tmp_path / 'replay'}\n")
    record = str(Path("mrv2-adapter-apex/.mrv2-template.json").resolve())
    other = main.cookiecutter(str(TEMPLATE), replay=record, output_dir="theirs", config_file=str(config))
    assert contents(other) == contents("mrv2-adapter-apex")
    assert "= 640," in contents(other)["src/mrv2_adapter_apex/config.py"]


def test_cookiecutter_refuses_a_malformed_name(tmp_path):
    main = pytest.importorskip("cookiecutter.main")
    exceptions = pytest.importorskip("cookiecutter.exceptions")
    config = tmp_path / "cookiecutter.yaml"
    config.write_text(f"cookiecutters_dir: {tmp_path / 'cc'}\nreplay_dir: {tmp_path / 'replay'}\n")
    with pytest.raises(exceptions.FailedHookException):
        main.cookiecutter(
            str(TEMPLATE), no_input=True, extra_context={"name": "Apex"}, output_dir="theirs", config_file=str(config)
        )
    assert not list(Path("theirs").iterdir())


# -- what is refused -----------------------------------------------------------------------------------------


MALFORMED = [
    "",
    "Apex",
    "1apex",
    "-apex",
    "apex-",
    "apex--x",
    "apex_x",
    "ac me",
    "apex.x",
    "../apex",
    "acmé",
    "apex\n",
    "a" * 51,
]


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_name_is_refused(name, refused):
    assert "MRV2-502" in refused("--kind", "decoder", "--", name)


@settings(max_examples=40)
@given(st.from_regex(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", fullmatch=True).filter(lambda name: len(name) <= 50))
def test_every_other_name_gives_identifiers(name):
    check_name(name)
    found = complete({"name": name})
    for key in ("__package", "__stem", "architecture", "model_type"):
        assert found[key].isidentifier(), (key, found[key])


@pytest.mark.parametrize("name", ["qwen", "llama"])
def test_a_taken_name_is_refused(name, refused):
    err = refused(name, "--kind", "decoder")
    assert "MRV2-502" in err
    assert "taken" in err


def test_the_name_of_a_package_that_can_be_imported_is_refused(monkeypatch, refused):
    Path("site/mrv2_adapter_apex").mkdir(parents=True)
    Path("site/mrv2_adapter_apex/__init__.py").write_text("raise SystemExit\n")
    monkeypatch.syspath_prepend("site")
    assert "mrv2_adapter_apex" in refused("apex", "--kind", "decoder")


def test_the_name_of_a_catalogue_is_refused(monkeypatch, refused):
    entry = {"adapter": "apex", "install": "apex-of-ours", "architectures": ["Apex"]}
    Path("team.json").write_text(json.dumps({"catalog": [entry]}))
    monkeypatch.setenv("MRV2_CATALOG", "team.json")
    assert "apex-of-ours" in refused("apex", "--kind", "decoder")


@pytest.mark.parametrize("there", ["folder", "empty", "file", "link"])
def test_what_exists_is_left_alone(there, refused):
    target = Path("mrv2-adapter-apex")
    if there == "file":
        target.write_text("mine")
    elif there == "link":
        target.symlink_to("nowhere")
    else:
        target.mkdir()
        if there == "folder":
            (target / "README.md").write_text("mine")
    assert "exists" in refused("apex", "--kind", "decoder")
    assert target.is_symlink() == (there == "link")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_can_not_be_written(tmp_path, monkeypatch, refused):
    (tmp_path / "locked").mkdir(mode=0o500)
    monkeypatch.chdir(tmp_path / "locked")
    assert "can't be written" in refused("apex", "--kind", "decoder")


def test_a_folder_that_is_gone(tmp_path, monkeypatch, refused):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert "the current folder" in refused("apex", "--kind", "decoder")


@pytest.mark.parametrize("option", ["kind", "ci", "license"])
def test_an_unknown_value_lists_those_that_are_known(option, refused):
    given_ = {"kind": "decoder"} | {option: "drafter"}
    err = refused("apex", *(part for name, value in given_.items() for part in (f"--{name}", value)))
    for value in choices(option):
        assert value in err


def test_the_kinds_are_listed_by_help_and_needed(capsys, refused):
    assert "--kind" in refused("apex")
    assert choices("kind") == KINDS
    run(["new-adapter", "--help"])
    told = capsys.readouterr().out
    assert all(kind in told for kind in KINDS)


def test_errors_are_typed():
    with pytest.raises(ScaffoldError, match="no name"):
        check_name("Apex")


def test_nothing_heavy_is_imported():
    code = (
        "import sys\nfrom mrv2.cli.app import run\n"
        "code = run(['new-adapter', 'apex', '--kind', 'hybrid'])\n"
        "heavy = {'torch', 'transformers', 'triton'} & set(sys.modules)\n"
        "sys.exit(code or str(heavy) if heavy else code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert re.search(r"pip install -e", done.stdout)
