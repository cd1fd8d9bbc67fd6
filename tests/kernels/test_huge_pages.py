"""Does memory in large pages come in arrays that don't overlap, and go when they go?"""

import gc
import weakref

import torch

from kernels.cpu.huge_pages import CHUNK_BYTES, LINE_BYTES, PAGE_BYTES, HugePages


def test_arrays_lie_at_lines_and_do_not_overlap() -> None:
    memory = HugePages()
    sizes = [1, 33, 4096, 0, 100_001]
    arrays = [memory.empty(size, torch.bfloat16) for size in sizes]
    for number, array in enumerate(arrays):
        array.fill_(number)
    for number, (size, array) in enumerate(zip(sizes, arrays, strict=True)):
        assert array.shape == (size,)
        assert array.dtype == torch.bfloat16
        assert array.data_ptr() % LINE_BYTES == 0
        assert (array == number).all()
    assert arrays[0].data_ptr() % PAGE_BYTES == 0
    assert arrays[2].data_ptr() - arrays[1].data_ptr() == 128, "side by side"


def test_a_chunk_goes_with_its_last_array() -> None:
    memory = HugePages()
    half = CHUNK_BYTES // 2
    first, second = (memory.empty(half, torch.uint8) for _ in range(2))
    third, large = memory.empty(1, torch.uint8), memory.empty(half + 1, torch.uint8)
    gone = []
    for storage in (first.untyped_storage(), large.untyped_storage()):
        weakref.finalize(storage, gone.append, storage.nbytes())
    del storage
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    assert third.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
    assert large.untyped_storage().data_ptr() != third.untyped_storage().data_ptr()
    del first, large
    gc.collect()
    assert gone == [half + LINE_BYTES + PAGE_BYTES], "whole lines"
    del second
    gc.collect()
    assert gone[1:] == [CHUNK_BYTES + PAGE_BYTES]
