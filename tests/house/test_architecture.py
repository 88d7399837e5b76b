"""The rules of the house: who may import what, by which door, and that only torch is needed."""

import ast
import subprocess
import sys
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

import ring_dilated_attention

ROOT = Path(ring_dilated_attention.__file__).parent
REPOSITORY = Path(__file__).parents[2]
ORDER = [
    "units", "pattern", "named_patterns", "balance", "documents", "layout", "plan", "choice",
    "draw", "kernels", "tiles", "exchange", "options", "parallel", "engine", "resolve", "torch_op",
    "functional", "decode", "nn",
    "integrations", "checks", "bench", "cli",
]  # fmt: skip
"""Rooms, and files of the root: each may import those before it, and rooms by their doors."""
INTEGERS_ONLY = {"pattern", "named_patterns", "balance", "plan", "units"}
"""And layout and documents, but for what takes tensors."""
MAY_USE_DISTRIBUTED = {
    *("exchange", "parallel", "cli", "bench", "checks"),
    *("integrations.context_parallel", "integrations.tensor_parallel"),
}


@cache
def syntax(path):
    return ast.parse(path.read_text())


MODULES = {
    ".".join(parts[:-1] if parts[-1] == "__init__" else parts): path
    for path in sorted(ROOT.rglob("*.py"))
    for parts in [path.relative_to(ROOT).with_suffix("").parts]
}
ROOMS = {name.split(".")[0] for name in MODULES if "." in name}
OUTSIDE = [
    path
    for folder in ("tests", "benchmarks", "examples", "docs")
    for path in sorted((REPOSITORY / folder).rglob("*.py"))
    if path != Path(__file__)
]


@cache
def imports(path, name):
    """(absolute module, where) of every import of a file, those under TYPE_CHECKING included."""
    package = name.split(".") if path.name == "__init__.py" and name else name.split(".")[:-1]
    found = []
    for node in ast.walk(syntax(path)):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            prefix = ["ring_dilated_attention"] * bool(node.level) + base
            module = ".".join([*prefix, *(node.module or "").split(".")]).strip(".")
            modules = [module, *(f"{module}.{alias.name}" for alias in node.names)]
        else:
            continue
        found += [(module, f"{path.name}:{node.lineno} imports {module}") for module in modules]
    return found


def own_imports(path, name):
    """(module of this package, where) of every import of one."""
    for module, where in imports(path, name):
        target = module.removeprefix("ring_dilated_attention").removeprefix(".")
        if module != target and target in MODULES and target not in ("", name):
            yield target, where


