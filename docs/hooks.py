"""How the files of this repository become pages of the docs site: mkdocs calls these functions.

Pages of docs/ are written for GitHub. The site has in addition README.md as its home page, the
files of benchmarks/results, and a page for each name of the reference.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent))

from pages import names_of

ROOT = Path(__file__).parents[1]
DOCS, RESULTS = ROOT / "docs", ROOT / "benchmarks" / "results"
PUBLISHED = (".png", ".svg", ".json")
"""Of the results, beside the pages: plots, and the measurements that the pages link to."""
MEMBERS = {
    "Window": "members: false",
    "ProcessGroupExchange": "members: false",
    "SoloExchange": "members: false",
    "AttentionPlan": "members: [rank, gathers]",
    "Case": "members: [inputs, expected, plan]",
    "DilatedKVCache": "members: [prefill, append, rewind, reset, select, reserve, advanced, nbytes,"
    " is_sharded, known_lengths]",
    "LongNet": "inherited_members: true",
}
"""Of classes not all of whose public methods are for users."""
PICTURE = re.compile(
    r'<picture>\s*<source [^>]*srcset="([^"]+)">\s*<img alt="([^"]*)" src="([^"]+)">\s*</picture>'
)
BADGES = re.compile(r"^\[!\[.*\n", re.MULTILINE)
CODE = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?![a-z]+:|#)([^)\s#]*)(#[^)\s]*)?\)")


def slug(heading: str, separator: str) -> str:
    """The anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", separator)


def page_of(module: str, name: str) -> str:
    """The page of a public name."""
    path = f"{module}.{name}".removeprefix("ring_dilated_attention.")
    return f"reference/{path}.md"


def place_of(path: Path) -> str | None:
    """Where the site has a file of the repository; None if it has it not."""
    if path == ROOT / "README.md":
        return "index.md"
    if path.is_relative_to(RESULTS):
        name = str(path.relative_to(RESULTS))
        return "results/index.md" if name == "README.md" else f"results/{name}"
    return str(path.relative_to(DOCS)) if path.is_relative_to(DOCS) else None


def for_the_site(page: str, path: Path, repository: str) -> str:
    """A page of the repository with the links and pictures that it has on the site.

    The palette of the site need not be the system's, so each picture is there for both.
    """
    page = PICTURE.sub(r"![\2](\3#only-light)\n![\2](\1#only-dark)", page)
    for module, name, row in list(names_of(page)):
        if path.parent.name == "reference":
            here = Path(page_of(module, name)).name
            page = page.replace(row[0], row[0].replace(f"]({row[2]})", f"]({here})"))
    page = BADGES.sub("", page)  # the site asks no other host for anything
    own = place_of(path)
    assert own, path

    def link(match: re.Match[str]) -> str:
        target, fragment = match[1], match[2] or ""
        if not target or (path.parent / own).name == target:
            return match[0]
        there = (path.parent / target).resolve()
        place = place_of(there)
        if place is None:
            kind = "tree" if there.is_dir() else "blob"
            return f"]({repository}/{kind}/main/{there.relative_to(ROOT)}{fragment})"
        return f"]({os.path.relpath(place, Path(own).parent)}{fragment})"

    blocks = [match[0] for match in CODE.finditer(page)]
    text = LINK.sub(link, CODE.sub("\0", page))
    return re.sub("\0", lambda _: blocks.pop(0), text)


def on_config(config: MkDocsConfig) -> None:
    """Fill the navigation with pages that are made, and give headings GitHub's anchors."""
    config.mdx_configs["toc"]["slugify"] = slug
    index = (RESULTS / "README.md").read_text(encoding="utf-8")
    results = re.findall(r"\]\((\w+\.md)\)", index)  # in its order; a page it lacks is a warning
    for entry in config.nav or []:
        for title, target in entry.items():
            if target == "results/":
                entry[title] = ["results/index.md", *(f"results/{name}" for name in results)]
            elif title == "Reference":
                entry[title] = [_with_names(x) for x in target]


def _with_names(entry: Any) -> Any:
    """An entry of the navigation, with the pages of the names that its page lists."""
    if isinstance(entry, str):
        return entry
    ((title, target),) = entry.items()
    named = names_of((DOCS / target).read_text(encoding="utf-8"))
    below = [{name: page_of(module, name)} for module, name, _ in named]
    return {title: [target, *below]} if below else entry


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/."""
    made = {place_of(path): path for path in [ROOT / "README.md", *sorted(RESULTS.iterdir())]}
    for name, path in made.items():
        if path.suffix == ".md":
            page = for_the_site(path.read_text(encoding="utf-8"), path, _repository(config))
            files.append(File.generated(config, str(name), content=page))
        elif path.suffix in PUBLISHED:
            files.append(File.generated(config, str(name), abs_src_path=str(path)))
    for page in sorted((DOCS / "reference").glob("*.md")):
        for module, name, row in names_of(page.read_text(encoding="utf-8")):
            source = (page.parent / row[2]).resolve().relative_to(ROOT)
            options = f"heading_level: 1, {MEMBERS.get(name, '')}".rstrip(", ")
            text = (
                f"::: {module}.{name}\n    options: {{{options}}}\n\n"
                f"[Source]({_repository(config)}/blob/main/{source})\n"
            )
            files.append(File.generated(config, page_of(module, name), content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: MkDocsConfig, **kwargs: Any) -> str:
    """Turn what GitHub shows into what the site shows, where the page is in docs/."""
    path = DOCS / page.file.src_uri
    return for_the_site(markdown, path, _repository(config)) if path.exists() else markdown


def on_page_content(html: str, page: Any, **kwargs: Any) -> str:
    """Leave the messages of the page of errors out of the navigation: they are sentences."""
    if page.file.src_uri == "troubleshooting.md":
        for title in page.toc:
            for section in title.children:
                section.children = []
    return html


def on_post_page(output: str, **kwargs: Any) -> str:
    """Leave out what asks GitHub's API for stars and a release: the site asks no other host."""
    return output.replace(' data-md-component="source"', "")


def _repository(config: MkDocsConfig) -> str:
    return str(config.repo_url).rstrip("/")


def on_serve(server: Any, **kwargs: Any) -> Any:
    """Build again when the README, results or docstrings change."""
    for path in (RESULTS, ROOT / "README.md", ROOT / "src"):
        server.watch(str(path))
    return server
