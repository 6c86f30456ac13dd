#!/bin/sh
# The CUDA suite on a machine with a GPU and no network: installs the bundle into a folder of its own, then tests.
#   tests/gpu/run.sh [pytest arguments]
# BUNDLE, SITE, PYTHON: see site.sh; WORKERS: processes that share the GPU.
set -eu
cd "$(dirname "$0")/../.."
. tests/gpu/site.sh
parallel=
if "$python" -c 'import xdist' 2>/dev/null; then
  parallel="-n ${WORKERS:-8} --dist worksteal"
fi
# shellcheck disable=SC2086
"$python" -m pytest -q --device cuda --durations=10 $parallel \
  tests/gpu tests/kernels tests/state tests/layers/test_fused_kernels.py \
  tests/runner/test_on_cuda.py tests/runner/test_graphs.py tests/runner/test_engine.py tests/runner/test_state_machine.py "$@"
