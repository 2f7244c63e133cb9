"""Rounds that are checked by what is enqueued behind them: nothing waits, so that they may be captured and replayed.

What is right is known from a round that was checked before, of the same inputs: rows, partials and sums of each set are
kept on the device, and later rounds of the set must bring the same bits. From one round of a set to the next the
partials change their sign, so that sums which a combine did not write are seen. Partials lie at every place, NaN where
no row came: who reads a partial that nobody sent has a wrong sum.

Of each rank the first wrong output is kept: [twice its round, 1 more for sums; its place; how many are wrong].
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from epcross.harness.backends.gpu import DeviceReceived, GpuBackend, InPlace, Landed
from epcross.harness.verification.verify import Mismatch

if TYPE_CHECKING:
    from torch import Tensor

_NEVER = 1 << 62
_SIGN = -0x8000  # the sign bit of a bf16 as int16


@dataclass(slots=True)
class _Right:
    """Of one rank and set."""

    landed: Landed
    partials: "Tensor"  # int16 [ep_size, C, hidden], bits of bf16
    sums: "Tensor"  # bf16 [T, hidden]


class DeviceRounds:
    """The ranks of one process at one point."""

    def __init__(self, backend: GpuBackend, place: InPlace, ranks: Sequence[int], sets: int) -> None:
        import torch

        device = place.partials[0].device
        self._backend, self._place, self._ranks = backend, place, ranks
        self._right: dict[tuple[int, int], _Right] = {}  # of (set, local rank)
        self._signs = torch.zeros((sets, 1), dtype=torch.int16, device=device)
        self._round = torch.zeros((), dtype=torch.int64, device=device)
        self._first = torch.zeros((len(ranks), 3), dtype=torch.int64, device=device)
        self.start(0)

    def start(self, number: int) -> None:
        """The next round has this number, and no output was wrong yet."""
        self._round.fill_(number)
        self._first.zero_()
        self._first[:, 0].fill_(_NEVER)

    def learn_rows(self, set_index: int, received: Sequence[DeviceReceived], partials: "Sequence[Tensor]") -> bool:
        """Keep what the last dispatch brought: `received`, which was found right, and what experts make of it.

        Returns whether the same lies in place.
        """
        import torch

        same = True
        for local, landed in enumerate(self._place.landed()):
            here, at = received[local], (received[local].source.long(), received[local].token.long())
            same &= int(landed.present.sum()) == len(here.source) == int(landed.present[at].sum())
            same &= torch.equal(landed.rows[at], here.rows) and torch.equal(landed.scales[at], here.scales)
            buffer = self._place.partials[local]
            right = self._right.get((set_index, local))
            if right is None:
                right = self._right[set_index, local] = _Right(
                    landed=Landed(**{name: getattr(landed, name).clone() for name in Landed.__slots__}),
                    partials=torch.empty_like(buffer, dtype=torch.int16, memory_format=torch.contiguous_format),
                    sums=torch.empty_like(self._place.sums[set_index][local]),
                )
            else:  # in place, for a graph has the addresses
                for name in Landed.__slots__:
                    getattr(right.landed, name).copy_(getattr(landed, name))
            bits = right.partials.view(torch.bfloat16).fill_(float("nan"))
            bits[at] = partials[local]
        self._signs[set_index].zero_()
        return same

    def learn_sums(self, set_index: int, sums: "Sequence[Tensor]") -> None:
        """Keep sums that were found right, of the partials given to `learn_rows`."""
        for local, right in enumerate(sums):
            self._right[set_index, local].sums.copy_(right)

    def enqueue(self, set_index: int) -> None:
        """One round of a set, and its checks. Collective."""
        import torch

        sign = self._signs[set_index]
        self._backend.dispatch(set_index)
        for local, landed in enumerate(self._place.landed()):
            right = self._right[set_index, local]
            wrong = landed.present ^ right.landed.present
            for name in ("rows", "scales", "ids", "weights"):
                got, want = (_words(getattr(side, name)) for side in (landed, right.landed))
                if got.shape[-1]:
                    wrong |= (got != want).any(dim=-1) & right.landed.present
            self._note(local, 0, wrong.flatten())
            torch.bitwise_xor(right.partials, sign, out=self._place.partials[local].view(torch.int16))
        self._backend.combine(set_index)
        for local, sums in enumerate(self._place.sums[set_index]):
            if not len(sums):
                continue
            want = self._right[set_index, local].sums
            got = (sums.view(torch.int16) ^ sign).view(torch.bfloat16)
            equal = (got == want) | (got.isnan() & want.isnan())  # and zero equals zero
            self._note(local, 1, (~equal).any(dim=1))
        sign.bitwise_xor_(_SIGN)
        self._round.add_(1)

    def first_wrong(self) -> tuple[int, int, Mismatch] | None:
        """Round, part (0: rows, 1: sums) and words for the first wrong output of these ranks. Waits for the device."""
        when, local = min((when, local) for local, (when, *_) in enumerate(self._first.tolist()))
        if when == _NEVER:
            return None
        rank, (_, at, wrong) = self._ranks[local], self._first[local].tolist()
        if when % 2:
            total = len(self._place.sums[0][local])
            words = {"what": "a wrong combined sum", "unit": "combined rows are wrong", "source": rank, "token": at}
        else:
            sources, capacity = self._place.partials[local].shape[:2]
            total = sources * capacity
            words = {
                "what": "a row, its scales, ids or weights, or whether it came, differ from rounds before of the same "
                "inputs",
                "unit": "places of the landing buffer are such",
                "source": at // capacity,
                "token": at % capacity,
            }
        return when // 2, when % 2, Mismatch(rank=rank, wrong=wrong, total=total, **words)

    def _note(self, local: int, part: int, wrong: "Tensor") -> None:
        """Enqueue: if any of `wrong` is true and nothing was wrong before, remember that."""
        import torch

        first, count = self._first[local], wrong.sum()
        now = torch.stack((self._round * 2 + part, wrong.int().argmax(), count))
        first.copy_(torch.where((count > 0) & (now[0] < first[0]), now, first))


def _words(tensor: "Tensor") -> "Tensor":
    """The bits of a tensor in the widest integers that its rows are made of: fewer compare, and NaN equals itself."""
    import torch

    for word in (torch.int64, torch.int32):
        per_word = word.itemsize // tensor.dtype.itemsize
        places = (tensor.shape[-1], tensor.storage_offset(), *tensor.stride()[:-1])
        if per_word and tensor.stride(-1) == 1 and all(place % per_word == 0 for place in places):
            return tensor.view(word)
    return tensor
