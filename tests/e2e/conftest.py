"""Small models and a shared server for end-to-end tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from daemon_kit import Server, serving


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf: Path) -> Iterator[Server]:
    """SmolLM2 from its GGUF file in bf16 on three instances with a small pool."""
    with serving(
        *("--model", str(smollm2_gguf), "--served-model-name", "smollm2"),
        *("--kv-pool-tokens", "1200", "--prefill-tokens-per-instance", "128"),
        instances=3,
    ) as server:
        yield server
