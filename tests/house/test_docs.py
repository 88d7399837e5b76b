"""The docs say what the sources say: names, messages, and code that runs."""

import ast
import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import typer

import ring_dilated_attention
import ring_dilated_attention.nn
from ring_dilated_attention.cli import app

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"
sys.path.insert(0, str(DOCS))
pages: Any = importlib.import_module("pages")  # docs/pages.py
PAGES = [README, *sorted(DOCS.rglob("*.md"))]
SOURCES = ROOT / "src" / "ring_dilated_attention"
GAP = "…"


def defined_in(module):
    """The public names of a module, which is not imported: it may need another library."""
    tree = ast.parse((SOURCES / f"{module.replace('.', '/')}.py").read_text())
    assigned = [node for node in tree.body if isinstance(node, ast.Assign)]
    (names,) = (n.value for n in assigned if ast.unparse(n.targets[0]) == "__all__")
    return ast.literal_eval(names)


PUBLIC = [
    *(f"ring_dilated_attention.{name}" for name in ring_dilated_attention.__all__),
    *(f"ring_dilated_attention.nn.{name}" for name in ring_dilated_attention.nn.__all__),
    *(
        f"ring_dilated_attention.integrations.{module}.{name}"
        for module in (
            "context_parallel",
            "gigapath",
            "slide_files",
            "tensor_parallel",
            "torchscale",
            "torchtitan",
            "transformers",
        )
        for name in defined_in(f"integrations.{module}")
    ),
]
ALIASES = {"hilbert_order": "nn", "keep_attention": "nn"}
"""Names of the package that are documented where they are defined."""


def test_the_reference_has_every_public_name():
    texts = [page.read_text() for page in (DOCS / "reference").glob("*.md")]
    documented = {f"{module}.{name}" for text in texts for module, name, _ in pages.names_of(text)}
    wanted = {
        name.replace("attention.", f"attention.{ALIASES[last]}.", 1)
        if (last := name.rpartition(".")[2]) in ALIASES and ".nn." not in name
        else name
        for name in PUBLIC
    }
    assert wanted <= documented, wanted - documented


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_repeat_the_sources_as_they_are(page):
    """Else run docs/pages.py: code of examples, the version, first lines of docstrings, options."""
    assert pages.as_it_should_be(page) == page.read_text()


def test_code_that_differs_from_its_example_is_found():
    text = (DOCS / "start.md").read_text()
    assert len(pages.BLOCK.findall(text)) == 1
    assert pages.with_code(text.replace("dist.get_rank()", "0")) == text
    with pytest.raises(ValueError, match="unpack"):
        pages.with_code(text.replace("several_gpus.py: layout", "several_gpus.py: layouts"))


ONLY_ON_THE_SITE = re.compile(
    r"^(?:--8<--|!!! |\?\?\?|=== |::: |:   |\[TOC\]|> \[!)|\{ ?[:.#][\w-]+|#only-(?:light|dark)"
    r"|^!\[.*-(?:light|dark)\.svg",
    re.MULTILINE,
)
"""Snippets, admonitions, tabs, generated parts, definitions, attributes: text on GitHub or on the
site, and code on the other; a figure of one palette, which needs a <picture>."""


def without_code(text):
    text = re.sub(r"^( *)```.*?^\1```$", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]*`", "CODE", re.sub(r"<!--.*?-->", "", text))


LIST_IN_TEXT = re.compile(r"^[^\s\-*#|>\d<`].*\n[-*] .*|[.:] - \*\*.*", re.MULTILINE)
"""A list without an empty line before it: a list on GitHub alone."""


def test_pages_have_no_markup_that_only_one_of_github_and_the_site_shows():
    for text in (
        '!!! note "A"',
        '=== "A"',
        "::: a.b",
        "term\n:   text",
        "![a](a.svg#only-light)",
        "![a](a-light.svg)",
    ):
        assert ONLY_ON_THE_SITE.search(text)
    assert LIST_IN_TEXT.search("A list:\n- a")
    for page in PAGES:
        text = without_code(page.read_text())
        assert not ONLY_ON_THE_SITE.findall(text) + LIST_IN_TEXT.findall(text), page.name


