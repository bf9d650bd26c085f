"""A few questions of the command that compares answers of vLLM with those of ``mmaccel eval``; the page has its counts."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="needs vLLM, see benchmarks/serving/environment.sh")

from serving import answers

pytestmark = pytest.mark.vllm


def test_answers_are_those_of_eval() -> None:
    lines = answers.compare("clips, mini-qwen-vl", 5)
    assert len(lines) == 2 + len(answers.RECIPES)
    assert [line.equal for line in lines] == [line.asked for line in lines], [line.differ for line in lines]
