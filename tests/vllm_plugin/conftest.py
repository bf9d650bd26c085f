"""Tests of the plug-in for vLLM; they want the environment that ``benchmarks/serving/environment.sh`` makes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import second_runner

# before vLLM is imported: one process, one thread, a small cache, nothing asked of anybody
os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL="WARNING",
    HF_HUB_OFFLINE="1",
)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--second-runner"):
        second_runner.choose()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the tiny models are saved."""
    return tmp_path_factory.mktemp("models")
