"""A copy kernel for small fragments: bulk-asynchronous copies through shared memory (sm_90+).

Each block is one warp of which one thread works: it keeps a ring of shared-memory stages full
with `cp.async.bulk` reads and empties them with `cp.async.bulk` writes. Few blocks saturate the
link, so the other SMs are the forward's. Compiled at first use by NVIDIA's own packages, then
taken from their cache; there is no build step.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from rayhicache.device.cuda.driver import Driver, driver

ALIGNMENT = 16
CHUNK_BYTES = 16_384
STAGES = 8
MIN_CAPABILITY = (9, 0)

SOURCE = r"""
#define STAGES %(stages)d
#define AHEAD (STAGES / 2)

__device__ __forceinline__ unsigned shared_of(const void* p) {
    return (unsigned)__cvta_generic_to_shared(p);
}

__device__ __forceinline__ void await(unsigned bar, unsigned phase) {
    asm volatile(
        "{\n.reg .pred p;\nAGAIN:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%%0], %%1;\n"
        "@p bra DONE;\nbra AGAIN;\nDONE:\n}\n" :: "r"(bar), "r"(phase) : "memory");
}

struct Side { long long host, device, nbytes; };

extern "C" __global__ void move_fragments(
    const long long* host_indices, const long long* device_indices, long long count,
    long long host_a, long long device_a, long long nbytes_a,
    long long host_b, long long device_b, long long nbytes_b,
    long long chunk, long long record_bytes, long long blocks_per_page, long long first,
    long long load)
{
    extern __shared__ __align__(128) char ring[];
    __shared__ __align__(8) unsigned long long full[STAGES];
    if (threadIdx.x != 0) return;
    for (int s = 0; s < STAGES; ++s)
        asm volatile("mbarrier.init.shared::cta.b64 [%%0], 1;" :: "r"(shared_of(&full[s])));
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");

    const long long chunks_a = (nbytes_a + chunk - 1) / chunk;
    const long long chunks_b = (nbytes_b + chunk - 1) / chunk;
    const long long items_a = count * chunks_a, items = items_a + count * chunks_b;
    long long mine = 0;
    for (long long i = blockIdx.x; i < items; i += gridDim.x) ++mine;

    // Where item k of this block lies on both sides, and how many bytes it has.
    auto place = [&](long long k, long long& on_host, long long& on_device, unsigned& size) {
        long long item = blockIdx.x + k * gridDim.x;
        const bool is_a = item < items_a;
        item = is_a ? item : item - items_a;
        const Side side = is_a ? Side{host_a, device_a, nbytes_a}
                               : Side{host_b, device_b, nbytes_b};
        const long long chunks = is_a ? chunks_a : chunks_b;
        const long long row = item / chunks, offset = (item %% chunks) * chunk;
        const long long left = side.nbytes - offset;
        size = (unsigned)(left < chunk ? left : chunk);
        const long long h = host_indices[row] - first;
        on_host = side.host + (h / blocks_per_page) * record_bytes
            + (h %% blocks_per_page) * side.nbytes + offset;
        on_device = side.device + device_indices[row] * side.nbytes + offset;
    };

    for (long long k = 0; k < mine + AHEAD; ++k) {
        long long on_host, on_device;
        unsigned size;
        if (k < mine) {
            place(k, on_host, on_device, size);
            const int s = k %% STAGES;
            const unsigned bar = shared_of(&full[s]);
            // The stage's last write has read it once all but the newest few groups have.
            asm volatile("cp.async.bulk.wait_group.read %%0;"
                :: "n"(STAGES - AHEAD - 1) : "memory");
            asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%%0], %%1;"
                :: "r"(bar), "r"(size) : "memory");
            asm volatile(
                "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                "[%%0], [%%1], %%2, [%%3];"
                :: "r"(shared_of(ring + s * chunk)), "l"(load ? on_host : on_device), "r"(size),
                   "r"(bar) : "memory");
        }
        const long long d = k - AHEAD;
        if (d >= 0) {
            place(d, on_host, on_device, size);
            const int s = d %% STAGES;
            await(shared_of(&full[s]), (unsigned)((d / STAGES) & 1));
            asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%%0], [%%1], %%2;"
                :: "l"(load ? on_device : on_host), "r"(shared_of(ring + s * chunk)), "r"(size)
                : "memory");
            asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        }
    }
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    __threadfence_system();
}
"""


class Side(NamedTuple):
    """One component of one layer: addresses of its row 0 on both sides, and bytes of a row."""

    host: int
    device: int
    nbytes: int


class Rows(NamedTuple):
    """Which rows move: the first `number`, and what host indices mean; see `movers.Geometry`."""

    number: int
    record_bytes: int
    blocks_per_page: int
    first: int


class BulkKernel:
    """The kernel, loaded for the current device."""

    def __init__(self, calls: Driver, function: int) -> None:
        self._driver = calls
        self._function = function

    @staticmethod
    def can_move(nbytes: int) -> bool:
        """Whether fragments of this size can be moved: the hardware copies 16 bytes at a time."""
        return nbytes > 0 and nbytes % ALIGNMENT == 0

    def launch(
        self,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        sides: Sequence[Side],
        rows: Rows,
        *,
        load: bool,
        grid: int,
        stream: torch.cuda.Stream,
    ) -> None:
        """Enqueue the move of one layer's fragments.

        Args:
            host_indices, device_indices: `int64[rows.number], device`, alive until it is done.
            sides: one or two components.
            grid: blocks; fewer if there is less to do.
        """
        first, second = sides[0], sides[1] if len(sides) > 1 else Side(0, 0, 0)
        chunk = min(max(first.nbytes, second.nbytes), CHUNK_BYTES)
        values = (
            host_indices.data_ptr(),
            device_indices.data_ptr(),
            rows.number,
            *first,
            *second,
            chunk,
            rows.record_bytes,
            rows.blocks_per_page,
            rows.first,
            int(load),
        )
        items = rows.number * sum(-(-side.nbytes // chunk) for side in sides)
        self._driver.launch(self._function, min(grid, items), 32, STAGES * chunk, values, stream)


_compiling = threading.Lock()


@lru_cache(maxsize=8)
def _compiled(index: int) -> Any:
    from cuda.core import Device, Program, ProgramOptions

    device = Device(index)
    device.set_current()
    major, minor = torch.cuda.get_device_capability(index)
    options = ProgramOptions(std="c++17", arch=f"sm_{major}{minor}a")
    program = Program(SOURCE % {"stages": STAGES}, code_type="c++", options=options)
    return program.compile("cubin").get_kernel("move_fragments")


def bulk_kernel(index: int) -> BulkKernel | None:
    """The kernel for a device; None for GPUs before Hopper, or without NVIDIA's compiler package.

    Compiles at first use, about a second.
    """
    if torch.cuda.get_device_capability(index) < MIN_CAPABILITY:
        return None
    try:
        with _compiling:
            kernel = _compiled(index)
    except ImportError:
        return None
    calls = driver()
    return BulkKernel(calls, calls.function_of(int(kernel.handle), STAGES * CHUNK_BYTES))