def sentences(text):
    """Numbers of words of the sentences of a page; tables, headings and code are left out."""
    text = re.sub(r"^ {4}(?! *[-*\d]).*$", "", without_code(text), flags=re.MULTILINE)
    text = re.sub(r"^ *(?:\||#|!\[|</?picture|<source|<img).*$", "\n", text, flags=re.MULTILINE)
    text = re.sub(r"\]\([^)]*\)", "]", re.sub(r"^> ?", "", text, flags=re.MULTILINE))
    text = text.replace("et al.", "et al")
    blocks = re.split(r"\n\s*\n|^ *(?:[-*]|\d+\.) ", text, flags=re.MULTILINE)
    found = [x for block in blocks for x in re.split(r"(?<=[.!?])[)*]*\s", block)]
    return [count for x in found if (count := len(re.findall(r"\w[\w'.,/·×-]*", x)))]


MOST_WORDS, MOST_PER_SENTENCE, LONGEST = 3_300, 22, 40


def test_sentences_are_counted():
    assert sentences("One two. Three `four five` six!\n\n- seven\n- eight\n  nine") == [2, 3, 1, 2]
    assert sentences("# No\n\n| no |\n\n```\nno\n```\n\n    no\n\nYes, [it](no) is.\n") == [3]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_are_short_and_so_are_their_sentences(page):
    text = page.read_text()
    assert len(without_code(text).split()) <= MOST_WORDS
    counts = sentences(text)
    assert sum(counts) <= MOST_PER_SENTENCE * len(counts)
    assert max(counts, default=0) <= LONGEST
    if page == README:
        assert text.count("\n") <= 150


def templates():
    """Every text in the sources, with gaps for what is put in."""
    for path in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
            elif isinstance(node, ast.JoinedStr):
                yield "".join(
                    str(part.value) if isinstance(part, ast.Constant) else GAP
                    for part in node.values
                )


TEMPLATES = list(templates())
MESSAGES = re.findall(r"^### `(.+)`$", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)


def has(template, message):
    """Whether the parts of a message stand in a text, in their order."""
    place = 0
    for part in message.split(GAP):
        found = template.find(part, place)
        if found < 0:
            return False
        place = found + len(part)
    return True


def test_messages_are_those_of_the_sources():
    assert len(MESSAGES) > 40
    wrong = "pass lengths or key_padding_mask, never both"  # one that was changed is found
    found = [x for x in (*MESSAGES, wrong) if not any(has(text, x) for text in TEMPLATES)]
    assert found == [wrong]


