"""A group of processes that meet in a directory: for tests of what lies below the harness."""

import time
from pathlib import Path


class FilesGroup:
    """Satisfies `Group`; the n-th collective of each rank meets in the files `<n>.<rank>`."""

    def __init__(self, directory: Path, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._directory = directory
        self._calls = 0

    @property
    def shared_name(self) -> str:
        return f"test-{self._directory.name}"[-40:]

    def barrier(self, timeout_s: float | None = None) -> None:
        self.all_gather(b"", timeout_s)

    def all_gather(self, data: bytes, timeout_s: float | None = None) -> list[bytes]:
        self._calls += 1
        draft = self._directory / f"draft.{self._calls}.{self.rank}"
        draft.write_bytes(data)
        draft.rename(self._directory / f"{self._calls}.{self.rank}")
        gathered = []
        deadline = time.monotonic() + (timeout_s or 60.0)
        for rank in range(self.size):
            path = self._directory / f"{self._calls}.{rank}"
            while not path.exists():
                if (self._directory / "aborted").exists():
                    raise RuntimeError((self._directory / "aborted").read_text())
                if time.monotonic() > deadline:
                    raise RuntimeError(f"rank {rank} did not come to collective {self._calls}")
                time.sleep(0.0005)
            gathered.append(path.read_bytes())
        return gathered

    def abort(self, reason: str) -> None:
        (self._directory / "aborted").write_text(f"rank {self.rank}: {reason}")

    def torch(self, backend: str) -> object:
        raise NotImplementedError
