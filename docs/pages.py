"""What pages repeat of the sources, so that GitHub shows it: code, version, reference.

    .venv/bin/python docs/pages.py        # write it anew, where the sources have changed

A comment above a block of code says where it is from, ``<!-- examples/slides.py: shard, step -->``:
the lines between ``# region shard`` and ``# endregion shard``, below the imports that they need;
without a region, the whole file. In docs/reference, the rows of a table below ``from MODULE import
...`` are a module's public names and the first lines of their docstrings; cli.md is made of the
commands. A test compares all of it.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

from cli_reference import cli_reference

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "ring_dilated_attention" / "__init__.py"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(
    r"^( *)<!-- (examples/[\w/]+\.\w+)(?:: ([\w, ]+))? -->\n\1```(\w+)\n(.*?)^\1```$", re.M | re.S
)
ROW = re.compile(r"^\| \[`(\w+)`\]\((\S+)\) \|.*\|$", re.M)
MODULE = re.compile(r"^`from (ring_dilated_attention[\w.]*) import \.\.\.`", re.M)


def code_of(path: str, regions: str | None) -> str:
    """The lines of an example, or of its regions, one below the other."""
    text = (ROOT / path).read_text(encoding="utf-8")
    if regions is None:
        return re.sub(r"^ *# (end)?region \w+\n", "", text, flags=re.M)
    parts = []
    for name in regions.split(", "):
        (part,) = re.findall(rf"^ *# region {name}\n(.*?)^ *# endregion {name}$", text, re.M | re.S)
        parts.append(textwrap.dedent(part).strip("\n") + "\n")
    is_defined = any(part.startswith(("def ", "class ", "@")) for part in parts)
    return ("\n\n" if is_defined else "").join(parts)


def imports_of(path: str, code: str) -> str:
    """The imports of an example that an excerpt needs."""
    used = {node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)}
    lines = []
    for node in ast.parse((ROOT / path).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            node.names = [x for x in node.names if (x.asname or x.name.partition(".")[0]) in used]
            line = ast.unparse(node) if node.names else ""
            if len(line) > 100:
                line = line.replace(" import ", " import (\n    ").replace(", ", ",\n    ") + ",\n)"
            lines += [line] * bool(line)
    lines += [""] * code.startswith(("def ", "class ", "@"))
    return "\n".join([*lines, "\n"]) if any(lines) else ""


def with_code(page: str) -> str:
    """A page with the code of examples as it is now; of excerpts, with what they import."""

    def block(match: re.Match[str]) -> str:
        indent, path, regions, language, _ = match.groups()
        name = f"{path}: {regions}" if regions else path
        code = code_of(path, regions)
        if regions and language == "python":
            code = imports_of(path, code) + code
        code = textwrap.indent(code, indent)
        return f"{indent}<!-- {name} -->\n{indent}```{language}\n{code}{indent}```"

    return BLOCK.sub(block, page)


def summary_of(path: Path, name: str) -> str:
    """The first sentence of a name's docstring; of a module, of its own."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = ast.get_docstring(tree) if path.stem == name else None
    for node, after in zip(tree.body, [*tree.body[1:], None], strict=True):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            found = ast.get_docstring(node)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(after, ast.Expr):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if ast.unparse(target) == name:
                found = ast.literal_eval(after.value)
    if not found:
        raise LookupError(f"{path.relative_to(ROOT)} has no docstring of {name}")
    first = " ".join(found.partition("\n\n")[0].split())
    return first.replace("``", "`").replace("|", "\\|")


def names_of(page: str) -> Iterator[tuple[str, str, re.Match[str]]]:
    """(module, name, row) of each row that names something public."""
    modules = list(MODULE.finditer(page))
    for row in ROW.finditer(page):
        above = [x[1] for x in modules if x.start() < row.start()]
        if above:
            yield above[-1], row[1], row


def with_names(page: str, folder: Path) -> str:
    """A page of the reference with the first line of each name's docstring."""
    for _, name, row in list(names_of(page)):
        summary = summary_of((folder / row[2]).resolve(), name)
        page = page.replace(row[0], f"| [`{name}`]({row[2]}) | {summary} |")
    return page


def as_it_should_be(path: Path) -> str:
    """The text of a page, made anew."""
    if path.name == "cli.md":
        return cli_reference()
    text = with_code(path.read_text(encoding="utf-8"))
    if path.name == "README.md":
        (version,) = re.findall(r'^__version__ = "(.*)"$', PACKAGE.read_text(), re.M)
        return re.sub(r"^Version \S+ ", f"Version {version} ", text, flags=re.M)
    return with_names(text, path.parent) if path.parent.name == "reference" else text


def main() -> None:
    """Write the pages whose sources have changed."""
    for path in PAGES:
        text = as_it_should_be(path)
        if text != path.read_text(encoding="utf-8"):
            path.write_text(text, encoding="utf-8")
            print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
