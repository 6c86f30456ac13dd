#!/bin/sh
# compute-sanitizer over the tests marked `sanitize`: kernels beside their twins, and an engine for a few steps.
#   tests/gpu/sanitize.sh [pytest arguments]
# Prints one line per tool; ends with 1 if there was an error, a test failed, or memcheck couldn't run.
# TOOLS: default "memcheck racecheck", initcheck is possible; LIMIT: seconds per tool; LOGS: folder for the logs.
# BUNDLE, SITE, PYTHON: see site.sh.
set -eu
cd "$(dirname "$0")/../.."
. tests/gpu/site.sh
logs=${LOGS:-$SITE/sanitizer}
mkdir -p "$logs"
export MRV2_KERNEL_CASES="${MRV2_KERNEL_CASES:-3}"

find_sanitizer() {
  command -v compute-sanitizer && return
  for file in "${CUDA_HOME:-/usr/local/cuda}"/bin/compute-sanitizer /usr/local/cuda*/bin/compute-sanitizer \
    "${CUDA_HOME:-/usr/local/cuda}"/compute-sanitizer/compute-sanitizer; do
    [ -x "$file" ] && echo "$file" && return
  done
  packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  find "$packages/nvidia" -name compute-sanitizer -type f -perm -u+x 2>/dev/null | grep -m 1 .
}

sanitizer=$(find_sanitizer) || { echo "compute-sanitizer is neither on PATH nor with CUDA or Python's packages" >&2; exit 2; }

# under TOOL LOG COMMAND...: run it under the tool, or end it when its time is over.
under() {
  tool=$1 log=$2
  shift 2
  rm -f "$log"
  # Calls that fail by design, such as the driver's look-ups of symbols, are no memory errors.
  timeout "${LIMIT:-280}" "$sanitizer" --tool "$tool" --report-api-errors no --target-processes application-only \
    --log-file "$log" "$@"
}

# check TOOL FOLDER [pytest arguments]: the folder's tests under the tool, and what came of it in one line.
check() {
  tool=$1 folder=$2 log=$logs/$1-${2##*/}.log out=$logs/$1-${2##*/}.out
  shift 2
  passed=yes
  under "$tool" "$log" "$python" -m pytest -q --device cuda -m sanitize -p no:cacheprovider "$folder" "$@" \
    >"$out" 2>&1 || passed=no
  errors=$(sed -n 's/^=* *[A-Z]* SUMMARY: \([0-9]*\) .*/\1/p' "$log" | tail -n 1)
  echo "$tool, $folder: ${errors:-no count of} errors; pytest: $(grep . "$out" | tail -n 1)"
  if [ "$passed" = no ] || [ "${errors:-1}" != 0 ]; then
    grep '^=========' "$log" | head -n 60
    grep -E '^(FAILED|ERROR|E  )' "$out" | head -n 20 || true
    status=1
  fi
}

status=0
for tool in ${TOOLS:-memcheck racecheck}; do
  log=$logs/$tool.log out=$logs/$tool.out
  if ! under "$tool" "$log" "$python" -c 'import torch; torch.ones(9, device="cuda").sum().item()' >"$out" 2>&1; then
    echo "$tool unavailable: $(cat "$log" "$out" 2>/dev/null | grep . | tail -n 1)"
    [ "$tool" = memcheck ] && status=1
    continue
  fi
  # Without a cache each tensor is an allocation of its own, so that accesses past its end are seen. An engine needs
  # the cache: its graphs can't be captured while memory is asked of the driver.
  [ "$tool" = memcheck ] && export PYTORCH_NO_CUDA_MEMORY_CACHING=1
  check "$tool" tests/kernels "$@"
  unset PYTORCH_NO_CUDA_MEMORY_CACHING
  check "$tool" tests/gpu "$@"
done
exit "$status"
