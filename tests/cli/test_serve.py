"""`mrv2 serve`: the command it starts and the environment it sets, and what it refuses before vLLM starts."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

from mrv2.cli import app
from mrv2.testing.checkpoints import edit_config, make_checkpoint

ROOT = Path(__file__).parents[2]

MANIFEST = """\
# /// adapter
# name = "own"
# sdk_api = "0.1"
# architectures = ["OwnForCausalLM"]
# model_types = ["own"]
# owner = "nobody"
# capabilities = {{ {} }}
# ///
raise RuntimeError("serving imports no adapter")
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(
        tmp_path_factory.mktemp("serve") / "model",
        transformers.LlamaConfig(
            vocab_size=61,
            hidden_size=32,
            intermediate_size=48,
            num_attention_heads=2,
            num_key_value_heads=1,
            num_hidden_layers=1,
            max_position_embeddings=64,
        ),
    )


class Done:
    def __init__(self, returncode, stdout, stderr):
        self.returncode, self.stdout, self.stderr = returncode, stdout, stderr


@pytest.fixture
def site(tmp_path):
    """site(version): a folder in which metadata says that this vLLM is installed; None: nothing."""

    def make(version):
        folder = tmp_path / "site"
        folder.mkdir(exist_ok=True)
        if version:
            (folder / f"vllm-{version}.dist-info").mkdir(exist_ok=True)
            text = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
            (folder / f"vllm-{version}.dist-info" / "METADATA").write_text(text)
        return folder

    return make


@pytest.fixture
def serve(tmp_path, site, monkeypatch, capfd):
    """serve(*args, vllm=version, **env): what `mrv2 serve` prints and returns."""
    for name in [n for n in os.environ if n.startswith(("VLLM_", "MRV2_", "DO_NOT"))]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)

    def run(*args, vllm="0.32.0", **env):
        with monkeypatch.context() as inner:
            inner.syspath_prepend(str(site(vllm)))
            for name, value in env.items():
                inner.setenv(name, value)
            code = app.run(["serve", *map(str, args)])
        return Done(code, *capfd.readouterr())

    return run


@pytest.fixture
def planned(serve):
    """What `--json` says would be started."""

    def run(*args, **env):
        done = serve(args[0], "--json", *args[1:], **env)
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)

    return run


@pytest.fixture
def own(tmp_path):
    """own(capabilities): a local adapter that raises when imported, and a checkpoint for it."""

    def make(**capabilities):
        file = tmp_path / "own.py"
        file.write_text(MANIFEST.format(", ".join(f'{k} = "{v}"' for k, v in capabilities.items())))
        folder = tmp_path / "own-model"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text('{"architectures": ["OwnForCausalLM"], "model_type": "own"}')
        return folder, file

    return make


def overrides(command):
    assert command.count("--hf-overrides") == 1
    return json.loads(command[command.index("--hf-overrides") + 1])


