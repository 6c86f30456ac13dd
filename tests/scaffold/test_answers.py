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
from mrv2.kernels.gated_act import ACTIVATIONS
from mrv2.manifest import validate
from mrv2.scaffold import from_config
from mrv2.scaffold.answers import TEMPLATE, check_name, choices, complete, known_to_transformers
from mrv2.scaffold.render import render

KINDS = ("decoder", "moe", "hybrid")
LICENSES = ("proprietary", "apache-2.0", "mit")
COMMON = {
    ".gitignore", ".mrv2-template.json", "CHANGELOG.md", "LICENSE", "README.md", "pyproject.toml",
    "src/mrv2_adapter_acme_x/__init__.py", "src/mrv2_adapter_acme_x/adapter.toml",
    "src/mrv2_adapter_acme_x/config.py", "src/mrv2_adapter_acme_x/model.py", "src/mrv2_adapter_acme_x/py.typed",
    "src/mrv2_adapter_acme_x/testing.py", "src/mrv2_adapter_acme_x/weights.py", "tests/test_conformance.py",
}  # fmt: skip
OF_KIND = {
    "decoder": set(),
    "moe": set(),
    "hybrid": {
        "src/mrv2_adapter_acme_x/mixers.py", "src/mrv2_adapter_acme_x/kernels.py",
        "tests/conftest.py", "tests/test_kernels.py",
    },
}  # fmt: skip
OF_CI = {"github": {".github/workflows/check.yml"}, "gitlab": {".gitlab-ci.yml"}, "none": set()}


@pytest.fixture(autouse=True)
def _fresh_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def contents(folder):
    """Every file by its path, empty folders too."""
    folder = Path(folder)
    paths = sorted(folder.rglob("*"))
    empty = {f"{p.relative_to(folder)}/": "" for p in paths if p.is_dir() and not any(p.iterdir())}
    return empty | {p.relative_to(folder).as_posix(): p.read_text(errors="replace") for p in paths if p.is_file()}


def make(*argv):
    assert run(["new-adapter", *argv]) == 0


# -- what is written -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ci", OF_CI)
@pytest.mark.parametrize("kind", KINDS)
def test_the_files_are_exactly_these(kind, ci, capsys):
    make("acme-x", "--kind", kind, "--ci", ci, "--json")
    told = json.loads(capsys.readouterr().out)
    assert set(contents("mrv2-adapter-acme-x")) == COMMON | OF_KIND[kind] | OF_CI[ci] == set(told["files"])
    assert Path(told["folder"]) == Path.cwd() / "mrv2-adapter-acme-x"
    assert [p.name for p in Path.cwd().iterdir()] == ["mrv2-adapter-acme-x"]


@pytest.mark.parametrize("license", LICENSES)
def test_the_licence(license):
    make("acme", "--kind", "decoder", "--license", license)
    project = tomllib.loads(Path("mrv2-adapter-acme/pyproject.toml").read_text())["project"]
    text = Path("mrv2-adapter-acme/LICENSE").read_text()
    words = {"proprietary": "All rights reserved", "apache-2.0": "Apache License", "mit": "MIT License"}
    assert [name for name, word in words.items() if word in text] == [license]
    assert ("Private :: Do Not Upload" in project["classifiers"]) == (license == "proprietary")
    assert project["license"].lower().removeprefix("licenseref-") == license


@pytest.mark.parametrize("ci", ["github", "gitlab"])
def test_ci_is_valid_and_runs_all_checks(ci):
    make("acme", "--kind", "decoder", "--ci", ci)
    (file,) = {".github/workflows/check.yml", ".gitlab-ci.yml"} & set(contents("mrv2-adapter-acme"))
    job = yaml.safe_load(Path("mrv2-adapter-acme", file).read_text())
    lines = job["check"]["script"] if ci == "gitlab" else [s.get("run", "") for s in job["jobs"]["check"]["steps"]]
    for word in ("pip install -e", "ruff format --check", "ruff check", "mypy", "pytest --mrv2-require L1"):
        assert [line for line in lines if word in line], word


def test_defaults_are_private_and_for_github():
    make("acme", "--kind", "moe")
    answers = json.loads(Path("mrv2-adapter-acme/.mrv2-template.json").read_text())["cookiecutter"]
    assert (answers["kind"], answers["ci"], answers["license"]) == ("moe", "github", "proprietary")
    assert answers["_template_version"] == "1"


def test_the_template_says_which_core_it_is_for():
    versions = complete({"name": "acme"})
    major, minor = mrv2.__version__.split(".")[:2]
    assert versions["_mrv2"] == f">={major}.{minor},<{major}.{int(minor) + 1}"
    assert versions["_sdk_api"] == str(mrv2.SDK_API)


