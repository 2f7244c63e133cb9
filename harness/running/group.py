"""`StoreGroup`: the ranks of one process group, meeting at a `rendezvous` store. No torch is imported until asked."""

import importlib
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from epcross.harness.errors import GroupError
from epcross.harness.running.rendezvous import Address, StoreClient

DEFAULT_TIMEOUT_S = 60.0
SHARED_NAME_LENGTH = 40
STORE_FILE = "store"  # of torch, in a folder of its own
LEAVE_S = 0.5  # for ranks that leave a group together


class StoreGroup:
    """The `Group` of the backend contract.

    Collectives are matched by their order: the n-th call of each rank meets the n-th of the others. A peer that
    dies, leaves, aborts or comes too late ends the group for all: every later call raises `GroupError` with the rank
    that was lost.

    Args:
        scope: name of this process group in the store, unique in the run.
        shared_name: stem for shared-memory names, at most 40 characters of letters, digits, `_` and `-`.
        timeout_s: of collectives that name none.
    """

    def __init__(
        self,
        address: Address,
        *,
        scope: str,
        rank: int,
        size: int,
        shared_name: str,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        if len(shared_name) > SHARED_NAME_LENGTH or not shared_name.replace("_", "").replace("-", "").isalnum():
            raise GroupError(f"shared name {shared_name!r} is not 1 to {SHARED_NAME_LENGTH} letters, digits, _ or -")
        self.rank = rank
        self.size = size
        self._shared_name = shared_name
        self._address = address
        self._scope = scope
        self._timeout_s = timeout_s
        self._calls = 0
        self._torch_folder = ""
        self._client = StoreClient(address, scope, rank)

    @property
    def shared_name(self) -> str:
        """See `Group.shared_name`."""
        return self._shared_name

    def barrier(self, timeout_s: float | None = None) -> None:
        """See `Group.barrier`."""
        self._gather("barrier", b"", timeout_s)

    def all_gather(self, data: bytes, timeout_s: float | None = None) -> list[bytes]:
        """See `Group.all_gather`."""
        return self._gather("all_gather", data, timeout_s)

    def abort(self, reason: str) -> None:
        """See `Group.abort`. May be called from any thread: it uses a connection of its own."""
        client = StoreClient(self._address, self._scope)
        client.abort(self._scope, reason, self.rank)
        client.close()

    def torch(self, backend: str) -> Any:
        """A `torch.distributed.ProcessGroup` of these ranks: the world on the first call, a new group of all ranks
        on later ones. Collective."""
        dist: Any = importlib.import_module("torch.distributed")  # the one place that needs torch

        if dist.is_initialized():
            return dist.new_group(backend=backend)
        store = dist.PrefixStore(self._scope, self._torch_rendezvous(dist))
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.size)
        return dist.group.WORLD

    def _torch_rendezvous(self, dist: Any) -> Any:
        """A store of torch's own: a private file on one host, since torch's TCP store asks nobody for a token and
        listens on every interface; TCP between hosts."""
        if self._address.host.startswith("127."):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # gloo resolves the host's name, which may have none
            if self.rank == 0:
                self._torch_folder = tempfile.mkdtemp(prefix=f"{self._shared_name}-")
            folder = self.all_gather(self._torch_folder.encode())[0].decode()
            return dist.FileStore(f"{folder}/{STORE_FILE}", self.size)
        store, port = None, b""
        if self.rank == 0:
            store = dist.TCPStore(self._address.host, 0, self.size, is_master=True, wait_for_workers=False)
            port = b"%d" % store.port
        port = int(self.all_gather(port)[0])
        return store or dist.TCPStore(self._address.host, port, self.size, is_master=False, wait_for_workers=False)

    def close(self) -> None:
        """Leave the group. Idempotent; a peer that still waits for this rank is told."""
        if "torch.distributed" in sys.modules:
            dist = sys.modules["torch.distributed"]
            if dist.is_available() and dist.is_initialized():
                dist.destroy_process_group()
        if self._torch_folder:
            _remove_store(Path(self._torch_folder))
        self._client.close()

    def __enter__(self) -> "StoreGroup":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _gather(self, kind: str, data: bytes, timeout_s: float | None) -> list[bytes]:
        self._calls += 1
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        return self._client.gather(f"{kind} {self._calls}", self.size, data, timeout_s)


def _remove_store(folder: Path) -> None:
    """Remove the folder of a `FileStore` whose last user has removed the file, or none did within `LEAVE_S`.

    A rank that leaves looks whether the file is there, and opens it: were the folder gone by then, it would try for
    minutes to make the file anew.
    """
    deadline = time.monotonic() + LEAVE_S
    while (folder / STORE_FILE).exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    shutil.rmtree(folder, ignore_errors=True)
