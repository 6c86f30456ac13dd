# Sourced from the tree's root on a machine without a network: installs what was brought along of vLLM, of what it needs
# and of this tree (`python tests/gpu/bundle.py --out .gpu-bundle-vllm-ours`) into a folder, and sets the environment.
# Parts may come one by one; each is installed when it is there and new.
#   PARTS: folders of wheels and of archives of a site-packages folder; SITE: where to install; PYTHON: interpreter
python=${PYTHON:-python3}
SITE=${SITE:-/tmp/vllm-site}
mkdir -p "$SITE"
install_part() {
  for archive in "$1"/*.tar.xz; do
    [ ! -e "$archive" ] || tar -xJf "$archive" -C "$SITE" || return 1
  done
  ls "$1"/*.whl > /dev/null 2>&1 || return 0
  "$python" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$SITE" "$1"/*.whl
}
for part in ${PARTS:-.gpu-bundle-vllm-*}; do
  [ -d "$part" ] || continue
  sum=$(cat "$part"/* | cksum)
  marker="$SITE/.installed$(basename "$part")"
  if [ "$sum" = "$(cat "$marker" 2>/dev/null)" ]; then
    continue
  elif install_part "$part"; then
    echo "$sum" > "$marker"
  else
    echo "$part can't be installed" >&2
  fi
done
timeout 100 "$python" -m compileall -q -j 0 "$SITE" > /dev/null 2>&1 || true # else each process does it
du -sh "$SITE" | sed 's/^/installed: /'
# The tree's core comes first; the installed one gives its entry points.
export PYTHONPATH="$PWD/core:$SITE${PYTHONPATH:+:$PYTHONPATH}"
export MRV2_CACHE="${MRV2_CACHE:-$SITE/cache}" HF_HUB_OFFLINE=1
