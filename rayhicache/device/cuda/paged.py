"""The gather of paged entries as one kernel: every section, any number of sequences, no wait.

A block of threads serves a few pages of one sequence, a warp each page: the entries of a page lie
side by side on both sides, so each section of it is one run of bytes. Where a sequence's entries
begin is the sum of the lengths before it, which each block adds up for itself: nothing has to be
known on the host.
"""

from __future__ import annotations

import ctypes

import torch

from rayhicache.device.cuda.compiling import Kernel, compiled
from rayhicache.device.paged import PagedGather

WARPS = 8
SECTIONS_MAX = 2
NAME = "gather_entries"

SOURCE = (
    f"""
#define WARPS {WARPS}
#define SECTIONS {SECTIONS_MAX}
"""
    + r"""
#define LANES 32

struct Section { long long offset, nbytes, target; };
struct Job {
    long long blocks, block_stride, num_blocks, entries, tables, table_stride, table_wide,
        lengths, length_wide, total, longest, groups, sections;
    Section section[SECTIONS];
};

__device__ __forceinline__ long long number_at(long long address, long long at, long long wide) {
    return wide ? ((const long long*)address)[at] : (long long)((const int*)address)[at];
}

// The sum of a value over all threads of the block; every thread gets it.
__device__ long long block_sum(long long value) {
    __shared__ long long sums[WARPS];
    for (int step = LANES / 2; step; step /= 2)
        value += __shfl_xor_sync(0xffffffffu, value, step);
    if (threadIdx.x % LANES == 0) sums[threadIdx.x / LANES] = value;
    __syncthreads();
    value = 0;
    for (int warp = 0; warp < WARPS; ++warp) value += sums[warp];
    return value;
}

template <typename Word>
__device__ __forceinline__ void copy_words(char* to, const char* from, long long nbytes, int lane) {
    const long long count = nbytes / (long long)sizeof(Word);
    const Word* source = (const Word*)from;
    Word* target = (Word*)to;
    long long at = lane;
    for (; at + 7 * LANES < count; at += 8 * LANES) {
        Word held[8];
        #pragma unroll
        for (int k = 0; k < 8; ++k) held[k] = source[at + k * LANES];
        #pragma unroll
        for (int k = 0; k < 8; ++k) target[at + k * LANES] = held[k];
    }
    for (; at < count; at += LANES) target[at] = source[at];
}

__device__ void copy_bytes(char* to, const char* from, long long nbytes, int lane) {
    const unsigned long long mixed =
        (unsigned long long)to | (unsigned long long)from | (unsigned long long)nbytes;
    if (mixed % 16 == 0) copy_words<uint4>(to, from, nbytes, lane);
    else if (mixed % 4 == 0) copy_words<unsigned>(to, from, nbytes, lane);
    else copy_words<char>(to, from, nbytes, lane);
}

extern "C" __global__ void gather_entries(const __grid_constant__ Job job)
{
    const long long sequence = blockIdx.x / job.groups;
    const long long first = (blockIdx.x % job.groups) * WARPS;
    long long length = job.total, start = 0;
    if (job.lengths) {
        length = number_at(job.lengths, sequence, job.length_wide);
        length = length < job.longest ? length : job.longest;
        if (first * job.entries >= length) return;
        long long before = 0;
        for (long long at = threadIdx.x; at < sequence; at += blockDim.x) {
            const long long other = number_at(job.lengths, at, job.length_wide);
            before += other > 0 ? other : 0;
        }
        start = block_sum(before);
    }
    const long long column = first + threadIdx.x / LANES, entry = column * job.entries;
    // Lengths that don't agree with their sum, or their maximum, reach no further than it says.
    const long long end = start + length < job.total ? start + length : job.total;
    const long long left = end - start - entry;
    if (left <= 0) return;
    const long long count = left < job.entries ? left : job.entries;
    const long long block =
        number_at(job.tables, sequence * job.table_stride + column, job.table_wide);
    if (block < 0 || block >= job.num_blocks) __trap();
    const char* from = (const char*)job.blocks + block * job.block_stride;
    for (long long part = 0; part < job.sections; ++part) {
        const Section& section = job.section[part];
        char* to = (char*)section.target + (start + entry) * section.nbytes;
        copy_bytes(to, from + section.offset, count * section.nbytes, threadIdx.x % LANES);
    }
}
"""
)


class _Section(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_int64) for name in ("offset", "nbytes", "target"))


class _Job(ctypes.Structure):
    _fields_ = (
        *(
            (name, ctypes.c_int64)
            for name in (
                *("blocks", "block_stride", "num_blocks", "entries", "tables", "table_stride"),
                *("table_wide", "lengths", "length_wide", "total", "longest", "groups"),
                "sections",
            )
        ),
        ("section", _Section * SECTIONS_MAX),
    )


def gather_kernel(index: int) -> Kernel | None:
    """The kernel for a GPU; None without NVIDIA's compiler package. About a second at first use."""
    return compiled(SOURCE, NAME, index)


def gather_with_kernel(kernel: Kernel, gather: PagedGather) -> tuple[torch.Tensor, ...]:
    """Gather on the calling thread's current stream: `uint8[total, entry_bytes]` per section.

    One launch; the host doesn't wait. An index within a sequence's length that is none of the
    blocks stops the GPU's work with an error, as torch's own indexing does. Where the lengths
    on the device sum to less than `total`, what is left of the targets is undefined.
    """
    assert len(gather.sections) <= SECTIONS_MAX, "the kernel's table has no more room"
    targets = tuple(
        gather.blocks.new_empty((gather.total, section.entry_bytes)) for section in gather.sections
    )
    filled = [pair for pair in zip(gather.sections, targets, strict=True) if pair[1].numel()]
    if not filled:
        return targets
    tables, lengths = _plain(gather.tables), gather.lengths
    if lengths is not None:
        lengths = _plain(lengths)
    groups = -(-gather.longest // (gather.entries * WARPS))
    job = _Job(
        blocks=gather.blocks.data_ptr(),
        block_stride=gather.blocks.stride(0),
        num_blocks=gather.blocks.shape[0],
        entries=gather.entries,
        tables=tables.data_ptr(),
        table_stride=tables.stride(0),
        table_wide=tables.dtype is torch.int64,
        lengths=0 if lengths is None else lengths.data_ptr(),
        length_wide=lengths is not None and lengths.dtype is torch.int64,
        total=gather.total,
        longest=gather.longest,
        groups=groups,
        sections=len(filled),
    )
    for at, (section, target) in enumerate(filled):
        job.section[at] = _Section(section.offset, section.entry_bytes, target.data_ptr())
    batch = 1 if lengths is None else lengths.shape[0]
    kernel.launch(
        job,
        grid=batch * groups,
        threads=WARPS * 32,
        stream=torch.cuda.current_stream(kernel.device),
    )
    return targets


def _plain(numbers: torch.Tensor) -> torch.Tensor:
    """The numbers as the kernel reads them: 32 or 64 bits, side by side in a row."""
    if numbers.dtype not in (torch.int32, torch.int64):
        numbers = numbers.long()
    return numbers if numbers.stride(-1) == 1 else numbers.contiguous()
