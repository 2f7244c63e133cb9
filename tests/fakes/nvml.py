"""pynvml's calls for counters of links, as nvidia-ml-py 13 has them: a function of C that fills an array of values.

Standard library only: a reader in a process of its own imports it in pynvml's place.
"""

import ctypes
from collections.abc import Callable
from typing import Any

KIB = 1024
LINKS = 18
TX, RX = 138, 139


class Value(ctypes.Union):
    _fields_ = (("uiVal", ctypes.c_uint), ("ullVal", ctypes.c_ulonglong))


class FieldValue(ctypes.Structure):
    """40 bytes. Source: nvml.h, nvmlFieldValue_t."""

    _fields_ = (
        ("fieldId", ctypes.c_uint32),
        ("scopeId", ctypes.c_uint32),
        ("timestamp", ctypes.c_int64),
        ("latencyUsec", ctypes.c_int64),
        ("valueType", ctypes.c_uint),
        ("nvmlReturn", ctypes.c_uint),
        ("value", Value),
    )


class Nvml:
    """A GPU with links whose counters drop what is less than a KiB, as they do.

    Args:
        links: how many there are.
        down: (field, link) that are not counted.
        beyond: (begin, length) in bytes from the end of an array of links' values: written to, too.
        before: called before each answer about links.
    """

    NVML_FI_DEV_NVLINK_LINK_COUNT = 91
    NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX = TX, RX
    NVML_SUCCESS = 0
    c_nvmlFieldValue_t = FieldValue

    class NVMLError(Exception):
        def __str__(self) -> str:
            return "Not Supported" if self.args == (3,) else f"error {self.args}"

    def __init__(
        self,
        links: int = LINKS,
        down: frozenset[tuple[int, int]] = frozenset(),
        beyond: tuple[int, int] | None = None,
        before: Callable[[], Any] = bool,
        code: int = 0,
    ) -> None:
        self.links, self.down, self.beyond, self.before, self.code = links, down, beyond, before, code
        self.sent, self.received = 777 * KIB, 5_000_000 * KIB

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != "GPU-1":
            raise self.NVMLError(3)
        return "handle"

    def _nvmlGetFunctionPointer(self, name: str) -> Callable[..., int]:
        return {"nvmlDeviceGetFieldValues": self._fill}[name]

    def _fill(self, handle: str, count: ctypes.c_int32, values: Any) -> int:
        assert handle == "handle"
        assert len(values) == count.value
        asked = [(value.fieldId, value.scopeId) for value in values]
        if asked == [(self.NVML_FI_DEV_NVLINK_LINK_COUNT, 0)]:
            values[0].value.ullVal = 0xDEAD_0000_0000  # its upper half is of no meaning
            values[0].value.uiVal = self.links
            return self.code
        self.before()
        assert asked
        assert max(link for _, link in asked) < self.links, "asked for a link that is not there"
        totals = {TX: self.sent, RX: self.received}
        for value in values:
            is_down = (value.fieldId, value.scopeId) in self.down
            value.nvmlReturn = 3 if is_down else 0
            value.value.ullVal = 0xDEAD if is_down else totals[value.fieldId] // self.links // KIB
        if self.beyond:
            begin, length = self.beyond
            ctypes.memset(ctypes.addressof(values) + ctypes.sizeof(values) + begin, 0, length)
        return self.code
