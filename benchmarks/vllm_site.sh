# Sourced from the tree's root on a machine without a network: installs what was brought along of vLLM and of this tree
# into a folder, and sets the environment. Parts come one by one, so each is installed when it is first there.
#   PARTS: folders of wheels and of archives of a site-packages folder; ours: wheels of `tests/gpu/bundle.py`
#   SITE: where to install, kept; PYTHON: interpreter
python=${PYTHON:-python3}
SITE=${SITE:-/tmp/vllm-site}
mkdir -p "$SITE"
install_wheels() {
  "$python" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$SITE" "$@"
}
install_part() {
  for archive in "$1"/*.tar.xz; do
    [ ! -e "$archive" ] || tar -xJf "$archive" -C "$SITE" || return 1
  done
  for wheel in "$1"/*.whl; do
    [ ! -e "$wheel" ] || { install_wheels "$1"/*.whl && break; } || return 1
  done
}
for part in ${PARTS:-.gpu-bundle-vllm-*}; do
  marker="$SITE/.installed$(basename "$part")"
  if [ ! -d "$part" ] || [ -e "$marker" ]; then
    continue
  elif install_part "$part"; then
    touch "$marker"
  else
    echo "$part can't be installed" >&2
  fi
done
# Of ours the entry points alone count, since the tree's core comes first; what else the bundle has, vLLM's parts have.
[ ! -d .gpu-bundle ] || install_wheels .gpu-bundle/mrv2*.whl || echo ".gpu-bundle can't be installed" >&2
timeout 100 "$python" -m compileall -q -j 0 "$SITE" > /dev/null 2>&1 || true # else each process does it
du -sh "$SITE" | sed 's/^/installed: /'
export PYTHONPATH="$PWD/core:$SITE${PYTHONPATH:+:$PYTHONPATH}"
export MRV2_CACHE="${MRV2_CACHE:-$SITE/cache}" HF_HUB_OFFLINE=1
