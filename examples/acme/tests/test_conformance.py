"""mrv2's conformance suites on this adapter. What is tested, `mrv2_test_target` says (`testing.py` of the package)."""

from mrv2.testing import AdapterConformance


class TestAcme(AdapterConformance):
    """Each check is a test, run at each level that this machine has."""

    adapter = ".."  # this project, installed or not
