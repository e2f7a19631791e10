"""A copy kernel for small fragments: bulk-asynchronous copies through shared memory (sm_90+).

Each block is one warp of which one thread works: it keeps a ring of shared-memory stages full
with `cp.async.bulk` reads and empties them with `cp.async.bulk` writes. Few blocks saturate the
link, so the other SMs are the forward's. One launch moves all layers of a pool, one after the
other, and counts up a word after each, which streams wait for: nothing drains between layers, and
the host pays for one launch. Compiled at first use by NVIDIA's own packages, then taken from
their cache; there is no build step.
"""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from rayhicache.device.cuda.driver import Driver, driver
from rayhicache.device.cuda.words import Word, WordEvent

ALIGNMENT = 16
CHUNK_BYTES = 16_384
STAGES = 8
PARTS_MAX = 4
LAYERS_MAX = 4096
MIN_CAPABILITY = (9, 0)

SOURCE = r"""
#define STAGES %(stages)d
#define AHEAD (STAGES / 2)
#define LAG (STAGES - AHEAD - 1)

struct Part { long long host, device, nbytes, layer_bytes, host_layers; };
struct Job {
    long long host_indices, device_indices, count, layers, parts, record_bytes, blocks_per_page,
        first, chunk, load, word, value, counters;
    Part part[%(parts)d];
};

__device__ __forceinline__ unsigned shared_of(const void* p) {
    return (unsigned)__cvta_generic_to_shared(p);
}

__device__ __forceinline__ void await(unsigned bar, unsigned phase) {
    asm volatile(
        "{\n.reg .pred p;\nAGAIN:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%%0], %%1;\n"
        "@p bra DONE;\nbra AGAIN;\nDONE:\n}\n" :: "r"(bar), "r"(phase) : "memory");
}

// This block's way through the items: (layer, part, row, chunk of a row), layer by layer.
struct Cursor {
    unsigned layer, within;

    __device__ void step(unsigned by, unsigned items) {
        within += by;
        while (within >= items) { within -= items; ++layer; }
    }
};

// This block has moved its share of a layer; the last block to say so counts up the word. Words of
// layers come in order, since a block says so in order.
__device__ __forceinline__ void tell(const Job& job, unsigned layer) {
    unsigned* counters = (unsigned*)job.counters;
    __threadfence_system();
    if (atomicAdd(&counters[layer], 1u) == gridDim.x - 1) {
        counters[layer] = 0;
        __threadfence_system();
        asm volatile("st.release.sys.global.u32 [%%0], %%1;"
            :: "l"(job.word), "r"((unsigned)(job.value + layer)) : "memory");
    }
}

extern "C" __global__ void move_fragments(const __grid_constant__ Job job)
{
    extern __shared__ __align__(128) char ring[];
    __shared__ __align__(8) unsigned long long full[STAGES];
    __shared__ long long targets[STAGES];
    __shared__ unsigned sizes[STAGES];
    if (threadIdx.x != 0) return;
    for (int s = 0; s < STAGES; ++s)
        asm volatile("mbarrier.init.shared::cta.b64 [%%0], 1;" :: "r"(shared_of(&full[s])));
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");

    unsigned ends[%(parts)d], chunks[%(parts)d], items = 0;
    for (int p = 0; p < job.parts; ++p) {
        chunks[p] = (unsigned)((job.part[p].nbytes + job.chunk - 1) / job.chunk);
        items += (unsigned)job.count * chunks[p];
        ends[p] = items;
    }
    const long long* host_indices = (const long long*)job.host_indices;
    const long long* device_indices = (const long long*)job.device_indices;
    const unsigned per_page = (unsigned)job.blocks_per_page, layers = (unsigned)job.layers;

    const unsigned stride = gridDim.x;
    Cursor head{0, 0};
    head.step(blockIdx.x, items);
    Cursor tail = head, moved = head;
    unsigned told = 0;

    for (unsigned k = 0; tail.layer < layers; ++k) {
        if (head.layer < layers) {
            int p = 0;
            while (head.within >= ends[p]) ++p;
            const unsigned item = head.within - (p ? ends[p - 1] : 0);
            const Part& part = job.part[p];
            const unsigned row = item / chunks[p];
            const long long offset = (item - row * chunks[p]) * job.chunk;
            const long long left = part.nbytes - offset;
            const unsigned size = (unsigned)(left < job.chunk ? left : job.chunk);
            const unsigned h = (unsigned)(host_indices[row] - job.first), slot = h / per_page;
            const long long on_host = part.host
                + ((const long long*)part.host_layers)[head.layer]
                + slot * job.record_bytes + (h - slot * per_page) * part.nbytes + offset;
            const long long on_device = part.device + head.layer * part.layer_bytes
                + device_indices[row] * part.nbytes + offset;
            head.step(stride, items);
            const unsigned s = k %% STAGES;
            const unsigned bar = shared_of(&full[s]);
            // The stage's last write has read it once all but the newest few groups have.
            asm volatile("cp.async.bulk.wait_group.read %%0;" :: "n"(LAG) : "memory");
            targets[s] = job.load ? on_device : on_host;
            sizes[s] = size;
            asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%%0], %%1;"
                :: "r"(bar), "r"(size) : "memory");
            asm volatile(
                "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                "[%%0], [%%1], %%2, [%%3];"
                :: "r"(shared_of(ring + s * job.chunk)), "l"(job.load ? on_host : on_device),
                   "r"(size), "r"(bar) : "memory");
        }
        if (k < AHEAD) continue;
        const unsigned d = k - AHEAD, s = d %% STAGES;
        tail.step(stride, items);
        await(shared_of(&full[s]), (d / STAGES) & 1);
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%%0], [%%1], %%2;"
            :: "l"(targets[s]), "r"(shared_of(ring + s * job.chunk)), "r"(sizes[s]) : "memory");
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        if (d < LAG) continue;
        // All but the newest LAG writes are done: `moved` is the first that may not be.
        moved.step(stride, items);
        if (moved.layer > told) {
            asm volatile("cp.async.bulk.wait_group %%0;" :: "n"(LAG) : "memory");
            while (told < moved.layer && told < layers) tell(job, told++);
        }
    }
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    while (told < layers) tell(job, told++);
}
"""


