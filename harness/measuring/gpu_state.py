"""Clocks, temperature and what holds clocks down, of this process's GPU, by NVML; nothing where NVML is absent."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from epcross.harness.terms import Flag

IDLE = "gpu_idle"
SETTING = "applications_clocks_setting"  # somebody chose this clock: slower, but steady
POWER_CAP = "sw_power_cap"  # the load would take more than the GPU's own power limit

REASONS = {
    0x1: IDLE,
    0x2: SETTING,
    0x4: POWER_CAP,
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}
"""Bits of nvmlClocksEventReasons. Source: NVML API reference, nvmlClocksEventReasons."""

HARMLESS = frozenset({IDLE, SETTING, "display_clock_setting"})
"""Reasons that flag no row: the clock is steady, or nothing ran when it was read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuState:
    """One reading."""

    sm_clock_mhz: int
    memory_clock_mhz: int
    gpu_temperature_c: int
    reasons: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values from which `GpuState(**...)` rebuilds it."""
        return asdict(self)


class GpuMonitor:
    """Readings of one GPU. `nvml` is the module pynvml, or a stand-in."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle

    def read(self) -> GpuState | None:
        """The state now; None if NVML does not tell."""
        nvml, handle = self._nvml, self._handle
        try:
            return GpuState(
                sm_clock_mhz=int(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
                memory_clock_mhz=int(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)),
                gpu_temperature_c=int(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
                reasons=reason_words(int(_reasons_function(nvml)(handle))),
            )
        except nvml.NVMLError:
            return None


def uuid_here() -> str | None:
    """By what NVML knows torch's current GPU, which counts all GPUs of the host, and in another order than CUDA may;
    None without a GPU."""
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    properties: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
    return f"GPU-{properties.uuid}"


def nvml_here() -> tuple[Any, Any] | None:
    """The module pynvml and its handle of torch's current GPU; None without NVML or a GPU."""
    try:
        import pynvml
    except ImportError:
        return None
    nvml: Any = pynvml
    uuid = uuid_here()
    if uuid is None:
        return None
    try:
        nvml.nvmlInit()
        return nvml, nvml.nvmlDeviceGetHandleByUUID(uuid)
    except nvml.NVMLError:
        return None


def reason_words(bits: int) -> tuple[str, ...]:
    """The names of the bits that are set; an unknown one by its number."""
    known = [name for bit, name in REASONS.items() if bits & bit]
    rest = bits & ~sum(REASONS)
    return tuple(sorted([*known, *([f"bits_{rest:#x}"] if rest else [])]))


def summary(states: Iterable[GpuState]) -> dict[str, Any]:
    """Record fields of several readings of several GPUs: the worst of each; empty if there are none."""
    seen = list(states)
    if not seen:
        return {}
    return {
        "sm_clock_mhz": min(state.sm_clock_mhz for state in seen),
        "memory_clock_mhz": min(state.memory_clock_mhz for state in seen),
        "gpu_temperature_c": max(state.gpu_temperature_c for state in seen),
        "throttle_reasons": " ".join(sorted({reason for state in seen for reason in state.reasons if reason != IDLE})),
    }


def slowed(reasons: Iterable[str]) -> Flag | None:
    """The flag of rows beside which these held a clock down, if any: `power_capped` where it was the power limit alone,
    which a heavy layer meets on any GPU of its kind."""
    held = set(reasons) - HARMLESS
    if not held:
        return None
    return Flag.POWER_CAPPED if held == {POWER_CAP} else Flag.THROTTLED


def _reasons_function(nvml: Any) -> Any:
    """Its name changed with NVML 12.2; older bindings have the first one only."""
    new = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
    return new or nvml.nvmlDeviceGetCurrentClocksThrottleReasons
