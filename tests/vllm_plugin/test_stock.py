"""vLLM as it is answers as transformers does: what is measured against, and the harness itself."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm.config")

import tiny

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("family", ["qwen3_vl", "llava_next", "llava_onevision", "internvl"])
def test_stock_vllm_answers_as_transformers(family: str, models: Path) -> None:
    with tiny.engine(tiny.folder(family, models)) as llm:
        for kind in tiny.kinds(family):
            rows = tiny.rows(family, kind)
            assert tiny.served(llm, family, rows) == tiny.expected(family, rows), kind
