"""benchmarks/fuzz.py finds nothing, and would find what is wrong."""

import importlib.util
import sys
from pathlib import Path

import pytest

from ring_dilated_attention.engine import compute
from ring_dilated_attention.engine.blocks import Block

PATH = Path(__file__).parents[2] / "benchmarks" / "fuzz.py"


@pytest.fixture(scope="module")
def fuzz():
    spec = importlib.util.spec_from_file_location("fuzz", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["fuzz"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["fuzz"]


@pytest.mark.usefixtures("one_thread")
def test_a_few_calls_are_right(fuzz, capsys):
    assert fuzz.main(["--calls", "30", "--seed", "100000"]) == 0
    assert "30 calls: 0 wrong, 0 crashed" in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
def test_a_few_calls_are_right_on_cuda(fuzz, capsys):
    assert fuzz.main(["--calls", "60", "--seed", "200000", "--device", "cuda"]) == 0
    assert "60 calls: 0 wrong, 0 crashed" in capsys.readouterr().out


@pytest.mark.usefixtures("one_thread")
def test_what_is_wrong_or_crashes_is_found(fuzz, capsys, monkeypatch):
    place = Block.place_keys

    def strides_of_zero_are_taken_for_none(self, tensor, **options):
        found = place(self, tensor, **options)
        return found._replace(stride=tuple(x or tensor.stride(0) for x in found.stride))

    options = ["--calls", "20", "--backend", "eager"]
    with monkeypatch.context() as patch:
        patch.setattr(Block, "place_keys", strides_of_zero_are_taken_for_none)
        assert fuzz.main(options) == 1
        assert ": seed " in capsys.readouterr().out
    with monkeypatch.context() as patch:
        patch.setattr(compute, "forward", None)
        assert fuzz.main([*options, "--calls", "2"]) == 1
    with pytest.raises(SystemExit, match="no back end is left"):
        fuzz.main(["--backend", "fa4"])


def test_calls_are_drawn_again_from_their_seed(fuzz):
    among = fuzz.choices((1, 5), "cpu", ["auto", "eager"])
    drawn = [fuzz.draw(seed, among) for seed in range(50)]
    assert drawn == [fuzz.draw(seed, among) for seed in range(50)]
    assert {case.layout.world_size for case in drawn} == {1, 2, 3, 4, 5}
    assert {case.backend for case in drawn} == {"auto", "eager"}
