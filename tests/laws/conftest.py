"""What the laws share beside their oracle."""

import pytest
import torch


@pytest.fixture
def no_gradients():
    """Inference only."""
    with torch.no_grad():
        yield