def test_the_command_runs_vllms_own_with_the_adapters_name(checkpoint, planned):
    plan = planned(checkpoint, "--", "--port", "8123", "--max-model-len=64")
    command = plan["command"]
    assert command[:6] == [sys.executable, "-P", "-m", "vllm.entrypoints.cli.main", "serve", str(checkpoint)]
    assert overrides(command) == {"architectures": ["Mrv2LlamaForCausalLM"]}
    assert command[-3:] == ["--port", "8123", "--max-model-len=64"]
    assert plan["environment"] == {
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    assert plan["adapter"].startswith("llama (mrv2-adapter-llama")
    assert not {"--dtype", "--served-model-name"} & set(command)


def test_what_the_user_set_stays(checkpoint, planned):
    plan = planned(checkpoint, VLLM_NO_USAGE_STATS="0", DO_NOT_TRACK="0", VLLM_PLUGINS="mrv2")
    assert plan["environment"] == {"VLLM_USE_V2_MODEL_RUNNER": "1"}


def test_the_command_can_be_seen_where_there_is_no_vllm(checkpoint, serve):
    words = ("--", "--max-model-len", "64")
    refused = serve(checkpoint, *words, vllm=None)
    assert refused.returncode == 2
    assert "MRV2-209" in refused.stderr
    plan = serve(checkpoint, "--json", *words, vllm=None)
    assert json.loads(plan.stdout)["vllm"] is None
    done = serve(checkpoint, "--dry-run", *words, vllm=None)
    assert "vLLM isn't installed here" in done.stderr
    there = serve(checkpoint, "--dry-run", *words)
    assert (done.returncode, done.stdout) == (0, there.stdout)


def test_dry_run_prints_a_line_for_the_shell(checkpoint, serve):
    done = serve(checkpoint, "--dry-run", "--", "--chat-template", "a b")
    words = shlex.split(done.stdout)
    assert words[:3] == ["VLLM_USE_V2_MODEL_RUNNER=1", "VLLM_NO_USAGE_STATS=1", "DO_NOT_TRACK=1"]
    assert words[-2:] == ["--chat-template", "a b"]
    assert done.stderr == ""


def test_without_dry_run_vllms_command_takes_the_place_of_this_process(checkpoint, site):
    folder = site("0.32.0")
    package = folder / "vllm" / "entrypoints" / "cli"
    package.mkdir(parents=True)
    for parent in (package, package.parent, package.parent.parent):
        (parent / "__init__.py").touch()
    (package / "main.py").write_text(
        "import json, os, sys\nprint(json.dumps([sys.argv[1:], os.environ['VLLM_USE_V2_MODEL_RUNNER']]))\nsys.exit(7)\n"
    )
    env = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_")}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "mrv2", "serve", str(checkpoint), "--", "--port", "8123"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=env | {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [env.get("PYTHONPATH")])])},
    )
    argv, runner = json.loads(done.stdout)
    assert (done.returncode, argv[0], argv[-2:], runner) == (7, "serve", ["--port", "8123"], "1")
    assert "by adapter llama" in done.stderr


@pytest.mark.parametrize(
    ("args", "merged"),
    [
        (["--hf-overrides", '{"rope_theta": 5}'], {"rope_theta": 5}),
        (["--hf_overrides={}", "--hf-overrides.rope_parameters.factor", "2"], {"rope_parameters": {"factor": 2}}),
        (["--hf-overrides.x.y=a", "--hf-overrides", '{"x": {"z": 1}}'], {"x": {"z": 1}}),
        (["--hf-overrides.names+", "a,b"], {"names": ["a", "b"]}),
        (["--hf-overrides.architectures+", "Mrv2LlamaForCausalLM"], {}),
    ],
)
def test_overrides_are_merged_with_the_users(checkpoint, planned, args, merged):
    command = planned(checkpoint, "--", *args, "--port", "8123")["command"]
    assert overrides(command) == merged | {"architectures": ["Mrv2LlamaForCausalLM"]}
    assert command[-2:] == ["--port", "8123"]
    assert not [word for word in command if word.startswith(("--hf-overrides.", "--hf_overrides"))]


def test_on_a_cpu_float32_unless_told_otherwise(checkpoint, planned):
    command = planned(checkpoint, vllm="0.32.0+cpu")["command"]
    assert command[command.index("--dtype") + 1] == "float32"
    assert planned(checkpoint, "--", "--dtype=bfloat16", vllm="0.32.0+cpu")["command"].count("--dtype") == 0


def test_a_local_adapter_reaches_vllms_processes_and_is_not_imported_here(own, planned, tmp_path):
    folder, file = own(chunked_prefill="both", prefix_caching="both", cuda_graphs="vllm")
    plan = planned(folder, "--adapter", "own.py", MRV2_LOCAL_ADAPTERS="/elsewhere")
    assert plan["environment"]["MRV2_LOCAL_ADAPTERS"] == os.pathsep.join([str(file), "/elsewhere"])
    assert overrides(plan["command"]) == {"architectures": ["Mrv2OwnForCausalLM"]}
    assert "--enforce-eager" not in plan["command"]


def test_an_installed_adapter_that_was_named_is_preferred_in_vllms_processes(checkpoint, planned):
    plan = planned(checkpoint, "--adapter", "llama", MRV2_PREFER="A=b,LlamaForCausalLM=mrv2-adapter-llama")
    prefer = plan["environment"]["MRV2_PREFER"].split(",")
    assert prefer[0] == "A=b"
    assert prefer.count("LlamaForCausalLM=mrv2-adapter-llama") == 1


