"""One model over two processes: every rank keeps the same tokens, and the answers are those of one process."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM, see benchmarks/serving/environment.sh")

import tiny

pytestmark = pytest.mark.vllm

FAMILY = "qwen2_5_vl"


class Noting:
    """Becomes a part of vLLM's worker of each rank."""

    model_runner: Any

    def note(self) -> None:
        """Remember what stays of every picture from now on."""
        model = self.model_runner.get_model()
        embed, self.kept = model.embed_multimodal, []

        def noted(**kwargs: Any) -> Any:
            rows = embed(**kwargs)
            # the positions of the tokens that stay say which they are; their features, that they are the same bits
            self.kept += [hashlib.sha256(row.contiguous().numpy().tobytes()).hexdigest() for row in rows]
            return rows

        model.embed_multimodal = noted

    def noted(self) -> list[str]:
        """What :meth:`note` remembers."""
        return self.kept


@pytest.mark.parametrize("encoder", ["weights", "data"])
def test_every_rank_keeps_the_same_tokens(encoder: str, models: Path) -> None:
    """Heads of the tower spread over the ranks, and pictures spread over them."""
    rows = tiny.rows(FAMILY, "mixed")
    want = tiny.expected(FAMILY, rows, "divprune", retain=0.25)
    recipe = {"recipe": "divprune", "retain": 0.25, "numbering": "transformers"}
    parallel = {"tensor_parallel_size": 2, "mm_encoder_tp_mode": encoder, "distributed_executor_backend": "mp"}
    noting = {"worker_extension_cls": "test_parallel.Noting"}
    with tiny.engine(tiny.folder(FAMILY, models), recipe, **parallel, **noting) as llm:
        llm.collective_rpc("note")
        assert tiny.served(llm, FAMILY, rows) == want
        first, second = llm.collective_rpc("noted")
    assert first == second and len(first) == 2 * len(rows)
