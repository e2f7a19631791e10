"""The Triton program that moves rows. Imported only where Triton is installed.

Triton reads annotations, so they are evaluated here, and arguments have none that it doesn't know.
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl


def move_rows(
    host_indices,  # address of int64[count], device
    device_indices,  # address of int64[count], device
    host_layers,  # address of int64[layers], device
    host,  # address of row 0 of the first layer
    device,  # address of row 0 of this layer
    position,  # of this layer
    count,
    first,  # host index of the region's first row
    record_bytes,
    per_page,
    nbytes,
    load: tl.constexpr,
    word_bytes: tl.constexpr,
    words: tl.constexpr,
):
    """Move one component of one layer: items are chunks of `words` words of a row.

    All rows begin and end on a word: of 8 bytes on an address of 16, or of 1.
    """
    chunks = tl.cdiv(nbytes, words * word_bytes)
    offset = tl.load(host_layers.to(tl.pointer_type(tl.int64)) + position)
    for item in range(tl.program_id(0), count * chunks, tl.num_programs(0)):
        row = item // chunks
        index = tl.load(host_indices.to(tl.pointer_type(tl.int64)) + row) - first
        block = tl.load(device_indices.to(tl.pointer_type(tl.int64)) + row)
        slot = index // per_page
        on_host = host + offset + slot * record_bytes + (index - slot * per_page) * nbytes
        on_device = device + block * nbytes
        source, target = on_device, on_host
        if load:
            source, target = on_host, on_device
        at = (item - row * chunks) * words + tl.arange(0, words)
        if word_bytes == 8:
            # The hints let the compiler join two words into one access of 16 bytes.
            inside = at < tl.multiple_of(nbytes // 8, 2)
            wide_source = tl.multiple_of(source.to(tl.pointer_type(tl.int64)), 16)
            wide_target = tl.multiple_of(target.to(tl.pointer_type(tl.int64)), 16)
            tl.store(wide_target + at, tl.load(wide_source + at, mask=inside), mask=inside)
        else:
            inside = at < nbytes
            moved = tl.load(source.to(tl.pointer_type(tl.int8)) + at, mask=inside)
            tl.store(target.to(tl.pointer_type(tl.int8)) + at, moved, mask=inside)


NOT_SPECIALIZED = (
    *("host_indices", "device_indices", "host_layers", "host", "device", "position", "count"),
    *("first", "record_bytes", "per_page", "nbytes"),
)
kernel = triton.jit(move_rows, do_not_specialize=NOT_SPECIALIZED)
