"""The conformance kit; `test_recurrent.py` goes further into what is peculiar to states."""

from mrv2.testing import AdapterConformance


class TestRecurrent(AdapterConformance):
    adapter = ".."
