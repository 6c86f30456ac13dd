"""Who compiles, and when: with a stand-in for what Triton does in a launch, since that needs a GPU."""

import subprocess
import sys

SCRIPT = '''
import inspect, threading
import triton
from triton.runtime._async_compile import active_mode

asked, finished, meet = [], [], threading.Barrier(2, timeout=20)

def run(self, key, *, grid, warmup):
    """What a launch does about its kernel: compile it, or have that done."""
    asked.append((key, warmup))
    mode = active_mode.get()
    if mode is None:
        return finished.append((key, "here"))
    def compile():
        if key == "bad":
            raise RuntimeError("bad")
        if key in ("a", "b"):
            meet.wait()  # only two at a time get past this
        return key
    def finish(kernel):
        finished.append((kernel, "thread"))
    rest = [lambda kernel: None] * (len(inspect.signature(mode.submit).parameters) - 3)
    kernel = mode.submit(key, compile, finish, *rest)
    return kernel if warmup else kernel.result()

triton.JITFunction.run = run
import os
os.sched_getaffinity = lambda _: range(2)  # whatever this machine has
from mrv2.kernels.compile_ahead import compiling_in_parallel, only_compiling
from mrv2.kernels.registry import Compiled, compile_mode, jit

@jit()
def kernel(x):
    pass

assert type(kernel) is Compiled
kernel[(1,)]("alone")
with compiling_in_parallel(), only_compiling():
    for key in ("a", "b", "bad"):
        kernel[(1,)](key)
    assert active_mode.get() is None  # a launch of anyone else's
assert sorted(finished[1:]) == [("a", "thread"), ("b", "thread")]  # all of them, and no error
with compiling_in_parallel(), compiling_in_parallel():
    kernel[(1,)]("now")
    assert finished[-1] == ("now", "thread")
    try:
        kernel[(1,)]("bad")
    except RuntimeError:
        print("an error of its launch")
try:
    with compiling_in_parallel(), only_compiling():
        kernel[(1,)]("left")
        raise KeyboardInterrupt
except KeyboardInterrupt:
    pass
assert compile_mode.get() is None
kernel[(1,)]("after")
assert finished[-1] == ("after", "here")
assert [warmup for _, warmup in asked] == [False, True, True, True, False, False, True, False]
print("done")
'''


def test_threads_compile_and_nothing_is_left_behind(monkeypatch, tmp_path):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    script = tmp_path / "script.py"  # Triton reads a kernel's source
    script.write_text(SCRIPT)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.splitlines() == ["an error of its launch", "done"], done.stderr
