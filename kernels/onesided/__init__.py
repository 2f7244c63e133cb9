"""The one-sided exchange between GPUs of one NVLink domain: Fence and Sentinel in CUDA."""

from epcross.kernels.onesided.agreement import unavailable
from epcross.kernels.onesided.exchange import OneSidedAllToAll
from epcross.kernels.onesided.layout import Protocol
from epcross.kernels.onesided.views import Dispatched, Landing

__all__ = ["Dispatched", "Landing", "OneSidedAllToAll", "Protocol", "unavailable"]
