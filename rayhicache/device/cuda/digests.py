"""Digests of pages as one kernel a pool, beside the copies that read the same blocks.

An item is a chunk of one component of one layer, of a few pages at once: a word's coefficient
depends on its position alone, so it is worked out once for all of them, and the kernel is bound
by the memory and not by the arithmetic.
"""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch

from rayhicache.device.cuda.compiling import Kernel, compiled
from rayhicache.device.cuda.stream import CudaEvent, CudaStream
from rayhicache.device.digests import PageSums, add_with_torch, new_sums, places_of, whole_pages
from rayhicache.device.space import TransferSpace
from rayhicache.device.staging import StagedPlan, StagedTransfer
from rayhicache.memory.digest import WORD_BYTES

WARPS = 8
CHUNK_BYTES = 32_768
PAGES_AT_ONCE = 8
VECTOR_BYTES = 16
NAME = "digest_pages"

SOURCE = (
    f"""
#define WARPS {WARPS}
#define CHUNK {CHUNK_BYTES}
#define PAGES {PAGES_AT_ONCE}
"""
    + r"""
#define LANES 32

typedef unsigned long long Word;

struct Part { long long device, nbytes, layer_bytes, vectors; };
struct Place { long long position, group; };
struct Job {
    long long device_indices, pages, per_page, layers, parts, num_parts, places, sums, groups;
};

// SplitMix64 of the position, odd: as the host's `coefficients`.
__device__ __forceinline__ Word coefficient(Word word) {
    Word x = (word + 1) * 0x9E3779B97F4A7C15ull;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return (x ^ (x >> 31)) | 1;
}

// One item: which bytes of which fragment, of which pages.
struct Item {
    const long long* indices;
    const char* blocks;
    long long nbytes, per_page, pages, first, position, start, stop;

    // A page's block of that number. Pages behind the last are its twins.
    __device__ __forceinline__ const char* at(int page, long long block) const {
        const long long number = first + page < pages ? first + page : pages - 1;
        return blocks + indices[number * per_page + block] * nbytes;
    }
};

__device__ __forceinline__ void add_vectors(const Item& item, Word* sums) {
    const char* at[PAGES];
    unsigned held = 0xffffffffu;
    for (long long offset = item.start + threadIdx.x * 16; offset < item.stop;
         offset += WARPS * LANES * 16) {
        const unsigned block = (unsigned)offset / (unsigned)item.nbytes;
        if (block != held) {
            held = block;
            #pragma unroll
            for (int page = 0; page < PAGES; ++page)
                at[page] = item.at(page, block) - block * item.nbytes;
        }
        ulonglong2 words[PAGES];
        #pragma unroll
        for (int page = 0; page < PAGES; ++page)
            words[page] = __ldcs((const ulonglong2*)(at[page] + offset));
        const Word place = (Word)(item.position + offset) >> 3;
        const Word low = coefficient(place), high = coefficient(place + 1);
        #pragma unroll
        for (int page = 0; page < PAGES; ++page)
            sums[page] += words[page].x * low + words[page].y * high;
    }
}

// Blocks of any size at any address: the words are put together from bytes.
__device__ __forceinline__ void add_bytes(const Item& item, Word* sums) {
    const Word begin = item.position + item.start, end = item.position + item.stop;
    for (Word word = (begin >> 3) + threadIdx.x; word * 8 < end; word += WARPS * LANES) {
        Word values[PAGES] = {};
        for (int byte = 0; byte < 8; ++byte) {
            const Word position = word * 8 + byte;
            if (position < begin || position >= end) continue;
            const long long offset = position - item.position, block = offset / item.nbytes;
            #pragma unroll
            for (int page = 0; page < PAGES; ++page) {
                const char* from = item.at(page, block) + (offset - block * item.nbytes);
                values[page] |= (Word)(unsigned char)*from << (8 * byte);
            }
        }
        const Word factor = coefficient(word);
        #pragma unroll
        for (int page = 0; page < PAGES; ++page) sums[page] += values[page] * factor;
    }
}

// The sums of all threads go to the pages' results.
__device__ __forceinline__ void give(
    const Job& job, const Item& item, long long group, Word* sums)
{
    __shared__ Word partial[WARPS][PAGES];
    #pragma unroll
    for (int page = 0; page < PAGES; ++page) {
        #pragma unroll
        for (int step = LANES / 2; step; step /= 2)
            sums[page] += __shfl_xor_sync(0xffffffffu, sums[page], step);
        if (threadIdx.x % LANES == 0) partial[threadIdx.x / LANES][page] = sums[page];
    }
    __syncthreads();
    const long long page = item.first + threadIdx.x;
    if (threadIdx.x < PAGES && page < job.pages) {
        Word sum = 0;
        for (int warp = 0; warp < WARPS; ++warp) sum += partial[warp][threadIdx.x];
        atomicAdd((Word*)job.sums + page * job.groups + group, sum);
    }
    __syncthreads();
}

// Two blocks a multiprocessor, which leaves registers for all pages' loads to be under way at once.
extern "C" __global__ void __launch_bounds__(WARPS * LANES, 2)
digest_pages(const __grid_constant__ Job job)
{
    const Part* parts = (const Part*)job.parts;
    const Place* places = (const Place*)job.places;
    const long long batches = (job.pages + PAGES - 1) / PAGES;
    long long chunks = 0;
    for (long long p = 0; p < job.num_parts; ++p)
        chunks += (job.per_page * parts[p].nbytes + CHUNK - 1) / CHUNK;

    for (long long number = blockIdx.x; number < job.layers * chunks * batches;
         number += gridDim.x) {
        const long long layer = number / batches / chunks;
        long long chunk = number / batches % chunks, p = 0;
        for (long long mine; ; ++p) {
            mine = (job.per_page * parts[p].nbytes + CHUNK - 1) / CHUNK;
            if (chunk < mine) break;
            chunk -= mine;
        }
        const Part part = parts[p];
        const Place place = places[layer * job.num_parts + p];
        Item item;
        item.indices = (const long long*)job.device_indices;
        item.blocks = (const char*)part.device + layer * part.layer_bytes;
        item.nbytes = part.nbytes;
        item.per_page = job.per_page;
        item.pages = job.pages;
        item.first = number % batches * PAGES;
        item.position = place.position;
        item.start = chunk * CHUNK;
        const long long end = job.per_page * part.nbytes;
        item.stop = item.start + CHUNK < end ? item.start + CHUNK : end;
        Word sums[PAGES] = {};
        if (part.vectors) add_vectors(item, sums); else add_bytes(item, sums);
        give(job, item, place.group, sums);
    }
}
"""
)


