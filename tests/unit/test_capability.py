"""Asking for the GPU's compute capability never makes a context of it: a command that plans would hold one."""

import sys
from types import SimpleNamespace

import pytest

from epcross.kernels.experts import capability
from epcross.kernels.formats import RowFormat


class Driver:
    """The calls of `cuda.bindings.driver` that are asked, on a GPU of compute capability 10."""

    CUdevice_attribute = SimpleNamespace(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR=75)
    CUresult = SimpleNamespace(CUDA_SUCCESS=0)

    def __init__(self, fails: str = "") -> None:
        self.fails = fails

    def cuInit(self, flags):
        return (100 if self.fails == "cuInit" else 0,)

    def cuDeviceGet(self, number):
        return (101, None) if self.fails == "cuDeviceGet" else (0, f"device {number}")

    def cuDeviceGetAttribute(self, name, device):
        if self.fails == "cuDeviceGetAttribute":
            return 1, 0
        return 0, {75: 10}[name] if device == "device 0" else 0


def torch_that(initialized: bool):
    """A torch whose capability may be asked only once it has begun with the GPU: asking begins with it."""

    def asked():
        assert initialized, "torch was started to ask"
        return (9, 0)

    return SimpleNamespace(
        cuda=SimpleNamespace(is_initialized=lambda: initialized, get_device_capability=asked, is_available=lambda: True)
    )


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch):
    def given(fails: str = "") -> None:
        module = Driver(fails)
        monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(driver=module))
        monkeypatch.setitem(sys.modules, "cuda.bindings.driver", module)

    return given


def test_torch_is_asked_where_it_has_a_device_and_the_driver_where_it_has_none(monkeypatch, driver):
    driver()
    monkeypatch.setitem(sys.modules, "torch", torch_that(initialized=True))
    assert capability.major_capability() == 9
    monkeypatch.setitem(sys.modules, "torch", torch_that(initialized=False))
    assert capability.major_capability() == 10
    assert capability.power_of_two_scales(RowFormat.FP8)
    assert not capability.power_of_two_scales(RowFormat.BF16)


@pytest.mark.parametrize("fails", ["cuInit", "cuDeviceGet", "cuDeviceGetAttribute"])
def test_a_driver_that_finds_no_gpu_is_none(monkeypatch, driver, fails):
    driver(fails)
    monkeypatch.setitem(sys.modules, "torch", torch_that(initialized=False))
    assert capability.major_capability() is None
    assert not capability.power_of_two_scales(RowFormat.FP8)


def test_a_driver_that_cannot_be_loaded_is_none(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", torch_that(initialized=False))
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)  # as if it were not installed
    assert capability.major_capability() is None
