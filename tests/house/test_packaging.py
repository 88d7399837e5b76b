"""What is published with the code: one version, links that lead somewhere, pages of results."""

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from ring_dilated_attention import __version__

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
HOME = PROJECT["urls"]["Homepage"]
OWN_FILES = tuple(
    base.format(HOME.partition("//")[2])
    for base in (
        *("https://{}/blob/main/", "https://{}/tree/main/", "https://{}/raw/main/"),
        f"https://raw.githubusercontent.com/{HOME.partition('.com/')[2]}/main/",
    )
)
"""Absolute addresses of files of this repository: the README's, which is shown elsewhere too."""

FIRST_LINES = 15
"""Of a page of results: a table begins within them."""
MOST_WORDS = 5_000
"""Of all pages of results together: the rest is JSON."""
MOST_ROWS = 12
"""Of a table of results."""
MOST_LINES = 120
"""Of the changelog."""
COMMIT = re.compile(r"\b(?=[a-f]*\d)[0-9a-f]{7,40}\b")
MOST_BYTES = 500_000
"""Of a tracked file: what is larger does not belong into the repository."""
SHOWN_ELSEWHERE = re.compile(
    # Folders of one machine, then hosts of package registries. (Apart, not to be found here.)
    r"(?<![\w.])/(?:wo" + r"rk|ro" + r"ot|opt|home/\w+)/"
    r"|py" + r"pi\.org|python" + r"hosted|npm" + r"js\.org|deb" + r"ian\.org|whl/c(?:pu|u\d)"
)


@cache
def tracked() -> list[Path]:
    """The files that git knows."""
    try:
        found = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True
        )
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return [ROOT / name for name in found.stdout.split("\0") if name and (ROOT / name).exists()]


def pages() -> list[Path]:
    """Texts in Markdown, whose links must lead somewhere as GitHub shows them."""
    return [x for x in tracked() if x.suffix == ".md"]


def links(page: Path) -> list[str]:
    """Targets of a page's links and pictures; code is left out."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^ {4}.*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"`[^`\n]*`", "", text)
    inside = re.findall(r"\]\(\s*<?([^)\s>]+)", text)
    return inside + re.findall(r"(?:src|srcset|href)=\"([^\"\s]+)", text)


def prose(page: Path) -> str:
    """A page without code and without targets of links."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^ {4}.*$", "", text, flags=re.MULTILINE)
    return re.sub(r"`[^`\n]*`|\]\([^)]*\)|(?:src|srcset|href)=\"[^\"]*\"", "", text)


def rows_of_tables(text: str) -> list[int]:
    """How many rows each table has, without its head."""
    tables = re.findall(r"^\|.*\n\|[-:|]+\|\n((?:\|.*(?:\n|\Z))*)", text, flags=re.MULTILINE)
    return [len(rows.splitlines()) for rows in tables]


