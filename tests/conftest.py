"""Shared by all tests: memory of tensors, hypothesis, interpreted kernels, the gpu marker."""

import importlib.util
import os
from collections.abc import Iterator
from tempfile import gettempdir

import pytest
import torch
from hypothesis import HealthCheck, settings
from support.interpreted import quicken_the_interpreter
from support.preloaded import preload_what_tests_have_imported

from ring_dilated_attention.checks import nan_in_uninitialized_memory

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # others would import torch each
# What Inductor has compiled for AVX-512 it would take for AVX2, and compute nonsense.
_OF_CAPABILITY = f"torchinductor_{os.getuid()}_{torch.backends.cpu.get_cpu_capability()}"
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(gettempdir(), _OF_CAPABILITY))
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # each process would compile the package anew
os.environ.pop("COLUMNS", None)  # pytest-xdist sets it: commands would take 80 columns for asked

if not torch.cuda.is_available():  # before Triton is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")
    preload_what_tests_have_imported()  # imports that may touch a GPU are not for forks
    if importlib.util.find_spec("triton"):
        quicken_the_interpreter()

# Tensors are small: threads would spin until they get a core, which other workers of pytest have.
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of ranks and commands, too
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"].split(",")[0]))

settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("default")


@pytest.fixture(autouse=True)
def _nan_in_uninitialized_memory():
    with nan_in_uninitialized_memory():
        yield


@pytest.fixture(autouse=True)
def _give_gpu_memory_back(request):
    yield
    if "gpu" in request.keywords:
        torch.cuda.empty_cache()  # to the other workers, whose tests run on the same GPU


def _seconds_allowed(item):
    marker = item.get_closest_marker("timeout")
    return marker.args[0] if marker else 0


def pytest_collection_modifyitems(items):
    items.sort(key=_seconds_allowed, reverse=True)  # several workers: none has the longest left
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Threads that may have to wait for a processor do not shorten operations this small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
