"""Run a notebook and keep what it shows: printed text, and figures as PNG.

    .venv/bin/python docs/notebook.py             # run examples/understand.ipynb, write its outputs
    .venv/bin/python docs/notebook.py --check     # exit code 1 if its text is another one today

A stand-in for nbclient: code cells run in order in one namespace, without a kernel.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

NOTEBOOK = Path(__file__).parents[1] / "examples" / "understand.ipynb"


def outputs_of(code: str, namespace: dict[str, Any]) -> list[dict[str, Any]]:
    """What a code cell prints and draws, as a notebook keeps it."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "<cell>", "exec"), namespace)
    outputs: list[dict[str, Any]] = []
    if text := printed.getvalue():
        lines = text.splitlines(keepends=True)
        outputs.append({"name": "stdout", "output_type": "stream", "text": lines})
    for number in plt.get_fignums():
        png = io.BytesIO()
        figure = plt.figure(number)
        figure.savefig(png, format="png", dpi=80, bbox_inches="tight", metadata={"Software": None})
        plt.close(figure)
        data = {"image/png": base64.b64encode(png.getvalue()).decode() + "\n"}
        outputs.append({"data": data, "metadata": {}, "output_type": "display_data"})
    return outputs


def text_of(outputs: list[dict[str, Any]]) -> tuple[str, int]:
    """The printed text of a cell, and how many figures it has: PNGs differ between machines."""
    text = "".join("".join(x["text"]) for x in outputs if x["output_type"] == "stream")
    return text, sum(x["output_type"] == "display_data" for x in outputs)


def main() -> None:
    """Run the notebook, and write its outputs or compare them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("notebook", type=Path, nargs="?", default=NOTEBOOK)
    parser.add_argument("--check", action="store_true", help="write nothing, compare the text")
    args = parser.parse_args()
    notebook = json.loads(args.notebook.read_text(encoding="utf-8"))
    namespace: dict[str, Any] = {"__name__": "__main__"}
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(cells, 1):
        found = outputs_of("".join(cell["source"]), namespace)
        if args.check and text_of(found) != text_of(cell["outputs"]):
            expected = text_of(cell["outputs"])
            sys.exit(f"cell {number} shows {text_of(found)}, and the notebook has {expected}")
        cell.update(outputs=found, execution_count=number)
    if not args.check:
        args.notebook.write_text(json.dumps(notebook, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
