"""The study of stale weights: that it trains what it says, and counts time as the schedules do."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_dist import OuterOptimizer
from lightning_dist.engine.data_parallel.local_config import LocalConfig
from lightning_dist.engine.planning.links import Link
from lightning_dist.engine.splitting.config import PipelineConfig
from recipes.gpt import build_gpt, warmup_and_decay
from recipes.staleness.clock import CLOCKED, update_times
from recipes.staleness.lockstep import Lockstep
from recipes.staleness.network import Network, updates_until
from recipes.staleness.optimizers import LEARNING_RATE, OPTIMIZERS, adamw
from recipes.staleness.replicas import Replicas, ServedWorkers
from recipes.staleness.results import Results
from recipes.staleness.summary import curves, network_table, price, table
from recipes.staleness.training import Look, Sizes, layers_of_stages, train
from recipes.staleness.trial import METHODS, SYNC, TWO_VERSIONS, Trial, trials
from recipes.study_staleness import main
from recipes.text import load_text, split_text
from tests.helpers.oracle import foresee_at, train_late, train_sequentially

SMALL = Sizes(num_updates=6, num_looks=3, batch_size=2, sequence_length=8, width=8, depth=2)
NUM_STAGES = 3
CORRECTION_STEPS = 5
BY_NAME = {method.name: method for method in METHODS}


def rate(update: int) -> float:
    return 0.1 * 0.9**update


def sgd(layers: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(layers.parameters(), lr=rate(0), momentum=0.9)]


def make_model() -> nn.Sequential:
    torch.manual_seed(5)
    layers = (nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.Tanh()) for _ in range(NUM_STAGES))
    return nn.Sequential(*layers).double()


def make_batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    draws = (torch.randn(2, 3, 4, generator=generator, dtype=torch.float64) for _ in range(9))
    return [(x, y) for x, y in draws]


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def in_lockstep(config: PipelineConfig, layers_per_stage: list[int]) -> dict[str, Tensor]:
    """Trains, and gives the weights that the updates reported."""
    told: dict[int, dict[str, Tensor]] = {}

    def on_update(count: int, weights: dict[str, Tensor]) -> None:
        told.setdefault(count, {}).update({n: w.clone() for n, w in weights.items()})

    lockstep = Lockstep(make_model(), config, layers_per_stage, sgd, loss, rate, on_update)
    batches = make_batches()
    for batch in batches:
        lockstep.train_batch(batch)
    lockstep.drain()
    assert sorted(told) == list(range(1, len(batches) + 1))
    depth = len(layers_per_stage) - 1
    if config.schedule == "pipedream" and config.weight_versions != "vertical_sync":
        for stage, found in enumerate(lockstep.staleness):
            assert list(found) == [min(b, depth - stage) for b in range(len(batches))]
    return told[len(batches)]


def assert_equal(actual: dict[str, Tensor], model: nn.Module) -> None:
    expected = dict(model.named_parameters())
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", ["pipedream", "no stash", "vertical sync", "lr", "predict"])
def test_lockstep_equals_the_oracle(name: str) -> None:
    method = BY_NAME[name]
    actual = in_lockstep(method.config(CORRECTION_STEPS), [1] * NUM_STAGES)
    model = make_model()
    stages = [copy.deepcopy(layer) for layer in model]
    optimizers = [sgd(stage)[0] for stage in stages]

    def set_rates(b: int) -> None:
        for stage, optimizer in enumerate(optimizers):
            staleness = max(1, NUM_STAGES - 1 - stage)
            factor = staleness ** (min(b / CORRECTION_STEPS, 1.0) - 1.0) if name == "lr" else 1.0
            optimizer.param_groups[0]["lr"] = rate(b) * factor

    train_sequentially(
        stages,
        optimizers,
        make_batches(),
        F.mse_loss,
        drains=(),
        weight_versions=method.weight_versions,
        before_step=set_rates,
        foresee=foresee_at(rate) if name == "predict" else None,
    )
    assert_equal(actual, nn.Sequential(*stages))


@pytest.mark.parametrize("name", ["2bw", "2bw, predict"])
def test_lockstep_of_2bw_equals_the_oracle(name: str) -> None:
    actual = in_lockstep(BY_NAME[name].config(1), [2, 1])
    model = make_model()
    (optimizer,) = sgd(model)

    def set_rate(b: int) -> None:
        optimizer.param_groups[0]["lr"] = rate(b)

    foresee = foresee_at(rate) if BY_NAME[name].predicts else None
    train_late(model, optimizer, make_batches(), F.mse_loss, (), set_rate, foresee=foresee)
    assert_equal(actual, model)


def test_a_synchronous_trial_is_a_plain_loop() -> None:
    looks = train(Trial(SYNC, "adamw", 1, 0.5, seed=4), SMALL)
    assert [look.num_updates for look in looks] == [2, 4, 6]
    torch.manual_seed(4)
    model = build_gpt(width=8, depth=2)
    (optimizer,) = adamw(model)
    text, held_out = split_text(load_text())
    generator = torch.Generator().manual_seed(4)
    for update in range(6):
        starts = torch.randint(len(text) - 8, (2,), generator=generator)
        windows = torch.stack([text[start : start + 9] for start in starts])
        optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = (
            0.5 * LEARNING_RATE * warmup_and_decay(update, 1, 6)
        )
        optimizer.zero_grad()
        _nats(model, windows).backward()
        optimizer.step()
    places = torch.linspace(0, len(held_out) - 9, 128).long()
    windows = torch.stack([held_out[start : start + 9] for start in places])
    expected = float(_nats(model, windows).detach()) / math.log(2)
    assert looks[-1].bits_per_byte == pytest.approx(expected, abs=1e-5)


def _nats(model: nn.Module, windows: Tensor) -> Tensor:
    return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


@pytest.mark.parametrize("optimizer", ["nadam", "muon"])
def test_each_optimizer_trains_all_stages(optimizer: str) -> None:
    looks = train(Trial(BY_NAME["pipedream"], optimizer, 2, 1.0, seed=0), SMALL)
    losses = [look.bits_per_byte for look in looks]
    assert losses[-1] < losses[0] < 8.2


def test_muon_takes_the_matrices_of_blocks_alone() -> None:
    first, second = OPTIMIZERS["muon"](build_gpt(width=8, depth=1))
    assert [p.shape for g in first.param_groups for p in g["params"]] == [
        (24, 8),
        (8, 8),
        (32, 8),
        (8, 32),
    ]
    assert [len(g["params"]) for g in second.param_groups] == [2, 3]


def test_each_training_is_done_once() -> None:
    found = list(trials(["adamw", "muon"], METHODS, [2, 4], [1.0], range(2)))
    assert len(found) == len(set(found)) == 2 * ((10 * 2 + 3) + (9 * 2 + 2))
    assert not any(t.optimizer == "muon" and t.method.predicts for t in found)


def test_the_clock_is_the_closed_form() -> None:
    count, n = 20, 4
    times = {c.name: update_times(c, n, count) for c in CLOCKED}
    per_rank = 4  # micro-batches
    m = per_rank * n
    assert times["sync, 1f1b"][-1] == pytest.approx(count * (m + n - 1) / (m * n))
    assert times["sync, zbv"][-1] == pytest.approx(count * (6 * m + n - 1) / (6 * m * n))
    assert times["pipedream"] == pytest.approx([(b + n) / n for b in range(count)])
    assert times["2bw"][-1] == pytest.approx((count * n + n - 1) / (n * n))
    assert times["no stash"][-1] > 1.2 * times["pipedream"][-1]


def test_the_clock_of_links_is_the_closed_form() -> None:
    # A link of 1 GB/s without latency; 5 ms for a batch; 4 MB of weights, 1 MB of activations.
    network = Network(Link(0.0, 1e9), 5e-3, 4_000_000, 1_000_000)
    times = {c.name: update_times(c, 2, 20, network) for c in CLOCKED}
    average = 4e6 / 1e9 / 5e-3  # of two ranks, each sends half of it twice
    assert times["sync, replicas"][-1] == pytest.approx(20 * (1 / 2 + average - 1 / 3))
    assert times["server"][-1] == pytest.approx(20 * (1 / 2 + average))
    assert times["diloco, 5"][-1] == pytest.approx(20 / 2 + 4 * average)
    assert times["local sgd, 20"][:19] == pytest.approx([(u + 1) / 2 for u in range(19)])
    assert times["local sgd, 20"][-1] == pytest.approx(20 / 2 + average)
    free = {c.name: update_times(c, 2, 20)[-1] for c in CLOCKED}
    assert free["diloco, 5"] == free["sync, replicas"] == pytest.approx(10.0)
    # The first micro-batch of 8 comes to the last stage, and its gradient comes back.
    there_and_back = 2 * (1e6 / 8 / 1e9 / 5e-3)
    each = free["sync, 1f1b"] / 20 + there_and_back
    assert each <= times["sync, 1f1b"][-1] / 20 + 1e-9 < free["sync, 1f1b"] / 20 + average


def test_updates_until_a_loss() -> None:
    looks, losses = (10, 20, 30), (5.0, 4.0, 3.5)
    assert updates_until(5.5, looks, losses) == 10
    assert updates_until(4.5, looks, losses) == 16
    assert updates_until(4.0, looks, losses) == 20
    assert updates_until(3.0, looks, losses) is None


def test_the_table_of_links_marks_the_fastest(tmp_path: Path) -> None:
    found = list(curves(fill(tmp_path / "results.csv", Sizes(8, 2)), "adamw", [2], [0.5], range(2)))
    networks = {"slow": Network(Link(0.0, 1e6), 1.0, 4_000_000, 100_000)}
    lines = network_table(found, 2, networks, 2.6).splitlines()
    assert lines[0] == "| | bits per byte | slow |"
    assert [line.count("**") for line in lines[2:]] == [0, 2, 0, 0]  # zbv
    assert network_table(found, 2, networks, 1.0).count("never") == 4


@pytest.mark.parametrize("outer", [None, OuterOptimizer()])
def test_replicas_equal_a_plain_loop(outer: OuterOptimizer | None) -> None:
    told: dict[int, dict[str, Tensor]] = {}
    local = LocalConfig(3, outer=outer)
    replicas = Replicas(make_model(), 2, local, sgd, loss, rate, told.__setitem__)
    models, weights = [make_model(), make_model()], make_model()
    optimizers = [sgd(model)[0] for model in models]
    settings = {"lr": 1.0} if outer is None else {"lr": 0.7, "momentum": 0.9, "nesterov": True}
    steps = torch.optim.SGD(weights.parameters(), **settings)  # type: ignore[arg-type]
    for count, batch in enumerate(make_batches(), 1):
        rows = tuple(torch.cat([tensor, tensor + 1.0])[:4] for tensor in batch)
        replicas.train_batch(rows)
        for index, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.param_groups[0]["lr"] = rate(count - 1)
            optimizer.zero_grad()
            loss(model, [tensor[index::2] for tensor in rows]).backward()
            optimizer.step()
        if count % 3 == 0:
            for p, *same in zip(
                weights.parameters(), *(m.parameters() for m in models), strict=True
            ):
                p.grad = p.detach() - sum(q.detach() for q in same) / 2
            steps.step()
            for model in models:
                model.load_state_dict(weights.state_dict())
    assert_equal(told[9], weights)


def test_workers_of_a_server_are_late_by_the_others() -> None:
    told: dict[int, dict[str, Tensor]] = {}
    workers = ServedWorkers(make_model(), 2, sgd, loss, rate, told.__setitem__)
    model = make_model()
    (optimizer,) = sgd(model)
    versions = [copy.deepcopy(model)]
    for count, batch in enumerate(make_batches(), 1):
        workers.train_batch([tensor[:2] for tensor in batch])
        for index in range(2):
            late = versions[max(0, len(versions) - 2)]  # each worker has pulled one push ago
            late.zero_grad()
            loss(late, [tensor[index : index + 1] for tensor in batch]).backward()
            for own, pushed in zip(model.parameters(), late.parameters(), strict=True):
                own.grad = pushed.grad
            optimizer.param_groups[0]["lr"] = rate(count - 1)
            optimizer.step()
            versions.append(copy.deepcopy(model))
    assert_equal(told[9], model)


def test_the_stages_divide_the_blocks() -> None:
    assert layers_of_stages(8, 4) == [3, 2, 2, 3]
    assert layers_of_stages(8, 1) == [10]
    with pytest.raises(ValueError, match="stages=3 must divide the 8 blocks"):
        layers_of_stages(8, 3)


def fill(path: Path, sizes: Sizes) -> Results:
    """Writes results of two seeds; the smaller rate is better, with the larger one 2BW diverges."""
    results = Results(path, sizes)
    for trial in trials(["adamw"], [SYNC, TWO_VERSIONS], [2], [1.0, 0.5], range(2)):
        base = 3.0 + trial.rate_factor + trial.seed / 10
        last = math.inf if trial.method is TWO_VERSIONS and trial.rate_factor == 1.0 else base - 1.0
        results.add(trial, [Look(count, loss) for count, loss in zip(sizes.looks, (base, last))])  # noqa: B905
    return results


def test_results_are_read_back_and_kept_apart(tmp_path: Path) -> None:
    sizes, path = Sizes(8, 2), tmp_path / "some" / "results.csv"
    written = fill(path, sizes)
    trial = Trial(SYNC, "adamw", 1, 0.5, 1)
    assert (
        Results(path, sizes).curve(trial)
        == written.curve(trial)
        == [
            Look(4, 3.6),
            Look(8, 2.6),
        ]
    )
    assert trial not in Results(path, Sizes(9, 2))
    written.add(trial, [Look(4, 2.0), Look(8, 1.0)])  # by another process, say
    assert Results(path, sizes).curve(trial) == [Look(4, 2.0), Look(8, 1.0)]


def test_the_best_rate_counts(tmp_path: Path) -> None:
    results = fill(tmp_path / "results.csv", Sizes(8, 2))
    found = list(curves(results, "adamw", [2], [1.0, 0.5], range(2)))
    assert [curve.rate_factor for curve in found] == [0.5] * 4
    assert found[0].means == pytest.approx([3.55, 2.55])
    assert table(found, [2]).splitlines()[2:] == [
        "| sync, 1f1b | 2.550 ± 0.050 (rate x 0.5) | 0.562 |",
        "| sync, zbv | 2.550 ± 0.050 (rate x 0.5) | 0.510 |",
        "| sync, replicas | 2.550 ± 0.050 (rate x 0.5) | 0.500 |",
        "| 2bw | 2.550 ± 0.050 (rate x 0.5) | 0.531 |",
    ]
    only = list(curves(results, "adamw", [2], [1.0], range(2)))
    assert [curve.final for curve in only] == ["3.050 ± 0.050"] * 3 + ["diverged"]
    assert not list(curves(results, "adamw", [2], [1.0], range(3)))


def test_what_stale_weights_cost_is_the_difference_to_synchronous_training(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.csv", Sizes(8, 2))
    for method, stages, last in [
        (SYNC, 1, 2.0),
        (BY_NAME["pipedream"], 2, 2.125),
        (BY_NAME["pipedream"], 4, 2.25),
    ]:
        results.add(Trial(method, "adamw", stages, 1.0, 0), [Look(4, 3.0), Look(8, last)])
    found = list(curves(results, "adamw", [2, 4, 8], [1.0], [0]))
    assert price(found, 2) == "Stale weights cost 0.125 bits per byte (pipedream, 2 stages)."
    assert price(found, 4) == "Stale weights cost 0.250 bits per byte (pipedream, 4 stages)."
    assert price(found, 8) is None, "pipedream was not trained on eight"


def test_redrawing_trains_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    batch = Sizes(1, 1).batch_tokens
    fill(tmp_path / "results.csv", Sizes(8, 2))
    words = f"--redraw --tokens={8 * batch} --looks=2 --seeds=2 --stages=2 --optimizers=adamw"
    main([*words.split(), "--rates", "1", "0.5", f"--out={tmp_path}"])
    assert "| 2bw | 2.550 ± 0.050 (rate x 0.5) | 0.531 |" in (tmp_path / "table.md").read_text()
    assert "2bw" in capsys.readouterr().out
    assert (tmp_path / "adamw.png").stat().st_size > 10_000
