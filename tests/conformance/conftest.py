"""``pytest tests/conformance --golden DIR`` compares with the vectors below DIR, else with the few shipped here."""

import pytest


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "vector" in metafunc.fixturenames:
        folder = metafunc.config.getoption("golden")
        paths = sorted(folder.rglob("*.json"))
        metafunc.parametrize("vector", paths, ids=[str(path.relative_to(folder).with_suffix("")) for path in paths])
