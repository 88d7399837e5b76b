"""The figures of README and docs are there, small, and come from `make figures`."""

import importlib
from pathlib import Path
from xml.etree import ElementTree

import pytest

from ring_dilated_attention.draw import STYLES, save

ROOT = Path(__file__).parents[2]


@pytest.fixture
def figures(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("figures")


def test_figures_of_the_docs_are_there_in_both_styles_and_small(figures):
    wanted = {f"{name}-{style}.svg" for name in figures.FIGURES for style in STYLES}
    assert wanted == {path.name for path in figures.FOLDER.glob("*.svg")}
    for name in wanted:
        file = figures.FOLDER / name
        assert file.stat().st_size < 200_000
        assert ElementTree.parse(file).getroot().tag.endswith("svg")


@pytest.mark.parametrize("name", ["hero", "slide-step"])
def test_figures_of_the_docs_are_drawn_the_same_again(figures, name, tmp_path):
    save(figures.FIGURES[name](STYLES["light"]), tmp_path / "again.svg", transparent=True)
    again = (tmp_path / "again.svg").read_bytes()
    save(figures.FIGURES[name](STYLES["light"]), tmp_path / "more.svg", transparent=True)
    assert again == (tmp_path / "more.svg").read_bytes()