@pytest.mark.parametrize("kind", KINDS)
def test_the_manifest_is_valid(kind):
    make("acme", "--kind", kind)
    raw = tomllib.loads(Path("mrv2-adapter-acme/src/mrv2_adapter_acme/adapter.toml").read_text())
    manifest = validate(raw, "here")
    assert (manifest.name, manifest.architectures, manifest.model_types) == ("acme", ("AcmeForCausalLM",), ("acme",))


# -- cookiecutter --------------------------------------------------------------------------------------------


DIFFERENT = [("decoder", "github", "proprietary"), ("moe", "gitlab", "mit"), ("hybrid", "none", "apache-2.0")]


@pytest.mark.parametrize(("kind", "ci", "license"), DIFFERENT)
def test_cookiecutter_writes_the_same(kind, ci, license, tmp_path):
    main = pytest.importorskip("cookiecutter.main")
    make("acme-x", "--kind", kind, "--ci", ci, "--license", license)
    config = tmp_path / "cookiecutter.yaml"
    config.write_text(f"cookiecutters_dir: {tmp_path / 'cc'}\nreplay_dir: {tmp_path / 'replay'}\n")
    answers = {"name": "acme-x", "kind": kind, "ci": ci, "license": license}
    other = main.cookiecutter(
        str(TEMPLATE), no_input=True, extra_context=answers, output_dir="theirs", config_file=str(config)
    )
    assert contents(other) == contents("mrv2-adapter-acme-x")


def test_cookiecutter_replays_the_recorded_answers(tmp_path):
    main = pytest.importorskip("cookiecutter.main")
    Path("config.json").write_text(
        json.dumps({"architectures": ["Own"], "model_type": "own", "hidden_size": 640, "z": "'\"<é"})
    )
    make("acme", "--kind", "hybrid", "--from-config", "config.json")
    config = tmp_path / "cookiecutter.yaml"
    config.write_text(f"cookiecutters_dir: {tmp_path / 'cc'}\nreplay_dir: {tmp_path / 'replay'}\n")
    record = str(Path("mrv2-adapter-acme/.mrv2-template.json").resolve())
    other = main.cookiecutter(str(TEMPLATE), replay=record, output_dir="theirs", config_file=str(config))
    assert contents(other) == contents("mrv2-adapter-acme")
    assert "= 640," in contents(other)["src/mrv2_adapter_acme/config.py"]


def test_cookiecutter_refuses_a_malformed_name(tmp_path):
    main = pytest.importorskip("cookiecutter.main")
    exceptions = pytest.importorskip("cookiecutter.exceptions")
    config = tmp_path / "cookiecutter.yaml"
    config.write_text(f"cookiecutters_dir: {tmp_path / 'cc'}\nreplay_dir: {tmp_path / 'replay'}\n")
    with pytest.raises(exceptions.FailedHookException):
        main.cookiecutter(
            str(TEMPLATE), no_input=True, extra_context={"name": "Acme"}, output_dir="theirs", config_file=str(config)
        )
    assert not list(Path("theirs").iterdir())


# -- what is refused -----------------------------------------------------------------------------------------


def refused(capsys, *argv):
    """The message; nothing may have changed."""
    before = contents(".")
    assert run(["new-adapter", *argv]) == 2
    assert contents(".") == before
    out, err = capsys.readouterr()
    assert out == ""
    return err


MALFORMED = [
    "",
    "Acme",
    "1acme",
    "-acme",
    "acme-",
    "acme--x",
    "acme_x",
    "ac me",
    "acme.x",
    "../acme",
    "acmé",
    "acme\n",
    "a" * 51,
]


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_name_is_refused(name, capsys):
    assert "MRV2-502" in refused(capsys, "--kind", "decoder", "--", name)