def test_what_vllm_does_by_itself_and_the_adapter_doesnt_declare_is_off(own, planned):
    folder, file = own(chunked_prefill="native")
    command = planned(folder, "--adapter", file)["command"]
    assert {"--no-enable-prefix-caching", "--no-enable-chunked-prefill", "--enforce-eager"} <= set(command)
    again = planned(folder, "--adapter", file, "--", "--enforce-eager")["command"]
    assert again.count("--enforce-eager") == 1


@pytest.mark.parametrize(
    ("args", "capability"),
    [
        (["-tp", "2"], "tensor_parallel"),
        (["--tensor_parallel_size=2"], "tensor_parallel"),
        (["--pipeline-parallel-size", "4"], "pipeline_parallel"),
        (["--enable-expert-parallel"], "expert_parallel"),
        (["--enable-lora", "--port", "1"], "lora"),
        (["-q", "fp8"], "quantization"),
        (["--speculative-config.method", "ngram"], "speculation"),
        (["--enable-prefix-caching"], "prefix_caching"),
        (["--enable-chunked-prefill"], "chunked_prefill"),
    ],
)
def test_options_that_ask_for_what_isnt_declared(own, serve, args, capability):
    folder, file = own()
    done = serve(folder, "--adapter", file, "--", *args)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("MRV2-403")
    assert f"asks for {capability}, which adapter own declares for no host" in done.stderr


def test_sizes_of_one_ask_for_nothing(own, planned):
    folder, file = own()
    planned(folder, "--adapter", file, "--", "-tp", "1", "--pipeline-parallel-size=1")


@pytest.mark.parametrize(
    ("args", "env", "code", "what"),
    [
        ([], {"vllm": None}, "MRV2-209", "pip install 'mrv2[vllm]'"),
        ([], {"VLLM_PLUGINS": ""}, "MRV2-604", "unset it"),
        ([], {"VLLM_PLUGINS": "other"}, "MRV2-604", "add mrv2 to VLLM_PLUGINS"),
        ([], {"VLLM_USE_V2_MODEL_RUNNER": "0"}, "MRV2-602", "unset VLLM_USE_V2_MODEL_RUNNER"),
        (["--model", "x"], {}, "MRV2-500", "MODEL is given"),
        (["--model-impl=transformers"], {}, "MRV2-500", "leave out the adapter's model"),
        (["--config", "a.yaml"], {}, "MRV2-500", "give them after --"),
        (["--hf-overrides", "[1]"], {}, "MRV2-500", "no JSON object"),
        (["--hf-overrides", '{"architectures": ["Other"]}'], {}, "MRV2-500", "mrv2 serve chooses the architecture"),
    ],
)
def test_wrong_use(checkpoint, serve, args, env, code, what):
    if env == {"vllm": None} and _have_vllm():
        pytest.skip("vLLM is installed here")
    done = serve(checkpoint, "--", *args, **env)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(code)
    assert what in done.stderr
    assert "Traceback" not in done.stderr


def test_an_architecture_without_an_adapter(checkpoint, serve, tmp_path):
    folder = tmp_path / "unknown"
    folder.mkdir()
    (folder / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    edit_config(folder, architectures=["NobodyForCausalLM"])
    done = serve(folder)
    assert (done.returncode, done.stderr[:8]) == (2, "MRV2-101")


def test_a_file_and_a_name_that_are_no_model(serve, tmp_path):
    assert serve("no-such-model").stderr.startswith("MRV2-205")
    (tmp_path / "empty").mkdir()
    assert serve("empty").stderr.startswith("MRV2-201")


def _have_vllm():
    from mrv2.cli.vllm_install import find_vllm

    return find_vllm() is not None


def documented():
    """`mrv2 serve` lines of the pages, without comments."""
    for page in ("README.md", "docs/bridge.md", "docs/deploy.md"):
        text = (ROOT / page).read_text()
        for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL):
            yield from (line for line in block.splitlines() if line.startswith("mrv2 serve ./model"))


@pytest.mark.parametrize("line", sorted(set(documented())))
def test_lines_of_the_pages(own, serve, line):
    from mrv2.manifest import Capability

    folder, file = own(**dict.fromkeys(map(str, Capability), "both"))
    words = shlex.split(line, comments=True)[3:]
    done = serve(folder, "--adapter", file, *([] if "--dry-run" in words else ["--dry-run"]), *words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith(shlex.join(words[words.index("--") + 1 :]))


def test_the_pages_show_lines():
    assert len(set(documented())) > 5
