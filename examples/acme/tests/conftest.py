"""Before Triton is imported: without a GPU, its interpreter runs the kernels that tests compare with their twins."""

import sys
from pathlib import Path

from mrv2.testing import interpret_kernels

interpret_kernels()

# Tests run from a clone as well, where the package isn't installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