def anchors(page: Path) -> set[str]:
    """What the headings of a page are called in links."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ +(.*?) *$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", x.lower()).replace(" ", "-") for x in headings}


def target_of(link: str, page: Path) -> Path | None:
    """The file of this repository that a link means, None for one of elsewhere."""
    path = link.partition("#")[0]
    for base in OWN_FILES:
        if path.startswith(base):
            return ROOT / path.removeprefix(base)
    if re.match(r"[a-z]+:", path):
        return None
    return page if not path else page.parent / path


def targets_of_make() -> set[str]:
    return set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))


def made_in(text: str) -> set[str]:
    """Targets in lines that begin with make, or that a workflow runs."""
    lines = re.findall(r"^(?: {4}| *- run: )make((?: [\w.=]+)+)", text, flags=re.MULTILINE)
    return {x for line in lines for x in line.split() if "=" not in x}


def test_one_version():
    citation = (ROOT / "CITATION.cff").read_text()
    newest = re.search(r"^## (\d\S*) \(([\d-]+)\)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert newest, "CHANGELOG.md has no heading such as `## 1.2.3 (2026-01-31)`"
    assert f"\nversion: {__version__}\n" in citation
    assert newest[1] == __version__
    assert f"\ndate-released: {newest[2]}\n" in citation


def test_all_means_all_extras():
    extras = PROJECT["optional-dependencies"]
    named = {x for line in extras["all"] for x in re.findall(r"\[([\w,-]+)\]", line)}
    assert {x for names in named for x in names.split(",")} == set(extras) - {"all"}


def test_workflow_runs_what_is_claimed():
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    claimed = [x.rpartition(" ")[2] for x in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", x)]
    tested = re.search(r"python-version: \[(.*)\]", workflow)
    assert tested
    assert re.findall(r"[\d.]+", tested[1]) == claimed
    assert PROJECT["requires-python"] == f">={claimed[0]}"
    assert {"lint", "lines", "test", "docs", "build"} == made_in(workflow) <= targets_of_make()


def test_the_site_is_published_where_its_pages_say():
    workflow = (ROOT / ".github" / "workflows" / "docs.yml").read_text()
    config = (ROOT / "mkdocs.yml").read_text()
    assert made_in(workflow) == {"docs"}
    assert re.findall(r"^repo_url: (\S+)$", config, re.M) == [HOME]
    assert f"git clone {HOME}\n" in (ROOT / "README.md").read_text()
    (site,) = re.findall(r"^site_url: (\S+)$", config, re.M)
    for text in (workflow, (ROOT / "README.md").read_text()):
        assert site in text
    assert PROJECT["urls"]["Documentation"] == site


def test_no_broken_links():
    broken = []
    for page in pages():
        for link in links(page):
            target = target_of(link, page)
            if target is None:
                continue
            fragment = link.partition("#")[2]
            if not target.exists():
                broken.append(f"{page.relative_to(ROOT)}: {link}: no such file")
            elif fragment and target.suffix == ".md" and fragment not in anchors(target):
                broken.append(f"{page.relative_to(ROOT)}: {link}: no such heading")
    assert not broken, "\n".join(broken)


def results_pages() -> list[Path]:
    return sorted(x for x in RESULTS.glob("*.md") if x.name != "README.md")


@pytest.mark.parametrize("page", results_pages(), ids=lambda page: page.stem)
def test_a_page_of_results(page):
    """Named by its theme; a table first; how to reproduce it; in the index."""
    text = page.read_text()
    lines = text.splitlines()
    assert re.fullmatch(r"[a-z_]+", page.stem)
    assert lines[0].startswith("# ")
    assert any(re.fullmatch(r"\|(-+\|)+", x) for x in lines[:FIRST_LINES])
    assert "\n## Reproduce\n" in text
    assert "\n## Not measured\n" in text
    assert re.search(r"\b20\d\d-\d\d-\d\d\b", text), "when"
    assert page.name in links(RESULTS / "README.md")


def test_results_are_short():
    pages = sorted(RESULTS.glob("*.md"))
    words = {page.name: len(page.read_text().split()) for page in pages}
    assert sum(words.values()) <= MOST_WORDS, words
    for page in results_pages():
        rows = rows_of_tables(page.read_text())
        assert rows, page.name
        assert max(rows) <= MOST_ROWS, (page.name, rows)


@pytest.mark.parametrize("page", ["README.md", "CHANGELOG.md", "benchmarks/results/*.md"])
def test_no_commits_in_prose(page):
    """Whoever reads has a version and a date."""
    found = [(x.name, y) for x in sorted(ROOT.glob(page)) for y in COMMIT.findall(prose(x))]
    assert not found


def test_changelog_is_short():
    assert len((ROOT / "CHANGELOG.md").read_text().splitlines()) <= MOST_LINES


def test_what_a_release_needs():
    files = {str(x.relative_to(ROOT)) for x in tracked()}
    forms = {f".github/ISSUE_TEMPLATE/{x}.yml" for x in ("bug", "feature")}
    wanted = {"SECURITY.md", "CODE_OF_CONDUCT.md", "src/ring_dilated_attention/py.typed"}
    assert wanted | forms <= files
    assert "rda doctor" in (ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.yml").read_text()
    assert "Typing :: Typed" in PROJECT["classifiers"]
    workflow = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    assert "uses: ./.github/workflows/ci.yml" in workflow
    assert "id-token: write" in workflow
    assert "workflow_call:" in (ROOT / ".github" / "workflows" / "ci.yml").read_text()


def test_every_file_of_results_is_linked():
    linked = {RESULTS / x.partition("#")[0] for page in results_pages() for x in links(page)}
    linked |= {RESULTS / x for x in links(RESULTS / "README.md")}
    files = {x for x in tracked() if x.parent == RESULTS and x.name != "README.md"}
    assert files <= linked, sorted(x.name for x in files - linked)


def test_nothing_of_one_machine():
    found = []
    for path in tracked():
        data = path.read_bytes()
        assert len(data) <= MOST_BYTES, f"{path.relative_to(ROOT)} has {len(data):,} bytes"
        if b"\0" in data:
            continue
        for number, line in enumerate(data.decode().splitlines(), 1):
            if match := SHOWN_ELSEWHERE.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {match[0]}")
    assert not found, "\n".join(found)


def names_in(path: Path) -> set[str]:
    """Functions and classes of a module, and Class.method."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = [x.name for x in node.body if isinstance(x, ast.FunctionDef)]
            found |= {f"{node.name}.{method}" for method in methods}
    return found


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/design.md"])
def test_files_and_targets_that_pages_name_are_there(page):
    """And functions, where a page names one behind the file: ``a/b.py`` (``function``..."""
    package = ROOT / "src" / "ring_dilated_attention"
    text = (ROOT / page).read_text()
    assert made_in(text) <= targets_of_make()
    for path, name in re.findall(r"`([\w/]+\.py)`(?: \(`([\w.]+)`)?", text):
        found = [base / path for base in (package, ROOT, ROOT / "tests") if (base / path).is_file()]
        assert found, path
        assert not name or name in names_in(found[0]), (path, name)


def test_scripts_named_in_pages_exist_and_take_their_options():
    wrong = []
    for page in pages():
        for line in page.read_text().splitlines():
            named = re.split(r"\b((?:benchmarks|tests)/\w+\.(?:py|sh))", line)
            for script, behind in zip(named[1::2], named[2::2], strict=True):
                rest = behind.partition("`")[0]
                if not (ROOT / script).exists():
                    wrong.append(f"{page.relative_to(ROOT)}: {script} does not exist")
                    continue
                code = (ROOT / script).read_text()
                if script.endswith(".sh") or not line.startswith("    "):
                    continue
                for option in re.findall(r" --([a-z][\w-]*)", rest.partition("#")[0]):
                    if f'"--{option}"' not in code and f"{option.replace('-', '_')}:" not in code:
                        wrong.append(f"{page.relative_to(ROOT)}: {script} has no --{option}")
    assert not wrong, "\n".join(wrong)
