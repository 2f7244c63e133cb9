"""The checks of `verify`, on the device that holds the outputs: same inputs, same arithmetic, same bits.

Only the verdict is found here. What is wrong is then said by `verify.Checker` on copies: the slow way, once.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from epcross.harness.backends.base import Reduction
from epcross.harness.backends.gpu import DeviceReceived
from epcross.harness.point import Point
from epcross.harness.terms import WeightsBy
from epcross.harness.verification.device_rows import DeviceRows, bf16_value
from epcross.harness.verification.sums import Terms, terms_of
from epcross.harness.verification.symptoms import symptom
from epcross.harness.verification.verify import Checker, Mismatch
from epcross.harness.workload.batches import GroupBatch, slot_scale
from epcross.harness.workload.placement import Slots
from epcross.harness.workload.tape import Payload
from epcross.kernels.formats import row_size

if TYPE_CHECKING:
    from torch import Tensor

_U_BF16, _U_FP32 = 2.0**-8, 2.0**-24


class DeviceChecker:
    """Checks the outputs of one rank at one point; see `verify.Checker`. Checkers of one process share their `rows`."""

    def __init__(
        self,
        point: Point,
        rank: int,
        slots: Slots,
        weights_by: WeightsBy,
        reduction: Reduction | None = None,
        *,
        rows: DeviceRows,
        stable_order: bool = True,
    ) -> None:
        """Remember what the backend declares. Raises `ConfigError` as `Checker`.

        Where rows have no stable order, a row's place may be another row's in the next pair. Experts then say the same
        for each row of a rank in timed series, so that the sums are known all the same.
        """
        self.point, self.rank, self.slots = point, rank, slots
        self._host = Checker(point, rank, slots, weights_by, reduction)
        self.weights_by, self.reduction = weights_by, self._host.reduction
        self._rows = rows
        self._stable = stable_order

    def check_received(self, gb: GroupBatch, received: DeviceReceived) -> Mismatch | None:
        """Whether this rank holds the right rows, once each, with the right ids, weights and scales."""
        import torch

        if malformed := self._malformed_received(received):
            return Mismatch(
                what=malformed, rank=self.rank, wrong=1, total=1, unit="of the received tensors is malformed"
            )
        source, token, ids, weights = self._host.expected(gb)
        right = len(received.source) == len(source)
        if right:
            stride = max(1, *self.point.tokens)
            got_key, order = torch.sort(received.source.long() * stride + received.token)
            wanted = (
                (got_key, self._rows.put(source.astype(np.int64) * stride + token)),
                (received.token[order], self._rows.put(token)),  # a token beyond the stride is no other source's
                (received.ids[order], self._rows.put(ids)),
                (received.weights[order].view(torch.int32), self._rows.put(weights.view(np.int32))),
                (received.rows[order], self._rows.rows(gb, source, token)),
                (received.scales[order], self._rows.scales(gb, source, token)),
            )
            right = all(torch.equal(got, want) for got, want in wanted)
        if right:
            return None
        return self._host.check_received(gb, received.to_host()) or self._disagreement("received rows", len(source))

    def partials(self, gb: GroupBatch, received: DeviceReceived) -> "Tensor":
        """What the experts make of the received rows, bf16 [N, hidden] in their order. Only for rows found right."""
        import torch

        if gb.payload is Payload.ADVERSARIAL:
            source, token = received.source.cpu().numpy(), received.token.cpu().numpy()
            return self._rows.adversarial_partials(gb, np.full(len(source), self.rank), source, token)
        here = received.ids >= 0
        scale = self._rows.put(slot_scale(self.slots))[received.ids.long().clamp(min=0)]
        if self.weights_by is WeightsBy.COMBINE:
            factor = scale.gather(1, here.int().argmax(dim=1, keepdim=True))[:, 0]
        else:
            term = torch.where(here, received.weights * scale, torch.zeros_like(scale))
            factor = torch.zeros_like(scale[:, 0])
            for column in range(term.shape[1]):  # in the token's order, as the oracle
                factor += term[:, column]
        hidden = self.point.model.hidden
        values = self._rows.decode(self.point.dispatch_format, received.rows, received.scales, hidden)
        return (values * factor[:, None]).to(torch.bfloat16)

    def timed_partials(self, gb: GroupBatch, received: DeviceReceived) -> "Tensor":
        """What experts say in timed series, bf16 [N, hidden]; see `DeviceRows.timed_partials`."""
        source, token = received.source.cpu().numpy(), received.token.cpu().numpy()
        return self._timed(gb, np.full(len(source), self.rank), source, token)

    def _timed(self, gb: GroupBatch, rank: Any, source: Any, token: Any) -> "Tensor":
        if not self._stable:
            source, token = np.zeros_like(source), np.zeros_like(token)
        return self._rows.timed_partials(gb, rank, source, token)

    def check_combined(self, gb: GroupBatch, combined: "Tensor", *, timed: bool = False) -> Mismatch | None:
        """Whether this rank's sums are those of its tokens' partials; of `timed_partials` if `timed`."""
        import torch

        shape = (self.point.tokens[self.rank], self.point.model.hidden)
        if malformed := _malformed("combined is", combined, shape, torch.bfloat16):
            return Mismatch(
                what=malformed, rank=self.rank, wrong=1, total=1, unit="of the combined tensor is malformed"
            )
        # each term by itself: given partials differ from rank to rank
        terms = terms_of(
            replace(gb, payload=Payload.ADVERSARIAL) if timed else gb, self.rank, self.slots, self.weights_by
        )
        exact_weights = gb.payload is not Payload.RANDOM or (timed and self.weights_by is WeightsBy.EXPERTS)
        by_bits = self.reduction.exact or exact_weights
        total, magnitude = self._sums(gb, terms, timed=timed, magnitudes=not by_bits)
        want = total.to(torch.bfloat16)
        if by_bits:
            bad = ~((combined == want) | (combined.isnan() & want.isnan()))  # and zero equals zero
        else:
            unit = _U_BF16 if self.reduction.accumulate == "bf16" else _U_FP32
            bound = terms.count * (unit + 2 * _U_FP32) * magnitude + _U_BF16 * total.abs()
            bad = ~((combined.float() - total).abs() <= bound)
        if not bool(bad.any()):
            return None
        row, column = bad.nonzero()[0].tolist()
        got, wanted = (int(t[row, column].view(torch.int16)) & 0xFFFF for t in (combined, want))
        bits = combined[row].contiguous().view(torch.int16).cpu().numpy().view(np.uint16)
        like = "" if timed else symptom(gb, self.rank, self.slots, self.weights_by, row, bits)
        return Mismatch(
            what="a wrong combined sum" + (" in a timed series" if timed else ""),
            rank=self.rank,
            source=self.rank,
            token=row,
            column=column,
            got=f"{bf16_value(got)} (0x{got:04x})",
            want=f"{bf16_value(wanted)} (0x{wanted:04x})",
            wrong=int(bad.any(dim=1).sum()),
            total=shape[0],
            unit="combined rows are wrong" + like,
        )

    def _sums(self, gb: GroupBatch, terms: Terms, *, timed: bool, magnitudes: bool) -> "tuple[Tensor, Tensor]":
        """As `sums.Sums.of`, for all tokens: unrounded sums, and the magnitudes of their terms if asked for, else 0."""
        import torch

        hidden = self.point.model.hidden
        token = np.arange(self.point.tokens[self.rank])
        source = np.full(len(token), self.rank)
        total = torch.zeros((len(token), hidden), dtype=torch.float32, device=self._rows.device)
        magnitude = torch.zeros_like(total)
        given = timed or gb.payload is Payload.ADVERSARIAL
        values = total
        if not given:
            rows, scales = self._rows.rows(gb, source, token), self._rows.scales(gb, source, token)
            values = self._rows.decode(self.point.dispatch_format, rows, scales, hidden)
        for step in range(terms.count):
            made_by = terms.rank[:, step]
            if given:
                partials = self._timed if timed else self._rows.adversarial_partials
                partial = partials(gb, np.maximum(made_by, 0), source, token)
            else:
                partial = (values * self._rows.put(terms.scale[:, step, None])).to(torch.bfloat16)
            term = partial.float() * self._rows.put(terms.weight[:, step, None])
            term[self._rows.put(made_by < 0)] = 0
            total = total + term
            if self.reduction.accumulate == "bf16":
                total = total.to(torch.bfloat16).float()
            if magnitudes:
                magnitude += term.abs()
        return total, magnitude

    def _malformed_received(self, received: DeviceReceived) -> str:
        import torch

        size = row_size(self.point.dispatch_format, self.point.model.hidden)
        count = len(received.source) if getattr(received, "source", None) is not None else 0
        top_k = self.point.model.top_k
        shapes = {
            "source": ((count,), torch.int32),
            "token": ((count,), torch.int32),
            "ids": ((count, top_k), torch.int32),
            "weights": ((count, top_k), torch.float32),
            "rows": ((count, size.padded_row_bytes), torch.uint8),
            "scales": ((count, size.padded_scale_bytes), torch.uint8),
        }
        found = [
            _malformed(f"received {name} are", getattr(received, name, None), shape, dtype)
            for name, (shape, dtype) in shapes.items()
        ]
        return "; ".join(filter(None, found))

    def _disagreement(self, what: str, total: int) -> Mismatch:
        return Mismatch(
            what=f"the check on the GPU found the {what} wrong and the one on the CPU did not",
            rank=self.rank,
            wrong=1,
            total=max(total, 1),
            unit=what,
        )


def _malformed(what: str, tensor: object, shape: tuple[int, ...], dtype: object) -> str:
    """How a tensor differs from its declared form; empty if it does not. Backends are other people's code."""
    got_shape, got_dtype = tuple(getattr(tensor, "shape", ())), getattr(tensor, "dtype", None)
    if got_dtype is dtype and got_shape == shape:
        return ""
    got = f"a {type(tensor).__name__}" if got_dtype is None else f"{got_dtype} {got_shape}"
    return f"{what} {got}, not {dtype} {shape}"
