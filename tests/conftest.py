"""Shared by all tests: uninitialised memory, hypothesis, and the gpu marker."""

import pytest
import torch
from hypothesis import HealthCheck, settings

from ring_dilated_attention.testing import nan_in_uninitialized_memory

settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("default")


@pytest.fixture(autouse=True)
def _nan_in_uninitialized_memory():
    with nan_in_uninitialized_memory():
        yield


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
