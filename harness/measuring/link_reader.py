"""The process that asks NVML for the counters of one GPU's NVLinks, so that no measured process has to.

    python -m epcross.harness.measuring.link_reader GPU-<uuid>

    standard input -> any line: read now; end of file: leave
    standard output -> one object a line: {tx_bytes, rx_bytes, links}, {note: why there are none, as a clause}, or
                       {overrun_bytes, asked_bytes}, after which it has ended

NVML can damage the heap of the process that asks (link_counters.py). Here it writes between two guards, and a reader
whose guards were touched gives no more numbers. Starts in a moment: imports nothing but the standard library and
pynvml, and makes no CUDA context.
"""

import ctypes
import json
import os
import sys
from typing import Any

KIB = 1024
GUARD = b"\xa5"
GUARD_FIELDS = 64
"""On either side of what is asked for, as many values: more than the 36 links that NVML knows of."""


class Overrun(Exception):
    """NVML wrote beyond the values that it was given."""

    def __init__(self, overrun_bytes: int, asked_bytes: int) -> None:
        super().__init__(f"{overrun_bytes} bytes beyond {asked_bytes}")
        self.overrun_bytes, self.asked_bytes = overrun_bytes, asked_bytes


class Links:
    """The links of one GPU. `nvml` is the module pynvml, or a stand-in."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle
        self._count: int | None = None

    def read(self) -> dict[str, Any]:
        """Bytes since the driver was loaded, summed over the links; or a note.

        Raises:
            Overrun: nothing that this process says from now on is to be trusted.
        """
        nvml = self._nvml
        try:
            if self._count is None:
                self._count = self._ask([(nvml.NVML_FI_DEV_NVLINK_LINK_COUNT, 0)], "uiVal")[0] or 0
            directions = (nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX)
            told = [self._ask([(field, link) for link in range(self._count)], "ullVal") for field in directions]
        except AttributeError as error:
            return {"note": f"this pynvml is too old for counters of links ({error})"}
        except nvml.NVMLError as error:
            return {"note": f"NVML gives no counters of links: {error}"}
        # a link is counted in both directions or in none
        links = [(tx, rx) for tx, rx in zip(*told, strict=True) if tx is not None and rx is not None]
        if not links:
            return {"note": "NVML counts no link of this GPU"}
        tx_bytes, rx_bytes = (sum(direction) * KIB for direction in zip(*links, strict=True))
        return {"tx_bytes": tx_bytes, "rx_bytes": rx_bytes, "links": len(links)}

    def _ask(self, fields: list[tuple[int, int]], member: str) -> list[int | None]:
        """What NVML says of each (field, link), in that member of its union; None where it has no answer.

        As pynvml's nvmlDeviceGetFieldValues, whose array would have no guards.
        """
        if not fields:
            return []
        nvml = self._nvml
        value_type = nvml.c_nvmlFieldValue_t
        ask = nvml._nvmlGetFunctionPointer("nvmlDeviceGetFieldValues")
        begin = GUARD_FIELDS * ctypes.sizeof(value_type)
        end = begin + len(fields) * ctypes.sizeof(value_type)
        memory = bytearray(GUARD * begin + bytes(end - begin) + GUARD * begin)
        values = (value_type * len(fields)).from_buffer(memory, begin)
        for value, (field, link) in zip(values, fields, strict=True):
            value.fieldId, value.scopeId = field, link
        code = ask(self._handle, ctypes.c_int32(len(fields)), values)
        if touched := max(len(memory[:begin].lstrip(GUARD)), len(memory[end:].rstrip(GUARD))):
            raise Overrun(touched, end - begin)
        if code != nvml.NVML_SUCCESS:
            raise nvml.NVMLError(code)
        return [int(getattr(v.value, member)) if v.nvmlReturn == nvml.NVML_SUCCESS else None for v in values]


def open_links(uuid: str) -> Links | str:
    """The links of the GPU that NVML knows by `uuid`; or why they cannot be asked for, as a clause."""
    try:
        import pynvml
    except ImportError:
        return "there is no NVML here (nvidia-ml-py)"
    nvml: Any = pynvml
    try:
        nvml.nvmlInit()
        return Links(nvml, nvml.nvmlDeviceGetHandleByUUID(uuid))
    except nvml.NVMLError as error:
        return f"NVML gives no counters of links: {error}"


def main() -> None:
    """Serve until standard input ends."""
    links = open_links(sys.argv[1])
    for _ in sys.stdin:
        try:
            _say(**({"note": links} if isinstance(links, str) else links.read()))
        except Overrun as overrun:
            _say(overrun_bytes=overrun.overrun_bytes, asked_bytes=overrun.asked_bytes)
            os._exit(1)  # at once: an orderly end would free what may be damaged


def _say(**words: Any) -> None:
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