@settings(max_examples=40, deadline=None)
@given(st.from_regex(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", fullmatch=True).filter(lambda name: len(name) <= 50))
def test_every_other_name_gives_identifiers(name):
    check_name(name)
    found = complete({"name": name})
    for key in ("__package", "__stem", "architecture", "model_type"):
        assert found[key].isidentifier(), (key, found[key])


@pytest.mark.parametrize("name", ["qwen", "llama"])
def test_a_taken_name_is_refused(name, capsys):
    err = refused(capsys, name, "--kind", "decoder")
    assert "MRV2-502" in err
    assert "taken" in err


def test_the_name_of_a_package_that_can_be_imported_is_refused(capsys, monkeypatch):
    Path("site/mrv2_adapter_acme").mkdir(parents=True)
    Path("site/mrv2_adapter_acme/__init__.py").write_text("raise SystemExit\n")
    monkeypatch.syspath_prepend("site")
    assert "mrv2_adapter_acme" in refused(capsys, "acme", "--kind", "decoder")


def test_the_name_of_a_catalogue_is_refused(capsys, monkeypatch):
    entry = {"adapter": "acme", "install": "acme-of-ours", "architectures": ["Acme"]}
    Path("team.json").write_text(json.dumps({"catalog": [entry]}))
    monkeypatch.setenv("MRV2_CATALOG", "team.json")
    assert "acme-of-ours" in refused(capsys, "acme", "--kind", "decoder")


@pytest.mark.parametrize("there", ["folder", "empty", "file", "link"])
def test_what_exists_is_left_alone(there, capsys):
    target = Path("mrv2-adapter-acme")
    if there == "file":
        target.write_text("mine")
    elif there == "link":
        target.symlink_to("nowhere")
    else:
        target.mkdir()
        if there == "folder":
            (target / "README.md").write_text("mine")
    assert "exists" in refused(capsys, "acme", "--kind", "decoder")
    assert target.is_symlink() == (there == "link")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_can_not_be_written(capsys, tmp_path, monkeypatch):
    (tmp_path / "locked").mkdir(mode=0o500)
    monkeypatch.chdir(tmp_path / "locked")
    assert "can't be written" in refused(capsys, "acme", "--kind", "decoder")


def test_a_folder_that_is_gone(capsys, tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert "the current folder" in refused(capsys, "acme", "--kind", "decoder")


@pytest.mark.parametrize("option", ["kind", "ci", "license"])
def test_an_unknown_value_lists_those_that_are_known(option, capsys):
    given_ = {"kind": "decoder"} | {option: "drafter"}
    err = refused(capsys, "acme", *(part for name, value in given_.items() for part in (f"--{name}", value)))
    for value in choices(option):
        assert value in err


def test_the_kinds_are_listed_by_help_and_needed(capsys):
    assert "--kind" in refused(capsys, "acme")
    assert choices("kind") == KINDS
    run(["new-adapter", "--help"])
    told = capsys.readouterr().out
    assert all(kind in told for kind in KINDS)


def test_errors_are_typed():
    with pytest.raises(ScaffoldError, match="no name"):
        check_name("Acme")


# -- --from-config -------------------------------------------------------------------------------------------

OWN = {
    "architectures": ["ZephyrLM"],
    "model_type": "zephyr-2",
    "vocab_size": 50000,
    "hidden_size": 768,
    "intermediate_size": 2000,
    "num_hidden_layers": 30,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "hidden_act": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000},
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "sliding_window": 512,
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
}


def scaffolded(capsys, kind="decoder", **config):
    """Files and open points of a project made from a config."""
    Path("config.json").write_text(json.dumps(config))
    make("acme", "--kind", kind, "--from-config", "config.json", "--json")
    told = json.loads(capsys.readouterr().out)
    files = contents("mrv2-adapter-acme")
    readme = " ".join(files["README.md"].split())
    for point in told["open"]:
        assert " ".join(point.split()) in readme
    return files, told["open"]


def test_a_config_gives_names_and_sizes_and_nothing_is_open(capsys):
    files, open_ = scaffolded(capsys, **OWN)
    assert open_ == []
    assert "Open points" not in files["README.md"]
    manifest = tomllib.loads(files["src/mrv2_adapter_acme/adapter.toml"])
    assert (manifest["architectures"], manifest["model_types"]) == (["ZephyrLM"], ["zephyr-2"])
    config = files["src/mrv2_adapter_acme/config.py"]
    for line in (
        'model_type = "zephyr-2"', "vocab_size: int = 50000,", "num_key_value_heads: int | None = 4,",
        "head_dim: int | None = None,", 'hidden_act: str = "gelu_pytorch_tanh",', "rms_norm_eps: float = 1e-05,",
        "rope_theta: float = 500000.0,", "tie_word_embeddings: bool = True,", "sliding_window: int | None = 512,",
    ):  # fmt: skip
        assert line in config
    assert 'ARCHITECTURE = "ZephyrLM"' in files["src/mrv2_adapter_acme/testing.py"]


MISSING = {
    "media": ({"vision_config": {"depth": 3}}, "media"),
    "encoder": ({"is_encoder_decoder": True}, "decoders only"),
    "latent": ({"kv_lora_rank": 512}, "latent attention"),
    "bits": ({"quantization_config": {"bits": 4}}, "fewer bits"),
    "draft": ({"num_nextn_predict_layers": 1}, "draft"),
    "experts": ({"num_experts": 8, "num_experts_per_tok": 2}, "--kind moe"),
    "state": ({"ssm_state_size": 16}, "--kind hybrid"),
    "code": ({"auto_map": {"AutoModel": "modeling.Own"}}, "never run"),
    "act": ({"hidden_act": "xielu"}, '`hidden_act` is "xielu"'),
    "absent": ({"vocab_size": None}, "`vocab_size`: not there"),
    "odd": ({"hidden_size": [1, 2]}, "`hidden_size` is [1, 2]"),
    "unread": ({"mystery_scale": 0.3}, "`mystery_scale`: nothing reads it"),
    "several": ({"architectures": ["A", "B"]}, "names 2"),
    "none": ({"architectures": []}, "names no class"),
    "evil": ({"architectures": ['X"]\nowner = "me']}, "names no class"),
}


@pytest.mark.parametrize("case", MISSING)
def test_an_unsupported_architecture_is_scaffolded_and_told_what_is_missing(case, capsys):
    changes, words = MISSING[case]
    files, open_ = scaffolded(capsys, **OWN | changes)
    assert len([point for point in open_ if words in point]) == 1, open_
    assert set(files) - {".github/workflows/check.yml"} == {f.replace("_acme_x", "_acme") for f in COMMON}
    assert validate(tomllib.loads(files["src/mrv2_adapter_acme/adapter.toml"]), "here").name == "acme"
    compile(files["src/mrv2_adapter_acme/config.py"], "config.py", "exec")


def test_an_empty_config_is_enough(capsys):
    files, open_ = scaffolded(capsys)
    assert "AcmeForCausalLM" in files["src/mrv2_adapter_acme/adapter.toml"]
    assert any("hidden_size" in point for point in open_)


def test_a_nested_text_config_is_read(capsys):
    text = {k: v for k, v in OWN.items() if k != "architectures"}
    outer = {"architectures": ["SeerLM"], "model_type": "seer", "vision_config": {"depth": 2}, "text_config": text}
    files, _ = scaffolded(capsys, **outer)
    assert "vocab_size: int = 50000," in files["src/mrv2_adapter_acme/config.py"]
    assert 'model_types = ["seer"]' in files["src/mrv2_adapter_acme/adapter.toml"]


def test_what_others_have_is_said(capsys):
    """Transformers' config classes win in every host, and an installed adapter may serve the architecture."""
    files, open_ = scaffolded(capsys, **OWN | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"})
    assert any("MRV2_PREFER=Qwen3ForCausalLM=acme" in point for point in open_)
    assert any("transformers has a config class for model type `qwen3`" in point for point in open_)
    assert 'model_types = ["acme_adapter"]' in files["src/mrv2_adapter_acme/adapter.toml"]


@pytest.mark.parametrize("text", [None, "{", "[1]", "\xff", "[" * 100000])
def test_a_file_that_holds_no_config_is_refused(text, capsys):
    if text is not None:
        Path("config.json").write_bytes(text.encode("latin-1"))
    assert "MRV2-501" in refused(capsys, "acme", "--kind", "decoder", "--from-config", "config.json")


def test_keys_that_no_file_can_hold_are_escaped_and_many_are_counted(capsys):
    odd = {"\ud800": 1, "two\nlines": 2} | {f"key{i:02}": i for i in range(40)}
    files, open_ = scaffolded(capsys, **OWN | odd)
    (unread,) = [point for point in open_ if "nothing reads them" in point]
    assert r"`\ud800`, `two\nlines`, `key00`" in unread
    assert unread.endswith("`key21` and 18 more: nothing reads them yet")
    assert unread in files["README.md"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=30, deadline=None)
@given(
    st.dictionaries(st.sampled_from([*OWN, "text_config", "num_experts", "layer_types", "x"]), JSON),
    st.sampled_from(KINDS),
)
def test_whatever_a_config_holds_the_code_is_code(config, kind):
    Path("any.json").write_text(json.dumps(config))
    found = from_config.read_config(Path("any.json"), kind)
    names = {"architecture": found.architecture, "model_type": found.model_type}
    answers = {name: value for name, value in names.items() if value} | {"name": "acme", "kind": kind}
    about = {"sizes": dict(found.sizes), "open": list(found.open)}
    for path, text in render(complete(answers | {"_from_config": about})):
        if path.endswith(".py"):
            compile(text, path, "exec")
        elif path.endswith(".toml"):
            tomllib.loads(text)
        elif path.endswith(".json"):
            json.loads(text)


def test_the_lists_are_those_of_their_owners():
    assert set(from_config.ACTIVATIONS) == set(ACTIVATIONS)
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    known = sorted(CONFIG_MAPPING_NAMES)
    assert [name for name in known[::23] if not known_to_transformers(name)] == []
    assert not known_to_transformers("acme")


def test_nothing_heavy_is_imported():
    code = (
        "import sys\nfrom mrv2.cli.app import run\n"
        "code = run(['new-adapter', 'acme', '--kind', 'hybrid'])\n"
        "heavy = {'torch', 'transformers', 'triton'} & set(sys.modules)\n"
        "sys.exit(code or str(heavy) if heavy else code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert re.search(r"pip install -e", done.stdout)
