"""Lines and files of each room of the package: the table of `make lines`.

python tests/support/lines.py                  # as the checkout stands
python tests/support/lines.py --since REF      # and what changed since that commit
"""

import argparse
import subprocess
from collections import Counter
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).parents[2]
PACKAGE = "src/ring_dilated_attention"


class Size(NamedTuple):
    """Lines and files of a room."""

    lines: int = 0
    files: int = 0


def room_of(path: str) -> str:
    """The room of a Python file, given relative to the package: its folder, or "the root"."""
    room, slash, _ = path.partition("/")
    return room if slash else "the root"


def _sizes(texts: dict[str, str]) -> dict[str, Size]:
    lines: Counter[str] = Counter()
    files: Counter[str] = Counter()
    for path, text in texts.items():
        lines[room_of(path)] += text.count("\n")
        files[room_of(path)] += 1
    return {room: Size(lines[room], files[room]) for room in sorted(files)}


def sizes_now(folder: Path = REPOSITORY / PACKAGE) -> dict[str, Size]:
    """Lines and files of each room, in the order of their names."""
    return _sizes({str(p.relative_to(folder)): p.read_text() for p in folder.rglob("*.py")})


def sizes_at(commit: str) -> dict[str, Size]:
    """The same at a commit of this repository."""

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=REPOSITORY, check=True, capture_output=True, text=True
        ).stdout

    names = git("ls-tree", "-r", "--name-only", commit, f"{PACKAGE}/").split()
    names = [name for name in names if name.endswith(".py")]
    return _sizes({n.removeprefix(f"{PACKAGE}/"): git("show", f"{commit}:{n}") for n in names})


def total(sizes: dict[str, Size]) -> Size:
    """The sum over rooms."""
    return Size(sum(x.lines for x in sizes.values()), sum(x.files for x in sizes.values()))


def table(now: dict[str, Size], before: dict[str, Size] | None = None) -> str:
    """One line a room; with the sizes before, what changed."""
    rows = [f"{'room':12} {'lines':>7} {'files':>5}" + "  change" * (before is not None)]
    for room in [*sorted({*now, *(before or {})}), "sum"]:
        lines, files = total(now) if room == "sum" else now.get(room, Size())
        row = f"{room:12} {lines:7,} {files:5}"
        if before is not None:
            old = total(before) if room == "sum" else before.get(room, Size())
            row += f"  {lines - old.lines:+,} {files - old.files:+}"
        rows.append(row)
    return "\n".join(rows)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Lines and files of each room of the package.")
    parser.add_argument("--since", metavar="REF", help="also print what changed since this commit")
    since = parser.parse_args().since
    tests = sum(p.read_text().count("\n") for p in (REPOSITORY / "tests").rglob("*.py"))
    print(table(sizes_now(), sizes_at(since) if since else None))
    print(f"tests: {tests:,} lines")


if __name__ == "__main__":
    main()