@cache
def offered(room):
    """What the door of a room names."""
    (names,) = (
        ast.literal_eval(node.value)
        for node in syntax(ROOT / room / "__init__.py").body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    return names


def test_imports_point_one_way():
    for name, path in MODULES.items():
        room = name.split(".")[0]
        if not name:
            continue  # the package itself offers what the modules define
        assert room in ORDER, f"{room} is not in ORDER: say where it belongs"
        for target, where in own_imports(path, name):
            assert ORDER.index(target.split(".")[0]) <= ORDER.index(room), where


def test_no_cycle():
    """Of modules of one room; between rooms there is none, since imports point one way."""
    arrows = {
        name: {
            target
            for target, _ in own_imports(path, name)
            if "." in target and target.split(".")[0] == name.split(".")[0]
        }
        for name, path in MODULES.items()
    }
    while arrows:
        free = {name for name, targets in arrows.items() if not targets & arrows.keys()}
        assert free, f"these import each other: {sorted(arrows)}"
        arrows = {name: targets for name, targets in arrows.items() if name not in free}


def test_rooms_are_entered_by_their_doors():
    for name, path in MODULES.items():
        for target, where in own_imports(path, name):
            room, _, inner = target.partition(".")
            # A module of integrations/ is a door of its own: it needs what it integrates with.
            is_door = room in (name.split(".")[0], "integrations") or not inner
            assert is_door or inner in offered(room), where


def named_modules(path):
    """(module, where) of each module of this package that a program imports, or names to patch."""
    yield from own_imports(path, f"{path.parent.name}.{path.stem}")
    for node in ast.walk(syntax(path)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("setattr"):
            text = node.args[0].value if isinstance(node.args[0], ast.Constant) else ""
            target = str(text).removeprefix("ring_dilated_attention.").rpartition(".")[0]
            if target in MODULES:
                yield target, f"{path.name}:{node.lineno} patches {target}"


def test_others_enter_by_doors():
    """A test or a helper of tests may know the inside of one room; benchmarks and examples none."""
    for path in OUTSIDE:
        inside = {}
        for target, where in named_modules(path):
            room, _, inner = target.partition(".")
            if inner and room != "integrations" and inner not in offered(room):
                inside[room] = where
        allowed = 1 if path.is_relative_to(REPOSITORY / "tests") else 0
        assert len(inside) <= allowed, list(inside.values())


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def private_names():
    """Of functions, classes, variables and attributes of the package."""
    for path in MODULES.values():
        for node in ast.walk(syntax(path)):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                yield node.name
            elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
                yield node.id if isinstance(node, ast.Name) else node.attr


def test_others_use_no_private_names():
    private = {name for name in private_names() if is_private(name)}
    for path in OUTSIDE:
        for node in ast.walk(syntax(path)):
            names: list[str] = []
            if isinstance(node, ast.ImportFrom) and "ring_dilated_attention" in (node.module or ""):
                names = [alias.name for alias in node.names if is_private(alias.name)]
            elif isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("self", "cls"):
                names = [node.attr]
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("attr"):
                texts = [x.value for x in node.args if isinstance(x, ast.Constant)]
                names = [text.rpartition(".")[2] for text in texts if isinstance(text, str)]
            found = private.intersection(names)
            assert not found, f"{path.name} uses {found}: {ast.unparse(node)}"


def test_plans_are_integers_and_distributed_stays_at_the_edge():
    for name, path in MODULES.items():
        top = name.split(".")[0]
        for module, where in imports(path, name):
            if top in INTEGERS_ONLY:
                assert module.split(".")[0] != "torch", where
            if module.split(".")[0] == "pickle":  # what ranks tell each other is JSON
                assert name == "checks.ranks", where
            if module.startswith("torch.distributed"):
                assert not {top, name}.isdisjoint(MAY_USE_DISTRIBUTED), where


def test_public_names_are_imported_lazily_and_all_there():
    """The table, ``__all__``, ``dir`` and what type checkers see name the same; all resolves."""
    tree = syntax(ROOT / "__init__.py")
    table = vars(ring_dilated_attention)["_FROM"]
    typed = {
        alias.name: node.module
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert typed == table
    assert sorted(typed) == sorted(ring_dilated_attention.__all__)
    shown = [name for name in dir(ring_dilated_attention) if name != "__version__"]
    assert shown == sorted(typed)
    for name, module in table.items():
        defined = import_module(f"ring_dilated_attention.{module}")
        assert getattr(ring_dilated_attention, name) is getattr(defined, name)
    assert ring_dilated_attention.nn.LongNet.__name__ == "LongNet"
    with pytest.raises(AttributeError, match="has no attribute 'dilated_atention'"):
        _ = ring_dilated_attention.dilated_atention
    script = "import sys, ring_dilated_attention; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


IMPORTING = """
import os, sys
import torch, torch.distributed, torch.multiprocessing
torch_needs = set(sys.modules)

class Block:
    def find_spec(self, name, path=None, target=None):
        top = name.split(".")[0]
        if top in sys.stdlib_module_names or top in ("torch", "ring_dilated_attention"):
            return None
        if name in torch_needs or top in {m.split(".")[0] for m in torch_needs}:
            return None
        raise ImportError(f"importing {name}")

class Unread(dict):
    def __getattribute__(self, name):
        if name in ("__getitem__", "get", "items", "keys", "copy"):
            raise AssertionError("the environment was read")
        return dict.__getattribute__(self, name)

sys.meta_path.insert(0, Block())
from torch.distributed.device_mesh import DeviceMesh
real = os.environ
os.environ = Unread()
import ring_dilated_attention, ring_dilated_attention.nn
for name in ring_dilated_attention.__all__:
    getattr(ring_dilated_attention, name)
os.environ = real
import ring_dilated_attention.draw
assert not {"matplotlib", "rich"} & set(sys.modules)
assert not torch.distributed.is_initialized()
assert "triton" not in sys.modules or "triton" in torch_needs
print("imported")
"""


def test_importing_needs_only_torch():
    """Everything but torch and the standard library is blocked; the environment is not read."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORTING], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.strip() == "imported", done.stderr