NEEDS = "cuda", "dist.", "distributed_config", "init_process_group", "gigapath", "model.pt2"
"""Code that a CPU process by itself cannot run, or that has a test of its own."""
PYTHON, FLAGS = r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL
BLOCKS = [
    pytest.param(code, id=f"{page.relative_to(ROOT)}-{index}")
    for page in PAGES
    for index, code in enumerate(re.findall(PYTHON, pages.BLOCK.sub("", page.read_text()), FLAGS))
    if not any(need in code for need in NEEDS)
]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of the compiler
@pytest.mark.parametrize("code", BLOCKS)
def test_code_in_pages_runs(code, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    code = code.replace("fullgraph=True", "fullgraph=True, backend='aot_eager'")  # no C++ compiler
    exec(compile(code, "<docs>", "exec"), {})


def test_an_exported_model_is_loaded_by_another_program(tmp_path, monkeypatch):
    page = (DOCS / "how-to" / "torch-compile.md").read_text()
    save, load = (code for code in re.findall(PYTHON, page, FLAGS) if "model.pt2" in code)
    assert "attention.torch_op" in load  # without which torch finds no such operator
    monkeypatch.chdir(tmp_path)
    exec(compile(save, "<docs>", "exec"), {})
    done = subprocess.run([sys.executable, "-c", load], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "torch.Size([1, 1537, 8, 64])\n"


OTHERS = [ROOT / "CONTRIBUTING.md", *sorted((ROOT / "benchmarks").rglob("*.md"))]
COMMANDS = [
    pytest.param(shlex.split(line, comments=True), id=f"{page.relative_to(ROOT)}-{index}")
    for page in [*PAGES, *OTHERS]
    for index, line in enumerate(
        re.findall(
            r"^(?:\$ | {4})?(?:\.venv/bin/)?(rda [a-z]+(?: .*)?)$",
            page.read_text().replace("\\\n", " "),  # a line that goes on
            re.MULTILINE,
        )
    )
]


@pytest.mark.parametrize("words", COMMANDS)
def test_commands_in_pages_are_understood(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    root: Any = typer.main.get_command(app)
    context = root.make_context("rda", ["--help"], resilient_parsing=True)
    command = root.get_command(context, words[1])
    assert command is not None, f"there is no rda {words[1]}"
    command.make_context(words[1], words[2:], parent=context)  # raises what it does not allow


def test_the_site_builds_without_a_warning(tmp_path):
    # With --quiet mkdocs counts no warnings, and --strict lets everything pass.
    (line,) = re.findall(r"mkdocs build.*", (ROOT / "Makefile").read_text())
    assert "--strict" in line
    assert "--quiet" not in line
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    broken = []
    texts = {path: path.read_text() for path in tmp_path.rglob("*.html") if path.name != "404.html"}
    anchors = {path: set(re.findall(r'\bid="([^"]+)"', text)) for path, text in texts.items()}
    for path, text in texts.items():
        for link in re.findall(r'\b(?:href|src)="([^"]+)"', text):
            target, _, fragment = link.partition("#")
            if re.match(r"[a-z]+:", link):
                continue
            there = (path.parent / unquote(target)).resolve() if target else path
            is_page = fragment and there in anchors
            if not there.exists() or (is_page and unquote(fragment) not in anchors[there]):
                broken.append(f"{path.relative_to(tmp_path)}: {link}")
    assert len(texts) > 120
    # Material's script asks api.github.com for the stars of what is marked so.
    assert not [path.name for path, text in texts.items() if 'component="source"' in text]
    assert not broken, "\n".join(sorted(broken)[:30])
    assert "rda slides" in texts[tmp_path / "reference" / "cli.html"]
    assert "window" in texts[tmp_path / "reference" / "DilatedPattern.html"]


TOLD = {
    "migrating.md": ('with np.printoptions(legacy="1.25"):', "cannot import name 'LongNetConfig'"),
    "tutorials/gigapath.md": ('with np.printoptions(legacy="1.25"):', "'torchscale.model'`"),
    "tutorials/torchtitan.md": ("$ pip install", "main branch of 2026-08-21"),
    "how-to/data-parallel.md": ("`SFTTrainer` works on one process", "without it, silently"),
    "how-to/faults.md": (
        "**A forward call that one rank left out** is found at the next call that",
    ),
}


def test_pages_tell_what_a_reader_would_run_into():
    for page, told in TOLD.items():
        text = (DOCS / page).read_text()
        assert all(sentence in text for sentence in told), page


def test_numbers_of_longnets_pattern_stand_beside_what_it_cannot_do():
    texts = [page.read_text() for page in (*PAGES, *RESULTS.glob("*.md"))]
    small_cache = [text for text in texts if "11,606" in text]
    assert len(small_cache) > 4
    assert all("closed in blocks of 32,768" in page for page in small_cache)


NOTEBOOK = ROOT / "examples" / "understand.ipynb"


@pytest.mark.slow
def test_the_notebook_shows_what_it_computes(tmp_path):
    """Its text is compared, and the number of its figures. Else run docs/notebook.py."""

    def run(path):
        command = [sys.executable, str(DOCS / "notebook.py"), str(path), "--check"]
        return subprocess.run(command, capture_output=True, text=True, timeout=200).stderr

    assert NOTEBOOK.stat().st_size < 400_000
    assert run(NOTEBOOK) == ""
    text = NOTEBOOK.read_text()
    assert {"stream", "display_data"} == set(re.findall(r'"output_type": "(\w+)"', text))
    assert all((NOTEBOOK.parent / link).exists() for link in re.findall(r"\]\(([^)#]+)", text))

    other = tmp_path / "other.ipynb"
    other.write_text(text.replace("(None, 4)]", "(None, 2)]", 1))
    assert "cell 2 shows" in run(other)
