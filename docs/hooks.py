"""Pages of the docs site that are not written by hand: results, and the reference of `rda`.

mkdocs calls these functions (`hooks` in mkdocs.yml). Results are the files of benchmarks/results,
as they are; the reference of the command line is made of the commands themselves.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent))

from cli_reference import cli_reference

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PUBLISHED = (".png", ".svg", ".json")
"""Of the results, beside the pages: plots, and the measurements that the pages link to."""


def on_config(config: MkDocsConfig) -> None:
    """Replace the entry `results/` of the navigation by the pages that there are."""
    index = (RESULTS / "README.md").read_text(encoding="utf-8")
    pages = re.findall(r"\]\((\w+\.md)\)", index)  # in its order; a page it lacks is a warning
    for entry in config.nav or []:
        for title, target in entry.items():
            if target == "results/":
                entry[title] = ["results/index.md", *(f"results/{name}" for name in pages)]


def for_the_site(page: str) -> str:
    """A page of results with links as the site has them, and figures in both palettes.

    In the repository the pages show the figures of docs/assets for a light background.
    """
    page = page.replace("](../../docs/", "](../")
    light = re.compile(r"^(!\[.*\]\(.*)-light(\.svg)\)$", re.MULTILINE)
    return light.sub(r"\1-light\2#only-light)\n\1-dark\2#only-dark)", page)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made."""
    for path in sorted(RESULTS.iterdir()):
        if path.suffix == ".md":
            name = "index.md" if path.name == "README.md" else path.name
            page = for_the_site(path.read_text(encoding="utf-8"))
            files.append(File.generated(config, f"results/{name}", content=page))
        elif path.suffix in PUBLISHED:
            files.append(File.generated(config, f"results/{path.name}", abs_src_path=str(path)))
    files.append(File.generated(config, "reference/cli.md", content=cli_reference()))
    return files


def on_serve(server: Any, **kwargs: Any) -> Any:
    """Build again when results, examples or docstrings change."""
    for folder in (RESULTS, ROOT / "examples", ROOT / "src"):
        server.watch(str(folder))
    return server
