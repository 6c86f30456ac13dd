#!/bin/sh
# The CUDA suite on a machine with a GPU and no network: installs the bundle into a folder of its own, then tests.
#   tests/gpu/run.sh [pytest arguments]
# BUNDLE: folder made by bundle.py; SITE: where to install it, kept if given; WORKERS: processes that share the GPU.
set -eu
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
bundle=${BUNDLE:-.gpu-bundle}
if [ -z "${SITE:-}" ]; then
  SITE=$(mktemp -d)
  trap 'rm -rf "$SITE"' EXIT
fi
"$python" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$SITE" "$bundle"/*.whl
export PYTHONPATH="$PWD/core:$SITE${PYTHONPATH:+:$PYTHONPATH}"
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
parallel=
if "$python" -c 'import xdist' 2>/dev/null; then
  parallel="-n ${WORKERS:-8} --dist worksteal"
fi
# shellcheck disable=SC2086
"$python" -m pytest -q --device cuda --durations=10 $parallel \
  tests/gpu tests/kernels tests/state tests/layers/test_fused_kernels.py \
  tests/runner/test_on_cuda.py tests/runner/test_engine.py tests/runner/test_state_machine.py "$@"
