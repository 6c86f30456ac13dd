"""An OpenAI client's question, answered by vLLM's own server with our adapter in it."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
QUESTION = "What is the capital of France?"
ROCKETS = "Do the rockets work?"
SMALL = ["--enforce-eager", "--max-num-seqs", "1", "--kv-cache-memory-bytes", "64M"]
SERVER_S = 300


def outside(site=None):
    """The environment of a user's shell: nothing of vLLM's or ours but where caches are; and packages in `site`."""
    kept = ("VLLM_CACHE_ROOT", "MRV2_CACHE")
    env = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "MRV2_", "TRITON_")) or k in kept}
    paths = [str(site or ""), env.get("PYTHONPATH", "")]
    return env | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


@contextlib.contextmanager
def serving(command, log, site=None):
    """A server as a process, on a free port; gives its address when it answers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with log.open("w") as out:
        process = subprocess.Popen(
            [*map(str, command), "--port", str(port)], env=outside(site), stdout=out, stderr=out, start_new_session=True
        )
    try:
        deadline = time.monotonic() + SERVER_S
        while True:
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < deadline, log.read_text()[-4000:]
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                break
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}/v1"
        # Ctrl-C ends it, whoever started it.
        process.send_signal(signal.SIGINT)
        process.wait(60)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def answer(url, model, text, n):
    from openai import OpenAI

    with OpenAI(base_url=url, api_key="none", timeout=240, max_retries=0) as client:
        reply = client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": text}], temperature=0, max_tokens=n
        )
    return reply.choices[0].message.content


def generated(model, text, n, site=None):
    """`mrv2 generate`'s text, by torch and not the interpreter."""
    done = subprocess.run(
        [sys.executable, "-m", "mrv2", "generate", str(model), text, "--chat", "-t", "0", "-n", str(n)],
        capture_output=True,
        text=True,
        env=outside(site) | {"TRITON_INTERPRET": "0"},
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.removesuffix("\n")


@pytest.mark.weights
def test_plain_vllm_serve_answers_with_mrv2_generates_text(tmp_path):
    from mrv2.loader.model import resolve_model

    folder = resolve_model("smollm2").path
    vllm = Path(sys.executable).parent / "vllm"
    choose = ["--hf-overrides", '{"architectures": ["Mrv2LlamaForCausalLM"]}', "--dtype", "float32"]
    command = [vllm, "serve", folder, *choose, *SMALL, "--max-model-len", "64"]
    with serving(command, tmp_path / "log") as url:
        said = answer(url, str(folder), QUESTION, 10)
    assert said == "The capital of France is Paris."
    assert said == generated("smollm2", QUESTION, 10)
    assert "Resolved architecture: Mrv2LlamaForCausalLM" in (tmp_path / "log").read_text()
    assert "Using V2 Model Runner" in (tmp_path / "log").read_text()


def test_plain_vllm_serve_of_a_private_package(tmp_path):
    """An architecture, a tokenizer and a checkpoint format that nobody else has, installed as any package is."""
    site = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*install, "--target", site, ROOT / "examples" / "acme"], check=True)
    folder = site / "mrv2_adapter_acme" / "tiny"
    vllm = Path(sys.executable).parent / "vllm"
    command = [vllm, "serve", folder, "--dtype", "float32", *SMALL, "--max-model-len", "64"]
    with serving(command, tmp_path / "log", site) as url:
        said = answer(url, str(folder), ROCKETS, 40)
    assert said == "They fly very well. They turn less well."
    assert said == generated(folder, ROCKETS, 40, site)
    assert "Resolved architecture: AcmeForCausalLM" in (tmp_path / "log").read_text()
    assert "Using V2 Model Runner" in (tmp_path / "log").read_text()


def test_mrv2_serve_answers_with_mrv2_generates_text(text_folder, tmp_path):
    command = [sys.executable, "-m", "mrv2", "serve", text_folder, "--", *SMALL, "--served-model-name", "tiny"]
    with serving(command, tmp_path / "log") as url:
        said = answer(url, "tiny", "the cat sat", 12)
    assert said.strip()
    assert said == generated(text_folder, "the cat sat", 12)
    assert "Resolved architecture: Mrv2LlamaForCausalLM" in (tmp_path / "log").read_text()
