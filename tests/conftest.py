"""Common to all tests. Imports nothing that imports Triton, except through `interpret_kernels`."""

from mrv2.testing import interpret_kernels

# Before any test module: without a GPU, check_kernel interprets Triton kernels in this process. Everything
# else goes on calling their torch twins, which are quick.
interpret_kernels()
