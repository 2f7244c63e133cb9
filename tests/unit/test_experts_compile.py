"""The experts' kernels compile for Hopper and Blackwell without a GPU, and use what those GPUs have for it."""

import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="Triton is not installed: make triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from epcross.kernels.experts.formats import ExpertShape, Layout, WeightFormat
from epcross.kernels.experts.gather.gemm_kernels import down_kernel, gate_up_kernel
from epcross.kernels.experts.gather.index_kernel import index_kernel
from epcross.kernels.experts.gather.permute_kernels import bring_kernel, place_kernel, return_kernel
from epcross.kernels.experts.gather.specialised import STAGES
from epcross.kernels.experts.gather.specialised_down_kernels import down_specialised_kernel
from epcross.kernels.experts.gather.specialised_kernels import gate_up_specialised_kernel
from epcross.kernels.experts.gather.swiglu_kernel import swiglu_kernel
from epcross.kernels.experts.gather.tiles import Tiles, chosen_tiles, default_tiles
from epcross.kernels.experts.gather_gemm import GatherGemm
from epcross.kernels.formats import RowFormat

from tests.benchmark.expert_choices import choices  # isort: skip

TOOLS = Path(str(triton.__file__)).parent / "backends" / "nvidia" / "bin"
SHARED_BYTES, REGISTERS = 227 * 1024, 65536  # of a multiprocessor
SIZES = {"H": 7168, "I": 2048, "K": 8, "TWO_SETS": True, "PDL": True}
POINTERS = {
    "w_ptr": "*u8",
    "epoch_ptr": "*i64",
    "headers_ptr": "*i64",
    "out_ptr": "*bf16",
    **dict.fromkeys(("w_scale_ptr", "x_scale_ptr", "h_scale_ptr", "part_ptr", "weight_ptr"), "*fp32"),
}
AROUND = {
    **dict.fromkeys(("gate_up_ptr", "y_ptr"), "*bf16"),
    **dict.fromkeys(("pair_weight_ptr", "to_scale_ptr"), "*fp32"),
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def shape_at(expected: int, fp8: bool) -> ExpertShape:
    formats = (RowFormat.FP8, WeightFormat.FP8) if fp8 else (RowFormat.BF16, WeightFormat.BF16)
    return ExpertShape(
        num_local_experts=32, first_slot=0, top_k=8, hidden=7168, intermediate=2048, row_format=formats[0],
        weight_format=formats[1], capacity_rows=8, expected_rows_per_expert=expected,
    )  # fmt: skip


def compiled(kernel: Any, constants: dict[str, Any], fp8: bool, capability: int, **options: int) -> Any:
    element = "fp8e4nv" if fp8 else "bf16"
    types = {**POINTERS, "x_ptr": f"*{element}", "h_ptr": f"*{element}"}
    if "WORDS" in constants:
        types["x_ptr"] = "*i32"  # rows are copied, whatever they hold
    if kernel in {place_kernel, bring_kernel, swiglu_kernel, return_kernel}:
        types |= AROUND
    elif kernel is not index_kernel:
        width = constants["BLOCK_K"]
        types["w_desc"] = f"tensordesc<{element}[{constants['BLOCK_N']}, {width}]>"
        types["h_desc"] = f"tensordesc<{element}[{constants['BLOCK_T']}, {width}]>"
    signature, attributes = signed(kernel, constants, types)
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def signed(kernel: Any, constants: dict[str, Any], types: dict[str, str]) -> tuple[dict[str, str], dict[Any, Any]]:
    """What the arguments are, and what is known of them: addresses, strides and distances are multiples of 16."""
    signature, attributes = {}, {}
    for place, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        signature[name] = types.get(name) or ("*i32" if name.endswith("_ptr") else "i32")
        if signature[name].startswith("*") or name.endswith(("_stride", "_delta")):
            attributes[(place,)] = [["tt.divisibility", 16]]
    return signature, attributes


def usage(binary: bytes, folder: Path) -> tuple[int, int]:
    """Registers of a thread, as the GPU gives them out, and its bytes of stack."""
    file = folder / "kernel.cubin"
    file.write_bytes(binary)
    told = subprocess.run([TOOLS / "cuobjdump", "-res-usage", file], capture_output=True, text=True, check=True).stdout
    ((registers, stack),) = set(re.findall(r"REG:(\d+) STACK:(\d+)", told))
    return -(-int(registers) // 8) * 8, int(stack)


def made_for(kernel: Any, tiles: Tiles, fp8: bool) -> tuple[Any, int, int]:
    """A product on Hopper, its threads and how many programs are to share a multiprocessor."""
    gate_up = kernel is gate_up_kernel
    block_n, stages, warps, per_sm, registers = (
        (tiles.block_n, tiles.stages, tiles.warps, tiles.per_sm, tiles.regs)
        if gate_up
        else (tiles.down_block_n, tiles.down_stages, tiles.down_warps, tiles.down_per_sm, tiles.down_regs)
    )
    constants = {**SIZES, "FP8": fp8, "BLOCK_N": block_n, "BLOCK_T": tiles.block_t, "BLOCK_K": 128 if fp8 else 64}
    if gate_up:
        forms = {
            "TALL": bool(tiles.tall),
            "IN_TURN": bool(tiles.in_turn),
            "LATE": bool(tiles.late),
            "ALONE": bool(tiles.alone),
            "AHEAD": tiles.ahead,
            "BALANCE": tiles.balance,
            "E": 4,
        }
        constants |= {"POWER_OF_TWO": False, **forms}
    else:
        constants |= {"PREFETCH": tiles.prefetch, "TALL": bool(tiles.down_tall), "PAIR": bool(tiles.down_pair)}
    bound = {"maxnreg": registers} if registers else {}
    return compiled(kernel, constants, fp8, 90, num_stages=stages, num_warps=warps, **bound), 32 * warps, per_sm


@pytest.mark.parametrize("expected", [1, 8, 16, 100])
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_products_on_hopper(fp8: bool, expected: int, tmp_path: Path) -> None:
    tiles = default_tiles(shape_at(expected, fp8))
    assert tiles.block_t >= min(expected, 64)
    for kernel in (gate_up_kernel, down_kernel):
        made, _, per_sm = made_for(kernel, tiles, fp8)
        program = made.asm["ptx"]
        kind = "e4m3.e4m3" if fp8 else "bf16.bf16"
        assert re.search(rf"wgmma\.mma_async\.sync\.aligned\.m64n\d+k\d+\.f32\.{kind}", program)
        assert "cp.async.bulk.tensor" in program
        assert "griddepcontrol.wait" in program
        assert "mma.sync.aligned.m16" not in program
        assert usage(made.asm["cubin"], tmp_path)[1] == 0, "registers do not suffice"
        assert made.metadata.shared * per_sm <= SHARED_BYTES


@pytest.mark.parametrize("prefetch", [0, 1024])
def test_the_first_weights_are_brought_to_the_l2_where_asked(prefetch: int) -> None:
    made, _, _ = made_for(down_kernel, replace(default_tiles(shape_at(8, True)), prefetch=prefetch), True)
    assert ("cp.async.bulk.prefetch.L2" in made.asm["ptx"]) == (prefetch > 0)


@pytest.mark.parametrize("ahead", [0, 256])
def test_gemm1s_weights_are_fetched_before_the_index_is_there_where_asked(ahead: int) -> None:
    made, _, _ = made_for(gate_up_kernel, replace(default_tiles(shape_at(2, True)), ahead=ahead), True)
    before = made.asm["ptx"].partition("griddepcontrol.wait")[0]
    assert ("cp.async.bulk.prefetch.L2" in before) == (ahead > 0)


@pytest.mark.parametrize("kernel", [gate_up_kernel, down_kernel], ids=["GEMM1", "GEMM2"])
def test_products_of_128_pairs_that_are_scaled_alone_need_no_stack_in_their_sums(kernel: Any, tmp_path: Path) -> None:
    """Sums of 128 by 256 take 128 registers of each of 256 threads, and a product 64: two of them would not fit."""
    tiles = Tiles(
        block_t=128, tall=1, warps=8, per_sm=1, stages=4, alone=1, down_tall=1, down_pair=1, down_warps=8,
        down_per_sm=1, down_stages=4,
    )  # fmt: skip
    made, _, _ = made_for(kernel, tiles, True)
    usage(made.asm["cubin"], tmp_path)
    (body,) = sums(tmp_path / "kernel.cubin")
    assert sum("QGMMA.64x128x32" in text for text in body) == 8
    assert not spilled_in_sums(tmp_path / "kernel.cubin")


@pytest.mark.slow
@pytest.mark.parametrize(("expected", "experts"), [(1, 32), (2, 4), (8, 8), (16, 4), (32, 8), (64, 4), (256, 32)])
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_programs_that_are_tried_beside_each_other_fit_a_multiprocessor(
    fp8: bool, expected: int, experts: int, tmp_path: Path
) -> None:
    """A register too many, and the second one waits for the first to end: what was tried was not what was meant."""
    shape = replace(shape_at(expected, fp8), num_local_experts=experts)
    for choice in choices(shape):
        tiles = chosen_tiles(shape, choice)
        if tiles.specialised:
            continue
        assert GatherGemm(**choice).unsupported(shape, Layout.RANK_MAJOR) is None
        for kernel, prefix in ((gate_up_kernel, ""), (down_kernel, "down_")):
            asked = {
                f"{prefix}{name}"
                for name in ("warps", "per_sm", "stages", "regs", "tall", "late", "alone", "pair", "block_n")
            }
            if not asked & choice.keys():
                continue
            made, threads, per_sm = made_for(kernel, tiles, fp8)
            registers, stack = usage(made.asm["cubin"], tmp_path)
            assert made.metadata.shared * per_sm <= SHARED_BYTES, choice
            assert registers * threads * per_sm <= REGISTERS, (choice, registers)
            assert stack <= 288, (choice, stack)  # of what is done once a tile
            assert not spilled_in_sums(tmp_path / "kernel.cubin"), choice


def sums(file: Path) -> list[list[str]]:
    """The machine code of the innermost loops that multiply."""
    told = subprocess.run([TOOLS / "cuobjdump", "-sass", file], capture_output=True, text=True, check=True).stdout
    lines = [(int(at, 16), text) for at, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+([^;]*);", told)]
    jumps = [(int(found[1], 16), at) for at, text in lines if (found := re.search(r"\bBRA\b.*?0x([0-9a-f]+)", text))]
    loops = [(begin, end) for begin, end in jumps if begin < end]
    inner = [one for one in loops if not any(one != each and one[0] <= each[0] <= each[1] <= one[1] for each in loops)]
    bodies = [[text for at, text in lines if begin <= at <= end] for begin, end in inner]
    found = [body for body in bodies if any("GMMA" in text for text in body)]
    assert found
    return found


def spilled_in_sums(file: Path) -> list[str]:
    """Accesses to the stack in there."""
    return [text for body in sums(file) for text in body if re.search(r"\b(LDL|STL)\b", text)]


@pytest.mark.parametrize(("late", "waits"), [(0, 2), (1, 1)])
def test_tensor_cores_need_not_wait_for_the_scaling_of_up(late: int, waits: int, tmp_path: Path) -> None:
    tiles = Tiles(block_t=64, tall=1, warps=8, per_sm=1, stages=4, late=late)
    made, _, _ = made_for(gate_up_kernel, tiles, True)
    usage(made.asm["cubin"], tmp_path)
    (body,) = sums(tmp_path / "kernel.cubin")
    assert sum("GMMA" in text for text in body) == 8
    assert sum("WARPGROUP.DEPBAR" in text for text in body) == waits


BULK = (
    "tensordesc<{}[{}, 128],NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth={}, rank=2, transposed=False, "
)
BULK += "fp4_padded=False, cga_layout=[])>"
SPECIALISED = {"H": 7168, "I": 2048, "K": 8, "STAGES": STAGES, "TWO_SETS": True, "PDL": True}


@pytest.mark.parametrize("which", ["GEMM1", "GEMM2"])
def test_warps_that_each_do_one_thing(which: str, tmp_path: Path) -> None:
    """They have registers and shared memory for it, wait for each other by barriers in shared memory, and neither
    spills where it multiplies nor waits for anything but the stages and its products there."""
    kernel = gate_up_specialised_kernel if which == "GEMM1" else down_specialised_kernel
    constants = SPECIALISED | ({"POWER_OF_TWO": True} if which == "GEMM1" else {})
    types = {**POINTERS, "x_ptr": "*fp8e4nv", "w_desc": BULK.format("fp8e4nv", 128, 8)}
    out = "fp8e4nv", 64, 8
    types |= {"h_desc": BULK.format(*(out if which == "GEMM1" else ("fp8e4nv", 128, 8)))}
    types |= {"part_desc": BULK.format("bf16", 64, 16)}
    signature, attributes = signed(kernel, constants, types)
    source = GluonASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    assert made.metadata.shared <= SHARED_BYTES
    registers, stack = usage(made.asm["cubin"], tmp_path)
    assert registers * 12 * 32 <= REGISTERS
    assert stack <= 32  # of what is done once a tile
    bodies = sums(tmp_path / "kernel.cubin")
    assert len(bodies) == 2, "one for each group"
    for body in bodies:
        assert sum("QGMMA.64x128x32" in text for text in body) == 8
        assert not [text for text in body if re.search(r"\b(LDL|STL|LDG)\b", text)]
    assert "cp.async.mbarrier.arrive.noinc" in made.asm["ptx"]
    assert "cp.async.bulk.tensor.2d.global.shared" in made.asm["ptx"]


def test_products_on_blackwell() -> None:
    constants = {
        **SIZES, "FP8": True, "POWER_OF_TWO": True, "BLOCK_N": 128, "BLOCK_T": 16, "BLOCK_K": 128, "TALL": False,
        "IN_TURN": False, "LATE": False, "ALONE": False, "AHEAD": 0, "BALANCE": 0, "E": 4,
    }  # fmt: skip
    made = compiled(gate_up_kernel, constants, True, 100, num_stages=3, num_warps=4)
    assert "cp.async.bulk.tensor" in made.asm["ptx"]


@pytest.mark.parametrize(("early", "block_t"), [(False, 16), (True, 128)])
def test_the_index(early: bool, block_t: int) -> None:
    constants = {
        "E": 32, "E_PAD": 32, "K": 8, "K_PAD": 8, "ROWS": 64, "BLOCK_T": block_t, "COLUMN_BLOCKS": 16, "MAX_SPLITS": 8,
        "BALANCE": 2, "TWO_SETS": True, "HAS_HEADERS": True, "HAS_LIMIT": False, "PDL": True, "EARLY": early,
    }  # fmt: skip
    made = compiled(index_kernel, constants, False, 90, num_warps=4)
    assert "atom" in made.asm["ptx"]
    assert ("griddepcontrol.wait" in made.asm["ptx"]) == early


@pytest.mark.parametrize("rows", [1, 4, 64])
@pytest.mark.parametrize("copy", [True, False], ids=["masked", "contiguous"])
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_rows_are_brought_16_bytes_at_a_time(fp8: bool, copy: bool, rows: int, tmp_path: Path) -> None:
    """And what a program keeps of two rows leaves room for 8 programs of fp8 rows, 4 of bf16 rows."""
    sizes = {
        "WORDS": 1792 if fp8 else 3584, "WORDS_PAD": 2048 if fp8 else 4096, "SCALES": 56 if fp8 else 0,
        "SCALES_PAD": 64 if fp8 else 1, "K": 8, "K_PAD": 8, "E": 32, "TWO_SETS": True,
    }  # fmt: skip
    warps = 4 if fp8 else 8
    placing = {**sizes, "ROWS": rows, "COPY": copy, "HAS_HEADERS": True, "HAS_LIMIT": False}
    made = [compiled(place_kernel, placing, fp8, 90, num_warps=warps)]
    if not copy:
        made.append(compiled(bring_kernel, {**sizes, "E_PAD": 32, "BLOCK_T": 128}, fp8, 90, num_warps=warps))
    for each in made:
        registers, stack = usage(each.asm["cubin"], tmp_path)
        assert stack == 0
        assert registers <= (64 if rows < 64 else 80)
    words = made[-1].asm["ptx"]
    assert words.count("ld.global.v4.b32") >= 4
    assert words.count("st.global.v4.b32") == 4


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_what_lies_between_and_behind_the_products(fp8: bool, masked: bool, tmp_path: Path) -> None:
    between = {
        "I": 2048, "BLOCKS_PAD": 16, "E": 32, "E_PAD": 32, "BLOCK_T": 128, "FP8": fp8, "POWER_OF_TWO": False,
        "MASKED": masked, "LISTED": True,
    }  # fmt: skip
    behind = {"H": 7168, "K": 8, "E": 32, "E_PAD": 32, "BLOCK_N": 1024}
    for kernel, constants, most in ((swiglu_kernel, between, 64), (return_kernel, behind, 32)):
        made = compiled(kernel, constants, fp8, 90, num_warps=4)
        registers, stack = usage(made.asm["cubin"], tmp_path)
        assert stack == 0
        assert registers <= most
        assert "ld.global.v4.b32" in made.asm["ptx"]
