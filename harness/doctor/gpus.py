"""What NVIDIA's tools say of the GPUs of a node, as values. Sources: the output of `nvidia-smi -q -x`, of
`nvidia-smi topo -p2p r` and of `nvidia-smi nvlink --status`."""

import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import dataclass

NO_CLUSTER = "00000000-0000-0000-0000-000000000000"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """What a GPU says of the NVLink fabric that it is part of."""

    state: str = ""  # Completed, In Progress, Not Started, N/A
    status: str = ""  # Success, or what failed
    clique: str = ""
    cluster: str = ""  # UUID; empty for a domain of one node

    @property
    def is_absent(self) -> bool:
        """Whether this GPU has no fabric that anybody manages."""
        return self.state.lower() in ("", "n/a", "not supported", "notsupported")

    @property
    def is_ready(self) -> bool:
        """Whether it has joined its fabric."""
        return self.state.lower() == "completed" and self.status.lower() in ("success", "n/a", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU of a node."""

    index: int
    uuid: str
    name: str
    memory_bytes: int = 0
    free_bytes: int = 0
    mig: bool = False
    sm_mhz: int = 0
    max_sm_mhz: int = 0
    throttle: tuple[str, ...] = ()  # reasons that are active, idle left out
    links: int = 0  # active NVLinks
    dead_links: int = 0
    fabric: Fabric = Fabric()
    processes: tuple[int, ...] = ()  # that use it
    holders: tuple[str, ...] = ()  # of its lock: who measures on it, or checks something


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpus:
    """All GPUs of a node."""

    driver: str
    cuda: str
    gpus: tuple[Gpu, ...]


def parse_query(text: str) -> Gpus:
    """From `nvidia-smi -q -x`.

    Raises:
        ValueError: it is no such document.
    """
    try:
        root = ET.fromstring(text)
    except ET.ParseError as error:
        raise ValueError(f"nvidia-smi -q -x wrote no XML ({error})") from error
    return Gpus(
        driver=_text(root, "driver_version"),
        cuda=_text(root, "cuda_version"),
        gpus=tuple(_gpu(number, node) for number, node in enumerate(root.iter("gpu"))),
    )


def parse_peers(text: str) -> list[list[str]]:
    """From `nvidia-smi topo -p2p r`: a word for each pair; OK is good, X is the GPU itself.

    Raises:
        ValueError: it is no square matrix.
    """
    rows = [line.split() for line in _plain(text).splitlines() if re.match(r"\s*GPU\d+\s+(?!GPU)\S", line)]
    matrix = [row[1 : len(rows) + 1] for row in rows]
    if not matrix or any(len(row) != len(matrix) for row in matrix):
        raise ValueError("nvidia-smi topo -p2p wrote no matrix")
    return matrix


def parse_links(text: str) -> dict[str, tuple[int, int]]:
    """From `nvidia-smi nvlink --status`: UUID -> active and inactive links."""
    found: dict[str, tuple[int, int]] = {}
    uuid = ""
    for line in text.splitlines():
        if named := re.match(r"GPU \d+: .*\(UUID: ([^)]+)\)", line):
            uuid = named[1]
            found[uuid] = (0, 0)
        elif uuid and re.match(r"\s+Link \d+:", line):
            active, inactive = found[uuid]
            is_active = "inactive" not in line.lower()
            found[uuid] = (active + is_active, inactive + (not is_active))
    return found


def _gpu(number: int, node: ET.Element) -> Gpu:
    fabric = _child(node, "fabric")
    memory = _child(node, "fb_memory_usage")
    mig = _child(node, "mig_mode")
    clocks, most = _child(node, "clocks"), _child(node, "max_clocks")
    cluster = _text(fabric, "clusteruuid")
    return Gpu(
        index=number,
        uuid=_text(node, "uuid"),
        name=_text(node, "product_name"),
        memory_bytes=_bytes(_text(memory, "total")),
        free_bytes=_bytes(_text(memory, "free")),
        mig=_text(mig, "current_mig").lower() == "enabled",
        sm_mhz=_number(_text(clocks, "sm_clock")),
        max_sm_mhz=_number(_text(most, "sm_clock")),
        throttle=tuple(_throttle(node)),
        fabric=Fabric(
            state=_text(fabric, "state"),
            status=_text(fabric, "status"),
            clique=_text(fabric, "cliqueid"),
            cluster="" if cluster.lower() in ("", "n/a", NO_CLUSTER) else cluster,
        ),
        processes=tuple(_number(_text(process, "pid")) for process in node.iter("process_info")),
    )


def _throttle(node: ET.Element) -> Iterator[str]:
    """Active reasons by their names; older drivers call them throttle reasons, newer ones event reasons."""
    for parent in ("clocks_event_reasons", "clocks_throttle_reasons"):
        reasons = _child(node, parent)
        for reason in reasons if reasons is not None else ():
            name = re.sub(r"^clocks_(event|throttle)_reasons?_", "", reason.tag)
            if (reason.text or "").strip().lower() == "active" and name not in (
                "gpu_idle",
                "applications_clocks_setting",
            ):
                yield name


def _child(node: ET.Element | None, name: str) -> ET.Element | None:
    """The child of that name, whatever its capitals and underscores: drivers differ in them."""
    plain = name.replace("_", "")
    for child in node if node is not None else ():
        if child.tag.lower().replace("_", "") == plain:
            return child
    return None


def _text(node: ET.Element | None, name: str) -> str:
    child = _child(node, name)
    return (child.text or "").strip() if child is not None else ""


def _number(text: str) -> int:
    found = re.match(r"\d+", text)
    return int(found[0]) if found else 0


def _bytes(text: str) -> int:
    return _number(text) * (1 << 20)  # "143771 MiB"


def _plain(text: str) -> str:
    """Without the escape sequences that some versions colour their headings with."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)
