"""Run the tests on several versions of torch and Python, and print the table of the results.

    make matrix                                            # the cells of CELLS, core tests
    python benchmarks/versions.py --cells 3.12:2.13.0 --tests tests

A cell is PYTHON:TORCH. Each gets an environment of its own, which is kept for the next time. Other
builds of torch than a local one bring several GB of CUDA packages. A Python that is not installed
is a row that says so.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
CELLS = ("3.10:2.8.0", "3.11:2.13.0", "3.13:2.15.0")
"""The oldest that is supported, the one that everything is developed on, the newest release."""
COUNTED = ("passed", "failed", "error", "skipped")


def environment(folder: Path, python: str, torch: str) -> Path | None:
    """The Python of an environment with this torch and the test dependencies; None: no such Python.

    torch comes first, so that nothing else picks another build of it.
    """
    found = shutil.which(f"python{python}")
    if found is None:
        return None
    place = folder / f"python{python}-torch{torch}"
    inside = place / "bin" / "python"
    ready = place / "ready"
    if not ready.exists():
        subprocess.run([found, "-m", "venv", "--clear", str(place)], check=True)
        pip = [str(inside), "-m", "pip", "install", "--quiet"]
        for packages in (["--upgrade", "pip"], [f"torch=={torch}"]):
            subprocess.run([*pip, *packages], check=True)
        subprocess.run([*pip, "--group", "test", "--editable", str(ROOT)], check=True, cwd=ROOT)
        ready.touch()
    return inside


def outcome(closing: str) -> dict[str, int]:
    """The counts of pytest's closing line."""
    return {
        name: int(found[1])
        for name in COUNTED
        if (found := re.search(rf"(\d+) {name}s?\b", closing)) is not None
    }


def row(python: str, torch: str, found: dict[str, int] | None) -> str:
    """A line of the table."""
    if found is None:
        cells = [f"not run: python{python} is not installed", "", ""]
    else:
        failed = found.get("failed", 0) + found.get("error", 0)
        cells = [str(found.get("passed", 0)), str(failed), str(found.get("skipped", 0))]
    return f"| {torch} | {python} | {' | '.join(cells)} |"


def main() -> None:
    """Run every cell; exit with 1 if a test failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cells", nargs="+", default=CELLS, metavar="PYTHON:TORCH")
    parser.add_argument("--tests", nargs="+", default=["tests"], help="files and folders of tests")
    parser.add_argument("--folder", type=Path, default=ROOT / ".venv-matrix")
    args = parser.parse_args()
    rows, bad = [], False
    for cell in args.cells:
        python, _, torch = cell.partition(":")
        if not torch:
            parser.error(f"a cell is PYTHON:TORCH, as in {CELLS[0]}; got {cell}")
        inside = environment(args.folder, python, torch)
        found = None
        if inside is not None:
            options = ["-q", "-p", "no:cacheprovider", "-m", "not gpu and not slow"]
            command = [str(inside), "-m", "pytest", *options, *args.tests]
            done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
            print(done.stdout[-3000:], file=sys.stderr)
            closing = (done.stdout.rstrip().splitlines() or [""])[-1]
            found = outcome(closing)
            bad |= done.returncode != 0
        rows.append(row(python, torch, found))
    print(
        "| torch | Python | passed | failed | skipped |", "|---|---|---|---|---|", *rows, sep="\n"
    )
    sys.exit(bad)


if __name__ == "__main__":
    main()
