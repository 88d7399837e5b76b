"""A stand-in for NVIDIA's bindings of CUDA's driver, which knows what has not been given back.

Its enumerations and structures have the names of `cuda.bindings.driver`, no more of their fields
than are used, and values of their own: nothing may depend on a number.
"""

import os
import tempfile
from itertools import count
from types import SimpleNamespace

UNIT = 2 << 20
"""Bytes that memory is rounded up to."""


class Structure:
    def __init__(self):
        self.location = SimpleNamespace(type=None, id=None)


class DriverStandin:
    """Memory of devices, and the files by which it is passed on.

    Attributes:
        held: what has been made and not been given back: (what, number).
        accessible: (index of a device, memory that it may read and write), of what is mapped.
        failing: the function that returns an error instead.
    """

    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED="pinned")
    CUmemAllocationHandleType = SimpleNamespace(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR="file")
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE="device")
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM="least")
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE="both")
    CUmemAllocationProp = CUmemAccessDesc = Structure

    def __init__(self):
        self.held, self.failing = set(), ""
        self._numbers, self._memory, self._mapped = count(1), {}, {}
        self.accessible = []

    def _outcome(self, name, *values):
        return (1,) if name == self.failing else (0, *values)

    def _made(self, name, what):
        if name == self.failing:
            return (1, None)
        number = next(self._numbers)
        self.held.add((what, number))
        return (0, number)

    def _gone(self, what, number):
        self.held.remove((what, number))
        return (0,)

    def cuGetErrorString(self, code):
        return (0, b"out of memory")

    def cuMemGetAllocationGranularity(self, properties, option):
        assert option == "least"
        return self._outcome("cuMemGetAllocationGranularity", UNIT)

    def cuMemCreate(self, size, properties, flags):
        assert (properties.type, properties.requestedHandleTypes) == ("pinned", "file")
        assert properties.location.type == "device"
        assert size % UNIT == 0
        assert flags == 0
        code, handle = self._made("cuMemCreate", "handle")
        if not code:
            self._memory[handle] = f"of device {properties.location.id}"
        return (code, handle)

    def cuMemRelease(self, handle):
        return self._gone("handle", handle)

    def cuMemExportToShareableHandle(self, handle, kind, flags):
        assert (kind, flags) == ("file", 0)
        if self.failing == "cuMemExportToShareableHandle":
            return (1, None)
        with tempfile.TemporaryFile() as file:
            file.write(self._memory[handle].encode())
            file.flush()
            return (0, os.dup(file.fileno()))

    def cuMemImportFromShareableHandle(self, file, kind):
        assert kind == "file"
        code, handle = self._made("cuMemImportFromShareableHandle", "handle")
        if not code:
            self._memory[handle] = os.pread(file, 99, 0).decode()
        return (code, handle)

    def cuMemAddressReserve(self, size, alignment, address, flags):
        assert (alignment, address, flags) == (0, 0, 0)
        return self._made("cuMemAddressReserve", "address")

    def cuMemAddressFree(self, address, size):
        assert ("mapping", address) not in self.held
        return self._gone("address", address)

    def cuMemMap(self, address, size, offset, handle, flags):
        assert (offset, flags) == (0, 0)
        assert ("address", address) in self.held
        if self.failing == "cuMemMap":
            return (1,)
        self.held.add(("mapping", address))
        self._mapped[address] = self._memory[handle]
        return (0,)

    def cuMemUnmap(self, address, size):
        return self._gone("mapping", address)

    def cuMemSetAccess(self, address, size, access, number):
        (only,) = access
        assert (only.flags, only.location.type, number) == ("both", "device", 1)
        self.accessible.append((only.location.id, self._mapped[address]))
        return self._outcome("cuMemSetAccess")
