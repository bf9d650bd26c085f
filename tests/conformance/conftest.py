"""``pytest tests/conformance --golden DIR`` compares with the vectors below DIR, else with the few shipped here."""

from pathlib import Path

import pytest
import torch

SHIPPED = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--golden", type=Path, default=SHIPPED, help="folder of golden vectors (default: the shipped ones)"
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "vector" in metafunc.fixturenames:
        # when pytest starts above this folder, this file is read too late for its option to be parsed
        folder = metafunc.config.getoption("golden", default=SHIPPED)
        paths = sorted(folder.rglob("*.json"))
        metafunc.parametrize("vector", paths, ids=[str(path.relative_to(folder).with_suffix("")) for path in paths])


@pytest.fixture(autouse=True)
def one_thread():
    """The same sums on every machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
