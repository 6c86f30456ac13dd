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
status=0
suite() {
  code=0
  "$python" -m pytest -q --device cuda --durations=10 "$@" || code=$?
  [ $code = 0 ] || [ $code = 5 ] || status=$code # 5: what was asked for has no such test
}
set -- tests/gpu tests/kernels tests/state tests/sample tests/layers/test_fused_kernels.py tests/layers/test_moe.py \
  tests/runner adapters/*/tests/test_conformance.py examples/*/tests/test_conformance.py examples/acme/tests/test_kernels.py \
  --mrv2-levels L2 "$@"
# shellcheck disable=SC2086
suite $parallel -m "not alone" "$@"
suite -m alone "$@"
exit $status
