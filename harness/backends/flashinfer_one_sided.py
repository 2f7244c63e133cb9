"""FlashInfer's one-sided exchange (`NVLinkOneSidedAlltoAll`), held to one transport.

Left alone, it changes transport with the number of tokens, so that one curve would be several protocols.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from epcross.harness.backends import vendor
from epcross.harness.backends.base import ContractShape, Description
from epcross.harness.backends.flashinfer import FORMATS, MAX_RANKS, FlashInfer
from epcross.harness.backends.gpu import DeviceReceived
from epcross.harness.errors import EpcrossError
from epcross.harness.point import Point, Scalar
from epcross.harness.terms import Boundary, RowFormat
from epcross.kernels.formats import row_size

if TYPE_CHECKING:
    from torch import Tensor

TOP_K = (1, 2, 3, 4, 6, 8, 10, 12, 14, 16, 18, 22)
"""What its kernels are compiled for."""

TRANSPORTS = ("fence", "lamport")

LAMPORT_TOKENS = 512
"""Most tokens per rank of a step on the lamport transport."""

LAMPORT_FORMATS = {RowFormat.BF16: 8, RowFormat.FP8: 512, RowFormat.MXFP8: 256, RowFormat.NVFP4: 256}
"""What rows must be a multiple of on that transport."""

MAX_TIMEOUT_S = 24 * 60 * 60

_ALIGN_BYTES = 128
_PAYLOADS = 8
_FENCE = vendor.boundaries(
    {Boundary.LAYOUT, Boundary.COUNT_EXCHANGE, Boundary.TRANSFER}, {Boundary.TRANSFER, Boundary.REDUCE}
)
_LAMPORT = vendor.boundaries(
    {Boundary.LAYOUT, Boundary.TRANSFER, Boundary.COPY_OUT, Boundary.REARM},
    {Boundary.TRANSFER, Boundary.REDUCE, Boundary.REARM},
)


class FlashInferOneSided(FlashInfer):
    """Experts write into the library's own buffer, so combine copies nothing."""

    name = "flashinfer_one_sided"
    library = "NVLinkOneSidedAlltoAll"
    boundary = _FENCE
    contract_shape = ContractShape(format_hidden=512)  # on both transports

    def __init__(self, options: Mapping[str, Scalar]) -> None:
        super().__init__(options)
        if self._lamport:
            vars(self)["boundary"] = _LAMPORT
            vars(self)["least_capability"] = (10, 0)

    @classmethod
    def option_defaults(cls) -> Mapping[str, Scalar]:
        """`transport`: fence, or lamport where the GPU has compute capability 10.0. `timeout_s` bounds waits."""
        return {"transport": "fence", "timeout_s": 30}

    @classmethod
    def option_problems(cls, options: Mapping[str, Scalar]) -> list[str]:
        """See `Backend`."""
        problems = vendor.not_among(options, transport=TRANSPORTS) + vendor.too_small(options, timeout_s=1)
        if vendor.integer(options["timeout_s"]) > MAX_TIMEOUT_S:
            problems.append(f"timeout_s={options['timeout_s']} must be at most {MAX_TIMEOUT_S}")
        return problems

    @property
    def _lamport(self) -> bool:
        return self.options.get("transport") == "lamport"

    def differs(self) -> str | None:
        """See `FlashInfer`."""
        from flashinfer.moe_ep.backends.split.comm.nvlink_one_sided.config import (  # type: ignore[import-not-found]
            NVLinkOneSidedConfig,
        )

        return vendor.lacks("NVLinkOneSidedConfig", NVLinkOneSidedConfig, "cft", "lamport", "timeout_sec")

    def unsupported(self, point: Point) -> str | None:
        """The shapes that are compiled in, and what the transport carries."""
        problems = vendor.format_problems(self.name, point, LAMPORT_FORMATS if self._lamport else FORMATS)
        if point.model.top_k not in TOP_K:
            problems.append(f"{self.name} takes top_k {', '.join(map(str, TOP_K))}, not {point.model.top_k}")
        if point.ep_size > MAX_RANKS:
            problems.append(f"{self.name} takes at most {MAX_RANKS} ranks, not {point.ep_size}")
        if self._lamport and max(point.tokens) > LAMPORT_TOKENS:
            problems.append(f"transport=lamport takes {LAMPORT_TOKENS} tokens per rank, not {max(point.tokens)}")
        return "; ".join(problems) or None

    def workspace_bytes(self, point: Point) -> int:
        """Landing and combine buffers for every token of every rank, as the library lays them out; lamport has them
        once more, with two sets of ids."""
        size = row_size(point.dispatch_format, point.model.hidden)
        slots = max(1, point.max_tokens_per_rank) * point.ep_size
        row = size.row_bytes + size.scale_bytes + 8 * point.model.top_k
        fence = slots * (row + 2 * point.model.hidden) + (_PAYLOADS + 2) * _ALIGN_BYTES
        if not self._lamport:
            return fence
        own = min(LAMPORT_TOKENS, max(1, point.max_tokens_per_rank)) * point.ep_size
        return fence + own * (2 * row + 4 * point.model.top_k + 2 * point.model.hidden)

    def prebuild(self) -> None:
        """Have the library compile its kernels."""
        if self.unavailable() is None:
            from flashinfer.moe_ep.backends.split.comm.nvlink_one_sided import (  # type: ignore[import-not-found]
                kernels,
            )

            kernels.get_nvlink_one_sided_alltoall_module()

    def configuration(self) -> Any:
        """See `FlashInfer`."""
        from flashinfer.moe_ep.backends.split.comm.nvlink_one_sided.config import (  # type: ignore[import-not-found]
            NVLinkOneSidedConfig,
        )

        return NVLinkOneSidedConfig(
            cft=False,
            lamport=self._lamport,
            lamport_max_tokens=min(LAMPORT_TOKENS, max(1, self._point.max_tokens_per_rank)) if self._lamport else None,
            timeout_sec=vendor.integer(self.options["timeout_s"]),
        )

    def received_ranks(self, set_index: int) -> list[DeviceReceived]:
        """See `GpuBackend`. Raises `EpcrossError` if another transport than the one asked for carried the step."""
        asked = str(self.options["transport"])
        enabled = bool(getattr(self._communication, "lamport_enabled", False))
        took = (getattr(self._communication, "_round", None) or {}).get("lamport", enabled)
        if enabled is not self._lamport or bool(took) is not self._lamport:
            carried = "lamport" if took else "fence"
            raise EpcrossError(f"FlashInfer was asked for transport={asked} and took {carried}; see its log for why")
        return super().received_ranks(set_index)

    def stage_ranks(self, set_index: int, partials: "Sequence[Tensor]") -> None:
        """See `GpuBackend`. One buffer for all sets, which the library hands out between dispatch and combine."""
        self._buffer()[self._at] = partials[0].to(self._device)

    def _buffer(self) -> "Tensor":
        import torch

        return self._communication.get_combine_input_buffer(torch.bfloat16)

    def combine(self, set_index: int) -> None:
        """See `Backend`."""
        self._communication.combine(self._buffer(), output=self._out[set_index])

    def _num_sms(self) -> int:
        """Its kernels of fence have a block for each token of the rank; those of lamport tell nobody."""
        return 0 if self._lamport else min(vendor.sm_count(), max(1, self._tokens))

    def describe(self) -> Description:
        """See `Backend`."""
        state = getattr(self._communication, "_state", None) or {}
        fabric: Any = getattr(state.get("mnnvl_mem"), "fabric_handles", None)  # what the driver granted
        handles = "" if fabric is None else ", fabric handles" if fabric else ", file descriptors"
        return Description(
            version=vendor.version_of("flashinfer-python"),
            transport=f"nvlink one-sided{handles}",
            algorithm=str(self.options["transport"]),
            workspace_bytes=int(self._communication.workspace.shape[1]),
            num_sms=self._num_sms(),
            libraries=self.libraries(),
        )
