from __future__ import annotations

from dataclasses import replace

from lightning_dist.doctor.devices import DeviceFacts, judge_axes, judge_devices, probe_device
from lightning_dist.doctor.result import Status
from tests.unit.doctor.facts import ONE_HOST, TWO_HOSTS, with_mesh

GPUS = {
    rank: DeviceFacts(number=2, identity=f"uuid-{rank}", name="X100", memory=80_000_000_000)
    for rank in range(4)
}


def judged(**other: object) -> tuple[Status, str]:
    result = judge_devices(TWO_HOSTS, {**GPUS, 3: replace(GPUS[3], **other)})
    return result.status, result.found


def test_a_host_without_a_gpu_says_so() -> None:
    result = judge_devices(ONE_HOST, dict.fromkeys((0, 1), probe_device(ONE_HOST)))
    assert result.status is Status.OK
    assert "no GPU" in result.found


def test_each_rank_has_a_gpu_of_its_own() -> None:
    assert judged() == (Status.OK, "X100, 80 GB, one for each rank; direct access")
    status, text = judged(identity="uuid-2")
    assert status is Status.FAIL
    assert "one GPU for b (ranks 2, 3)" in text
    # The same number on another host is another GPU.
    assert judged(identity="uuid-0")[0] is Status.OK
    status, text = judged(identity="")
    assert status is Status.FAIL
    assert "no GPU is left for b (rank 3)" in text


def test_other_gpus_and_far_cores_are_warnings() -> None:
    status, text = judged(name="X90")
    assert status is Status.WARN
    assert "X100: a (ranks 0, 1), b (rank 2); X90: b (rank 3)" in text
    status, text = judged(has_near_core=False)
    assert status is Status.WARN
    assert "NUMA" in text
    assert "no direct access among those of b (rank 3)" in judged(unreachable=(1,))[1]


def test_tensor_parallel_ranks_on_several_hosts_are_a_warning() -> None:
    assert judge_axes(with_mesh(TWO_HOSTS, pp=2, tp=2), {}).status is Status.OK
    result = judge_axes(with_mesh(TWO_HOSTS, tp=4), {})
    assert result.status is Status.WARN
    assert "mesh: a, b" in result.found
