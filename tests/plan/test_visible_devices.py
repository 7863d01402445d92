"""GPUs by the names of CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

import pytest

from fusionrl.plan.visible_devices import Gpu, countable, locate, nth, refuse_slices, visible_names


@pytest.mark.parametrize(
    ("value", "names", "count"),
    [
        (None, None, None),
        ("", (), None),
        ("-1", (), None),
        (" 3 , 1", ("3", "1"), None),
        ("2,-1,3", ("2",), None),  # CUDA reads no further than what is no GPU
        ("GPU-8932f937,GPU-1a", ("GPU-8932f937", "GPU-1a"), 2),
        ("MIG-GPU-8932/1/0,MIG-77", ("MIG-GPU-8932/1/0", "MIG-77"), 2),
    ],
)
def test_lists(value, names, count):
    assert visible_names(value) == names
    assert countable(value) == count


def test_a_gpu_named_twice():
    for value in ("1,1", "0,00", "GPU-a,GPU-b,GPU-a"):
        with pytest.raises(ValueError, match="named twice"):
            visible_names(value)


@pytest.mark.parametrize(
    ("value", "name", "gpu"),
    [
        (None, "5", Gpu(5, 5)),
        # The machine's GPU 3 is the first that a process sees: `set_device(3)` would fail.
        ("3,1", "3", Gpu(0, 0)),
        ("3,1", "1", Gpu(1, 1)),
        (" 3 , 1", " 1", Gpu(1, 1)),  # Ray keeps the blanks
        ("GPU-b,GPU-a", "GPU-a", Gpu(1, 1)),
        # A process sees one slice of several alone.
        ("MIG-b,MIG-a", "MIG-a", Gpu(1, 0, "MIG-a")),
        ("MIG-GPU-8932/1/0", "MIG-GPU-8932/1/0", Gpu(0, 0, "MIG-GPU-8932/1/0")),
    ],
)
def test_places(value, name, gpu):
    assert locate(value, name) == gpu
    assert gpu.environment == ({} if gpu.alone is None else {"CUDA_VISIBLE_DEVICES": name})


def test_a_gpu_that_cuda_does_not_see():
    for value, name in (("3,1", "0"), ("2,-1,3", "3"), ("", "0"), ("GPU-a", "GPU-b")):
        with pytest.raises(ValueError, match=f"CUDA_VISIBLE_DEVICES={value}: Ray gives out the GPU '{name}'"):
            locate(value, name)


def test_a_run_without_ray_takes_the_list_from_its_begin():
    assert [nth(value, 1) for value in (None, "6,7", "GPU-b,MIG-a")] == [Gpu(1, 1), Gpu(1, 1), Gpu(1, 0, "MIG-a")]
    with pytest.raises(ValueError, match="CUDA_VISIBLE_DEVICES=6,7: it names 2 GPUs, and the run needs GPU 2"):
        nth("6,7", 2)


def test_slices_are_not_connected():
    slices, whole = [Gpu(0, 0, "MIG-a"), Gpu(1, 0, "MIG-b")], [Gpu(0, 0), Gpu(1, 1)]
    refuse_slices(whole, 2, 2, "broadcast")
    refuse_slices(slices, 1, 1, "ipc")
    for values, flag in (
        ((2, 1, "ipc"), "--actor-num-gpus-per-node: 2 trainers"),
        ((1, 2, "ipc"), "--rollout-num-gpus-per-engine 2"),
        ((1, 1, "broadcast"), "--update-weight-transport broadcast"),
    ):
        with pytest.raises(ValueError, match=f"{flag}.*MIG"):
            refuse_slices(slices, *values)
