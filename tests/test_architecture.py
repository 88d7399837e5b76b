"""The rules of the house: who may import what, and that importing needs nothing but torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import ring_dilated_attention

ROOT = Path(ring_dilated_attention.__file__).parent
ORDER = [
    ["pattern", "view_kinds", "caches"],
    ["layout", "limits"],
    ["plan"],
    ["reference", "merge", "kernels"],
    ["accumulate", "device_tables"],
    ["tiles"],
    ["version", "calls", "cuda_driver", "derivatives"],
    ["waiter", "presence"],
    ["notices"],
    ["board", "collectives", "watch"],
    ["mapped_memory"],
    ["communicator", "peer_memory"],
    ["exchange"],
    ["loopback"],
    ["views", "packing", "agreement", "packed", "turns"],
    ["resolve", "transfer", "compute", "zero_keys"],
    ["flops"],
    ["ring"],
    ["operator"],
    ["functional", "checkpoint"],
    ["replicated", "detached", "spatial"],
    ["nn", "testing", "spot_check"],
    ["integrations"],
    ["verify", "train", "bench"],
    ["plan_command", "verify_command", "simulate"],
    ["simulate_command"],
    ["cli"],
]
LEVEL = {name: level for level, names in enumerate(ORDER) for name in names}
INTEGERS_ONLY = {"pattern", "plan"}  # and layout, but for its tensor helpers
MAY_USE_DISTRIBUTED = {
    *("collectives", "communicator", "exchange", "notices", "presence", "cli", "train", "testing"),
    *(f"bench.{name}" for name in ("ranks", "ranks_team", "ranks_launch", "ring_peers")),
}


def modules():
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        yield path, ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def level_name(name):
    while name not in LEVEL:
        assert "." in name, f"{name} is not in ORDER: say where it belongs"
        name = name.rpartition(".")[0]
    return name


def imports(path, name):
    """(absolute module, line) of every import that runs, those under TYPE_CHECKING left out."""
    tree = ast.parse(path.read_text())
    typing_only = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for child in ast.walk(node)
    }
    package = name.split(".") if path.name == "__init__.py" and name else name.split(".")[:-1]
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            prefix = ["ring_dilated_attention"] * bool(node.level) + base
            module = ".".join([*prefix, *(node.module or "").split(".")]).strip(".")
            yield module, node.lineno
            yield from ((f"{module}.{alias.name}", node.lineno) for alias in node.names)


ALL = [pytest.param(path, name, id=name or "__init__") for path, name in modules()]


@pytest.mark.parametrize(("path", "name"), ALL)
def test_imports_point_upwards(path, name):
    if not name:
        return  # the package itself offers what the modules define
    own = level_name(name)
    for module, line in imports(path, name):
        if not module.startswith("ring_dilated_attention."):
            continue
        target = module.removeprefix("ring_dilated_attention.")
        known = [m for _, m in modules()]
        if target not in known:
            target = target.rpartition(".")[0]
        if not target or target not in known:
            continue
        other = level_name(target)
        inside = other == own or target.split(".")[0] == name.split(".")[0]
        assert inside or LEVEL[other] < LEVEL[own], f"{path.name}:{line} imports {target}"


@pytest.mark.parametrize(("path", "name"), ALL)
def test_plans_are_integers_and_distributed_stays_at_the_edge(path, name):
    top = name.split(".")[0]
    for module, line in imports(path, name):
        where = f"{path.name}:{line} imports {module}"
        if top in INTEGERS_ONLY:
            assert module.split(".")[0] != "torch", where
        if module.startswith("torch.distributed"):
            assert not {top, name}.isdisjoint(MAY_USE_DISTRIBUTED), where


def test_importing_needs_only_torch():
    """Everything but torch and the standard library is blocked; the environment is not read."""
    script = """
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
os.environ = real
assert not torch.distributed.is_initialized()
assert "triton" not in sys.modules or "triton" in torch_needs
print("imported")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.strip() == "imported", done.stderr
