"""What stands behind an exchange: loaded kernels, mapped workspaces, and the two structures that a launch is given."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from epcross.kernels.errors import InvalidArguments, WaitExpired
from epcross.kernels.onesided import jit, plan
from epcross.kernels.onesided.buffers import Transport, Workspaces, gather
from epcross.kernels.onesided.inputs import Options
from epcross.kernels.onesided.launch import Arguments, Kernel, Module
from epcross.kernels.onesided.layout import CALL, FAILURE, LINE_BYTES, Layout, Protocol, exchange_values
from epcross.kernels.onesided.plan import Phase, Step, kernel_names, least_blocks, resident_blocks, step, usable
from epcross.kernels.onesided.views import Views

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

FIRST_EPOCH = 1
"""Not 0: flags and headers begin at 0, and one that carries the epoch counts."""


class Kernels:
    """The kernels of some protocols, loaded on a device, and how many blocks of each may wait at once."""

    def __init__(self, device: "torch.device", protocols: Sequence[Protocol], num_slots: int, options: Options) -> None:
        """Compile if need be, and load.

        Raises:
            BuildError: the kernels cannot be compiled for this GPU.
            InvalidArguments: the GPU has no room for a block of each local rank.
        """
        import torch

        self.shared_bytes = num_slots  # the table of the slots' ranks
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()  # makes the context
            properties = torch.cuda.get_device_properties(device)
            self.module = Module(jit.build(jit.architecture(properties.major, properties.minor)))
            variants = {
                name: variant
                for protocol in protocols
                for (_, variant), name in kernel_names(protocol).items()
                if usable(variant, options.local_ranks * options.ranks_per_gpu)
            }
            self.loaded: dict[str, Kernel] = {
                name: self.module.kernel(name, plan.BLOCKS[variant].threads)
                for name, variant in sorted(variants.items())
            }
            self.resident = {
                name: resident_blocks(
                    kernel.blocks_per_sm(self.shared_bytes),
                    properties.multi_processor_count,
                    ranks_per_gpu=options.ranks_per_gpu,
                    dependent=options.programmatic_launch,
                    num_sms=options.num_sms,
                    most_per_sm=plan.BLOCKS[variants[name]].per_sm,
                )
                for name, kernel in self.loaded.items()
            }
        least = least_blocks(options.local_ranks)
        short = {name: blocks for name, blocks in self.resident.items() if blocks < least}
        if short:
            self.module.close()
            raise InvalidArguments(
                f"{blocks} blocks of {name} may wait at once on this GPU, and local_ranks={options.local_ranks} need "
                f"{least}: lower local_ranks or ranks_per_gpu, or raise num_sms"
                for name, blocks in short.items()
            )


class Engine:
    """Workspaces armed for one protocol at a time, and its launches."""

    def __init__(
        self,
        group: "ProcessGroup | None",
        device: "torch.device",
        kernels: Kernels,
        layouts: Mapping[Protocol, Layout],
        slot_ranks: Sequence[int],
        options: Options,
        transport: Transport,
    ) -> None:
        """Allocate and map; collective. `use` must come next."""
        import torch

        self._group, self.device, self.kernels, self._layouts = group, device, kernels, layouts
        self._options = options
        self.first_rank = (0 if group is None else group.rank()) * options.local_ranks
        self._workspaces = Workspaces(
            group,
            device,
            bytes_per_rank=bytes_per_rank(layouts),
            local_ranks=options.local_ranks,
            transport=transport,
        )
        self._slots = torch.tensor(slot_ranks, dtype=torch.uint8).to(device)
        # written by kernels over PCIe or C2C, read here without asking the device
        record_bytes = options.local_ranks * FAILURE.itemsize
        self._failure_memory = torch.zeros(record_bytes, dtype=torch.uint8, pin_memory=True)
        self.failures: NDArray[np.void] = self._failure_memory.numpy().view(FAILURE)

    def use(self, protocol: Protocol, *, unless: Callable[[], str] = str) -> None:
        """Arm all workspaces for `protocol`. Collective; waits for the device and all ranks, twice.

        Args:
            protocol: the same on every rank.
            unless: what is wrong on this rank once its device is done, and would be forgotten; empty if nothing is.

        Raises:
            InvalidArguments: a graph is being captured, or the ranks disagree.
            WaitExpired: `unless` had something on some rank; nothing was armed.
        """
        import torch

        if torch.cuda.is_current_stream_capturing():
            raise InvalidArguments(["workspaces cannot be armed while a graph is captured: do it before"])
        torch.cuda.synchronize(self.device)
        asked = gather(self._group, (str(protocol), unless()))  # from here on nothing is on its way to any workspace
        raise_together(asked)
        self.at = self._layouts[protocol]
        self._steps: dict[tuple[Phase, int], Step] = {}
        assert self._workspaces.memory is not None
        self.views = Views(self._workspaces.memory, self.at)
        self.views.arm(FIRST_EPOCH)
        self.failures[:] = np.zeros((), FAILURE)
        self._exchange = exchange_values(
            self.at,
            workspaces=self._workspaces.addresses,
            slot_rank=self._slots.data_ptr(),
            num_slots=len(self._slots),
            failure=self._failure_memory.data_ptr(),
            timeout_ns=round(self._options.timeout_s * 1e9),
            first_rank=self.first_rank,
            local_ranks=self._options.local_ranks,
        )
        self.call: NDArray[np.void] = np.zeros((), CALL)
        arguments = Arguments(np.asarray(self._exchange), self.call)
        self._launchers = {
            name: self.kernels.loaded[name].launcher(
                arguments,
                dependent=self._options.programmatic_launch,
                shared_bytes=self.kernels.shared_bytes if phase is Phase.DISPATCH else 0,
            )
            for (phase, _), name in kernel_names(protocol).items()
            if name in self.kernels.loaded
        }
        self._arguments = arguments  # the driver reads from it at every launch
        torch.cuda.synchronize(self.device)
        gather(self._group, None)  # nobody sends before all are armed

    def step(self, phase: Phase, tokens: int) -> Step:
        """The launch for `tokens` tokens of the rank that has most."""
        if (phase, tokens) not in self._steps:
            found = step(phase, self.at, tokens, self.kernels.resident, self._options.local_ranks)
            self._steps[phase, tokens] = found
        return self._steps[phase, tokens]

    def point(self, name: str, tensor: "torch.Tensor") -> None:
        """Have the next launches read, or write, `tensor`: [T, width], or [V, T, width] with several local ranks."""
        several = self._options.local_ranks > 1
        self.call[name] = tensor.data_ptr()
        self.call[f"{name}_stride"] = tensor.stride(0) * tensor.element_size() if several else 0

    def launch(self, phase: Phase, tokens: int) -> None:
        """Enqueue on torch's current stream of the device, with what `call` holds."""
        import torch

        chosen = self.step(phase, tokens)
        self.call["chunk_blocks"] = chosen.chunk_blocks
        launch = self._launchers[chosen.kernel]
        stream = torch.cuda.current_stream(self.device).cuda_stream
        if torch.cuda.current_device() == self.device.index:
            launch(chosen.grid, stream)
        else:
            with torch.cuda.device(self.device):
                launch(chosen.grid, stream)

    def close(self) -> None:
        """Wait for the own device and let go of everything; waits for no peer."""
        import torch

        torch.cuda.synchronize(self.device)
        self._workspaces.close()
        del self.views
        with torch.cuda.device(self.device):
            self.kernels.module.close()


def raise_together(asked: Sequence[tuple[str, str]]) -> None:
    """From the protocol that each rank asks for, and what is wrong there: the same on every rank.

    Raises:
        WaitExpired: something is wrong on some rank.
        InvalidArguments: the ranks disagree.
    """
    if expired := sorted({why for _, why in asked if why}):
        raise WaitExpired("; ".join(expired))
    if len({protocol for protocol, _ in asked}) > 1:
        found = [protocol for protocol, _ in asked]
        raise InvalidArguments([f"ranks change to different protocols, {found}: give all the same group_tokens"])


def bytes_per_rank(layouts: Mapping[Protocol, Layout]) -> int:
    """What one rank's workspace takes, so that the next one begins on a line and any of `layouts` fits."""
    return max(-(-at.total_bytes // LINE_BYTES) * LINE_BYTES for at in layouts.values())