class _Job(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in (
            *("device_indices", "pages", "per_page", "layers", "parts", "num_parts", "places"),
            *("sums", "groups"),
        )
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """What the kernel needs to know of a pool.

    Attributes:
        parts: `int64[components with bytes, 4], device`: address of block 0 of the first layer,
            bytes of a block, bytes from one layer to the next, and whether all is aligned.
        places: `int64[layers, components with bytes, 2], device`: `Place` of each.
        chunks: of one layer of a page.
    """

    parts: torch.Tensor
    places: torch.Tensor
    chunks: int


def table_of(space: TransferSpace, pool: str, device: torch.device) -> Table:
    """The table of a pool; it holds as long as the space."""
    memory, per_page = space.pools[pool], space.layout.blocks_per_page(pool)
    places = places_of(space, pool)
    filled = [at for at, part in enumerate(memory.spec.components) if part.block_bytes]
    parts = []
    for at in filled:
        blocks = memory.components[at]
        nbytes = memory.spec.components[at].block_bytes
        ends = (blocks.data_ptr(), nbytes, blocks.stride(0))
        whole = not any(number % VECTOR_BYTES for number in ends)
        whole = whole and not any(layer[at].position % WORD_BYTES for layer in places)
        parts.append([*ends, int(whole)])
    rows = [[[layer[at].position, layer[at].group] for at in filled] for layer in places]
    return Table(
        parts=torch.tensor(parts, dtype=torch.int64).to(device),
        places=torch.tensor(rows, dtype=torch.int64).to(device),
        chunks=sum(-(-per_page * nbytes // CHUNK_BYTES) for _, nbytes, _, _ in parts),
    )


def add_with_kernel(
    kernel: Kernel,
    table: Table,
    transfer: StagedTransfer,
    sums: torch.Tensor,
    *,
    blocks: int,
    stream: torch.cuda.Stream,
) -> None:
    """Enqueue one launch that adds what a pool's blocks have: all layers, components and pages.

    Args:
        sums: `int64[pages, layer groups], device`.
        blocks: of threads, at most.
    """
    layers, num_parts = table.places.shape[:2]
    job = _Job(
        device_indices=transfer.device_indices.data_ptr(),
        pages=sums.shape[0],
        per_page=transfer.count // sums.shape[0],
        layers=layers,
        parts=table.parts.data_ptr(),
        num_parts=num_parts,
        places=table.places.data_ptr(),
        sums=sums.data_ptr(),
        groups=sums.shape[1],
    )
    items = layers * table.chunks * -(-sums.shape[0] // PAGES_AT_ONCE)
    if items:
        kernel.launch(job, grid=min(items, blocks), threads=WARPS * 32, stream=stream)


class Digester:
    """Makes the sums of pages on one GPU. Of each copy stream one thread at a time.

    Args:
        blocks: of threads that a launch has at most; two per multiprocessor by default, which is
            enough to read at the memory's speed.
    """

    def __init__(self, device: torch.device, *, blocks: int | None = None) -> None:
        self._device = device
        self._kernel = compiled(SOURCE, NAME, device.index)
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._blocks = blocks or 2 * processors
        self._lock = threading.Lock()
        self._beside: dict[int, torch.cuda.Stream] = {}
        self._tables: WeakKeyDictionary[TransferSpace, dict[str, Table]] = WeakKeyDictionary()

    def digest(self, staged: StagedPlan, stream: CudaStream) -> PageSums:
        """See `Device.digests`: on a stream of its own, which waits for what `stream` has."""
        torch.cuda.set_device(self._device)
        pages = whole_pages(staged)
        start, done = staged.events.take(), staged.events.take()
        assert isinstance(start, CudaEvent)
        assert isinstance(done, CudaEvent)
        stream.record(start)
        beside = self._stream_beside(stream.stream)
        start.hold(beside)
        sums = {}
        with torch.cuda.stream(beside):
            for group, count in pages.items():
                there = new_sums(staged.space, group, count, self._device)
                for transfer in staged.transfers:
                    mine = staged.space.layout.pool(transfer.pool).group == group
                    if mine and transfer.count:
                        self._add(staged.space, transfer, there, beside)
                here = torch.empty(there.shape, dtype=torch.int64, pin_memory=True)
                sums[group] = here.copy_(there, non_blocking=True)
        done.event.record(beside)
        return PageSums(sums=sums, event=done)

    def _add(
        self,
        space: TransferSpace,
        transfer: StagedTransfer,
        sums: torch.Tensor,
        stream: torch.cuda.Stream,
    ) -> None:
        if self._kernel is None:
            add_with_torch(space, transfer, transfer.device_indices, sums)
            return
        with self._lock:
            known = self._tables.setdefault(space, {})
            if transfer.pool not in known:
                known[transfer.pool] = table_of(space, transfer.pool, self._device)
        table = known[transfer.pool]
        add_with_kernel(self._kernel, table, transfer, sums, blocks=self._blocks, stream=stream)

    def _stream_beside(self, stream: torch.cuda.Stream) -> torch.cuda.Stream:
        with self._lock:
            if stream.cuda_stream not in self._beside:
                self._beside[stream.cuda_stream] = torch.cuda.Stream(self._device)
            return self._beside[stream.cuda_stream]
