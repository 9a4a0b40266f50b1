"""Without vLLM, these tests are skipped instead of failing on import."""

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")
