"""The conformance kit, on a small model of each architecture."""

from mrv2.testing import AdapterConformance


class TestLlama(AdapterConformance):
    adapter = "llama"
