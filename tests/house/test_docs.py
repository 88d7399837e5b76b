"""The docs say what the sources say: names, messages, and code that runs."""

import ast
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

import ring_dilated_attention
import ring_dilated_attention.nn
from ring_dilated_attention.cli import app

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
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
    documented = {
        name
        for page in (DOCS / "reference").glob("*.md")
        for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)
    }
    wanted = {
        name.replace("attention.", f"attention.{ALIASES[last]}.", 1)
        if (last := name.rpartition(".")[2]) in ALIASES and ".nn." not in name
        else name
        for name in PUBLIC
    }
    assert wanted <= documented


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
MESSAGES = re.findall(r"^\*\*`(.+)`\*\*$", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)


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


NEEDS = (
    "cuda",
    "dist.",
    "distributed_config",
    "init_process_group",
    "gigapath",
    "--8<--",
    "model.pt2",
)
"""Code that a CPU process by itself cannot run, or that has a test of its own."""
PYTHON, FLAGS = r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL
BLOCKS = [
    pytest.param(code, id=f"{page.relative_to(ROOT)}-{index}")
    for page in PAGES
    for index, code in enumerate(re.findall(PYTHON, page.read_text(), FLAGS))
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
    assert (tmp_path / "reference" / "cli.html").exists()


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
    for page, sentences in TOLD.items():
        text = (DOCS / page).read_text()
        assert all(sentence in text for sentence in sentences), page


def test_numbers_of_longnets_pattern_stand_beside_what_it_cannot_do():
    results = (ROOT / "benchmarks" / "results").glob("*.md")
    pages = [page.read_text() for page in (*PAGES, *results)]
    small_cache = [page for page in pages if "11,606" in page]
    assert len(small_cache) > 4
    assert all("closed in blocks of 32,768" in page for page in small_cache)