class _Part(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in ("host", "device", "nbytes", "layer_bytes", "host_layers")
    )


class _Job(ctypes.Structure):
    _fields_ = (
        *(
            (name, ctypes.c_int64)
            for name in (
                *("host_indices", "device_indices", "count", "layers", "parts", "record_bytes"),
                *("blocks_per_page", "first", "chunk", "load", "word", "value", "counters"),
            )
        ),
        ("part", _Part * PARTS_MAX),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One component of a pool, as addresses.

    Attributes:
        host, device: address of row 0 of the pool's first layer.
        nbytes: of a block.
        layer_bytes: on the device, from one layer to the next.
        host_layers: address of `int64[layers], device`: each layer's offset from the first one's
            rows in a record.
    """

    host: int
    device: int
    nbytes: int
    layer_bytes: int
    host_layers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Which rows move, of all layers.

    Attributes:
        host_indices, device_indices: addresses of `int64[count], device`, alive until it is done.
        first: the host index of the region's first row.
        record_bytes: from one slot to the next.
        blocks_per_page: host indices a slot.
    """

    host_indices: int
    device_indices: int
    count: int
    layers: int
    first: int
    record_bytes: int
    blocks_per_page: int


class BulkKernel:
    """The kernel, loaded for the current device."""

    def __init__(self, calls: Driver, function: int) -> None:
        self._driver = calls
        self._function = function

    @staticmethod
    def can_move(sizes: list[int], layers: int) -> bool:
        """Whether such fragments can be moved: the hardware copies 16 bytes at a time."""
        whole = all(nbytes > 0 and nbytes % ALIGNMENT == 0 for nbytes in sizes)
        return whole and len(sizes) <= PARTS_MAX and layers <= LAYERS_MAX

    def new_queue(self, stream: torch.cuda.Stream, word: Word) -> BulkQueue:
        """A stream on which the kernel runs, and the word that it counts up."""
        return BulkQueue(self._driver, self._function, stream, word)


class BulkQueue:
    """Moves of the kernel that run in order. One thread at a time."""

    def __init__(self, calls: Driver, function: int, stream: torch.cuda.Stream, word: Word) -> None:
        self.stream = stream
        self._driver = calls
        self._function = function
        self._word = word
        # Zero between launches: the last block to count sets each back.
        self._counters = torch.zeros(LAYERS_MAX, dtype=torch.int32, device=stream.device)
        stream.wait_stream(torch.cuda.current_stream(stream.device))

    def launch(self, rows: Rows, parts: list[Part], *, load: bool, grid: int) -> list[WordEvent]:
        """Enqueue the move of all layers; events that pass as each layer is there.

        Args:
            grid: blocks; fewer if there is less to do.
        """
        chunk = min(max(part.nbytes for part in parts), CHUNK_BYTES)
        base = self._word.take(rows.layers)
        job = _Job(
            host_indices=rows.host_indices,
            device_indices=rows.device_indices,
            count=rows.count,
            layers=rows.layers,
            parts=len(parts),
            record_bytes=rows.record_bytes,
            blocks_per_page=rows.blocks_per_page,
            first=rows.first,
            chunk=chunk,
            load=int(load),
            word=self._word.address,
            value=base + 1,
            counters=self._counters.data_ptr(),
        )
        for at, part in enumerate(parts):
            job.part[at] = _Part(
                host=part.host,
                device=part.device,
                nbytes=part.nbytes,
                layer_bytes=part.layer_bytes,
                host_layers=part.host_layers,
            )
        items = rows.count * sum(-(-part.nbytes // chunk) for part in parts)
        self._driver.launch(
            self._function, min(grid, items), 32, STAGES * chunk, job, self.stream.cuda_stream
        )
        return [WordEvent(self._driver, self._word, base + 1 + at) for at in range(rows.layers)]


_compiling = threading.Lock()


@lru_cache(maxsize=8)
def _compiled(index: int) -> Any:
    from cuda.core import Device, Program, ProgramOptions

    device = Device(index)
    device.set_current()
    major, minor = torch.cuda.get_device_capability(index)
    options = ProgramOptions(std="c++17", arch=f"sm_{major}{minor}a")
    source = SOURCE % {"stages": STAGES, "parts": PARTS_MAX}
    return (
        Program(source, code_type="c++", options=options)
        .compile("cubin")
        .get_kernel("move_fragments")
    )


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
