"""Films that several tests read are made once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from films import KINDS, film


@pytest.fixture(scope="session")
def kind(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A film of :data:`films.KINDS` by its name."""
    folder = tmp_path_factory.mktemp("films")

    def made(name: str) -> Path:
        path = folder / name
        return path if path.exists() else film(path, **KINDS[name])

    return made
