"""Other releases of vLLM: their Python code over this one's compiled library (tools/vllm_overlay.py).

MRV2_VLLM_OVERLAYS names the folders, separated as in PATH. Without it, nothing runs here.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
OVERLAYS = [Path(p) for p in os.environ.get("MRV2_VLLM_OVERLAYS", "").split(os.pathsep) if p]

SMOKE = (
    f"{HERE}/test_parity.py::test_a_ragged_batch_and_prefix_hits[llama]",
    f"{HERE}/test_parity.py::test_a_ragged_batch_and_prefix_hits[qwen3]",
    f"{HERE}/test_parity.py::test_chunks_and_preemptions[llama]",
    f"{HERE}/test_extra_input.py::test_mixed_values_in_one_batch",
    f"{HERE}/test_recurrent.py::test_chunks_and_reused_slots[hybrid]",
    f"{HERE}/test_recurrent.py::test_prefix_hits[hybrid]",
    f"{HERE}/test_recurrent.py::test_prefix_hits[alike]",
    f"{HERE}/test_errors.py::test_this_vllm_is_listed",
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not OVERLAYS, reason="MRV2_VLLM_OVERLAYS names no folder"),
]


def run(overlay, *command):
    env = {k: v for k, v in os.environ.items() if k not in ("VLLM_CACHE_ROOT", "MRV2_VLLM_OVERLAYS")}
    paths = [str(overlay), *filter(None, [env.get("PYTHONPATH")])]
    return subprocess.run(
        [sys.executable, *command],
        env=env | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda p: p.name)
def test_a_smoke_of_the_suite_passes(overlay):
    done = run(overlay, "-c", "import vllm; print(vllm.__version__, vllm.__file__)")
    version, file = done.stdout.split()[-2:]
    assert Path(file).is_relative_to(overlay.resolve()), f"{overlay} isn't what is imported"
    done = run(overlay, "-m", "pytest", "-q", "-p", "no:cacheprovider", *SMOKE)
    assert done.returncode == 0, f"vLLM {version}:\n{done.stdout[-6000:]}"
    assert f"{len(SMOKE)} passed" in done.stdout, done.stdout[-2000:]
