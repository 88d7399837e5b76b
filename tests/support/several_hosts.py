"""Hosts on one machine: namespaces with a network, shared memory and a host name of their own.

Their network leads to each other and to nothing else. A process that holds them ends with this one,
and they with it. To make them takes root, and the commands ip, unshare and nsenter.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from ring_dilated_attention.checks.ranks import forked_context
from support.launched import as_by_torchrun, exit_codes

INTERFACE = "eth0"
"""Of each host, to the others."""
MOST_SECONDS = 240
_PORT = 29_500  # of the first host, which is in no other network
_KINDS = "mnt", "net", "uts", "ipc"  # of namespaces; net is entered by whoever was root before
_UNSHARE = "unshare", "--net", "--mount", "--uts", "--ipc", "--propagation", "private"
_HOST = """
mount -t tmpfs tmpfs /dev/shm && hostname "$1" && ip link set lo up && echo ready && read line
"""
_SWITCH = "ip link add br0 type bridge && ip link set br0 up && echo ready && read line"


class NoHostsError(RuntimeError):
    """This machine does not let them be made."""


class Host(NamedTuple):
    """A host.

    Attributes:
        pid: of the process that holds its namespaces.
        address: of its interface to the others.
    """

    pid: int
    address: str

    def run(self, *command: str) -> list[str]:
        """A command that runs another one on this host."""
        return ["nsenter", f"--target={self.pid}", *(f"--{_OPTIONS[x]}" for x in _KINDS), *command]

    def enter(self) -> None:
        """Move this process, which has no threads yet, to this host."""
        library = ctypes.CDLL(None, use_errno=True)
        files = [os.open(f"/proc/{self.pid}/ns/{kind}", os.O_RDONLY) for kind in _KINDS]
        for file in files:
            if library.setns(file, 0):
                raise OSError(ctypes.get_errno(), "setns")
            os.close(file)
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE


_OPTIONS = {"mnt": "mount", "net": "net", "uts": "uts", "ipc": "ipc"}


@contextmanager
def several_hosts(count: int) -> Iterator[list[Host]]:
    """Hosts that reach each other.

    Raises:
        NoHostsError: this machine does not let them be made, or has no commands for it.
    """
    with ExitStack() as stack:
        try:
            switch = _held(stack, _SWITCH)
            hosts = []
            for number in range(count):
                host = Host(_held(stack, _HOST, f"host{number}"), f"10.77.0.{number + 1}")
                _command("nsenter", f"--target={switch}", "--net", "ip", "link", "add",
                         f"to{number}", "type", "veth", "peer", "name", INTERFACE, "netns",
                         str(host.pid))  # fmt: skip
                _command("nsenter", f"--target={switch}", "--net", "ip", "link", "set",
                         f"to{number}", "master", "br0", "up")  # fmt: skip
                _command(*host.run("ip", "address", "add", f"{host.address}/24", "dev", INTERFACE))
                _command(*host.run("ip", "link", "set", INTERFACE, "up"))
                hosts.append(host)
        except (OSError, subprocess.SubprocessError) as error:
            raise NoHostsError(f"this machine cannot make hosts of namespaces: {error}") from error
        yield hosts


def _held(stack: ExitStack, script: str, *arguments: str) -> int:
    """The process that holds new namespaces: until `stack` closes, or this process ends."""
    process = stack.enter_context(
        subprocess.Popen(
            [*_UNSHARE, "sh", "-c", script, "sh", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    )
    assert process.stdout is not None
    assert process.stderr is not None
    if process.stdout.readline() != "ready\n":
        raise OSError(process.stderr.read().strip() or "unshare has ended")
    return process.pid


def _command(*command: str) -> None:
    found = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    if found.returncode:
        raise OSError(f"{' '.join(command)}: {found.stderr.strip()}")


@lru_cache(maxsize=1)
def why_no_hosts() -> str:
    """Why this machine has none; "" if it has."""
    try:
        with several_hosts(2):
            return ""
    except NoHostsError as error:
        return str(error)


def skip_without_hosts() -> None:
    """Skip the test that calls this where there can be no hosts."""
    if why_no_hosts():
        pytest.skip(why_no_hosts())


def hosts_of(ranks: Sequence[int]) -> list[int]:
    """Host of each rank, of the number of ranks of each host."""
    return [host for host, count in enumerate(ranks) for _ in range(count)]


def run_on_hosts(function: Callable[..., Any], ranks: Sequence[int], *arguments: Any) -> list[Any]:
    """Call ``function(rank, world_size, *arguments)`` on ranks that torchrun starts on each host.

    Args:
        function: a function that can be pickled (defined at the top of a module).
        ranks: how many of each host.
        arguments: passed on; anything that can be pickled.

    Returns:
        What the calls returned, by rank.

    Raises:
        NoHostsError: see `several_hosts`.
        AssertionError: a host's torchrun failed, with what it said.
    """
    with tempfile.TemporaryDirectory() as folder, several_hosts(len(ranks)) as hosts:
        Path(folder, "call").write_bytes(pickle.dumps((function, arguments)))
        environment = {
            **os.environ,
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(sys.path),  # where pytest has found the function
        }
        started = []
        for number, (host, count) in enumerate(zip(hosts, ranks, strict=True)):
            torchrun = [
                *(sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(hosts)}"),
                *(f"--node-rank={number}", f"--nproc-per-node={count}"),
                *(f"--master-addr={hosts[0].address}", f"--master-port={_PORT}"),
                *(__file__, folder),
            ]
            log = Path(folder, f"log{number}")
            with log.open("w") as file:
                command = host.run(*torchrun)
                started.append((subprocess.Popen(command, env=environment, stdout=file,
                                                 stderr=subprocess.STDOUT), log))  # fmt: skip
        try:
            for process, log in started:
                assert process.wait(MOST_SECONDS) == 0, log.read_text()[-4000:]
        finally:
            for process, _ in started:
                process.kill()
                process.wait()
        return [pickle.loads(Path(folder, str(rank)).read_bytes()) for rank in range(sum(ranks))]


def fork_on_hosts(function: Callable[..., Any], ranks: Sequence[int], *arguments: Any) -> list[Any]:
    """As `run_on_hosts`, of ranks that are forked and then move to their host: a tenth of the time.

    Raises:
        NoHostsError: see `several_hosts`.
        AssertionError: a rank failed.
    """
    context = forked_context()
    with tempfile.TemporaryDirectory() as folder, several_hosts(len(ranks)) as hosts:
        Path(folder, "call").write_bytes(pickle.dumps((function, arguments)))
        places = hosts_of(ranks)
        processes = [
            context.Process(target=_forked, args=(rank, len(places), hosts, place, folder))
            for rank, place in enumerate(places)
        ]
        assert not any(exit_codes(processes, MOST_SECONDS))
        return [pickle.loads(Path(folder, str(rank)).read_bytes()) for rank in range(len(places))]


def _forked(rank: int, world_size: int, hosts: Sequence[Host], place: int, folder: str) -> None:
    hosts[place].enter()
    as_by_torchrun(rank, world_size)
    os.environ |= {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": str(_PORT)}
    _answer(Path(folder))


def _answer(folder: Path) -> None:
    function, arguments = pickle.loads((folder / "call").read_bytes())
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    answer = function(rank, world_size, *arguments)
    (folder / str(rank)).write_bytes(pickle.dumps(answer))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":  # what torchrun starts
    _answer(Path(sys.argv[1]))
