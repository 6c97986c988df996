from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

import lightning_dist
from lightning_dist import AutoStrategy, MeshStrategy
from lightning_dist.__main__ import main
from lightning_dist.engine.common.mesh_shape import MeshShape
from lightning_dist.engine.planning.devices import DEVICES, find_device
from lightning_dist.engine.planning.search.layout import Layout
from lightning_dist.planner import _read_config, add_arguments
from lightning_dist.strategies.mesh import mesh_arguments
from recipes.gpt import GPT


def batch() -> Any:
    tokens = torch.zeros(4, 16, dtype=torch.int64)
    return tokens, tokens


WORDS = (
    "plan --module recipes.gpt:GPT --module-args width=32 num_heads=2 --data"
    " tests.unit.test_planner:batch --world-size 8 --hosts 2 --global-batch 16 --device a100"
)


def test_plans_for_a_device_and_for_here() -> None:
    module = GPT(width=32, depth=2, num_heads=2)
    asked = {"world_size": 4, "num_hosts": 2, "global_batch": 16, "num_plans": 3}
    for device in ("h100", None):
        found = lightning_dist.plan(module, batch(), device=device, **asked)  # type: ignore[arg-type]
        assert len(found.plans) == 3
        assert found.best.layout.global_batch == 16
        assert found.best.layout.mesh.world_size == 4


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.yaml"
    main([*WORDS.split(), "--price-per-hour", "36", "--budget", "10", "--out", str(out)])
    printed = capsys.readouterr().out
    assert "The best 10 of" in printed
    assert "steps in budget" in printed
    assert "activations" in printed
    MeshStrategy.from_plan(str(out), timeout_s=7.0)


def test_the_command_measures_on_a_gpu_if_there_is_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = WORDS.replace("--device a100", "--accelerator")
    with pytest.raises(SystemExit):
        main([*words.split(), "gpu"])
    assert "--accelerator gpu: torch sees no GPU" in capsys.readouterr().err

    def moved(module: torch.nn.Module, place: object) -> None:
        raise ValueError(f"moved to {place}")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(GPT, "to", moved)
    with pytest.raises(SystemExit):
        main([*words.split(), "auto"])
    assert "moved to cuda" in capsys.readouterr().err
    with pytest.raises(SystemExit):  # the CPU is where it is
        main([*words.split(), "cpu"])
    assert "moved to cpu" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 PCIe", "h100pcie"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA T400", None),
    ],
)
def test_a_gpu_that_is_measured_is_found_by_its_name(name: str, device: str | None) -> None:
    assert find_device(name) is (None if device is None else DEVICES[device])


def test_arguments_of_the_module_are_no_keys_of_the_file(tmp_path: Path) -> None:
    parser, path = ArgumentParser(), tmp_path / "ask.yaml"
    add_arguments(parser)
    path.write_text("top: 3\nefficiency: 0.6\nmodule_args:\n")
    words = ["--config", str(path), "--module-args", "efficiency=0.5", "--data-args", "top=2"]
    options = parser.parse_args(words, Namespace(words=words))
    _read_config(options)
    assert (options.top, options.efficiency) == (3, 0.6)
    assert options.module_args == ["efficiency=0.5"]


def test_arguments_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ask.yaml"
    path.write_text(
        "module: recipes.gpt:GPT\nmodule_args: {width: 32, num_heads: 2}\nworld_size: 8\n"
        "data: tests.unit.test_planner:batch\nglobal_batch: 8\ndevice: l4\ntop: 2\n"
        "schedules: gpipe\n"
    )
    main(["plan", "--config", str(path)])
    assert "The best 2 of" in capsys.readouterr().out
    for text, message in (
        ("wolrd_size: 8", "must have only these keys"),
        ("accelerator: tpu", "accelerator='tpu' is unknown"),
        ("world_size: [8", "while parsing a flow sequence"),
    ):
        path.write_text(text)
        with pytest.raises(SystemExit):
            main(["plan", "--config", str(path)])
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--memory-gib 0.0001", "lacks"),
        ("--batch-size 2", "give one of them"),
        ("--efficiency 2", "efficiency=2.0"),
        ("--module recipes.gpt:Gpt", "recipes.gpt:Gpt"),
        ("--schedules pipedream", "stale weights"),
        ("--memory-gib -1", "memory_gib=-1.0 must be a number above 0"),
        ("--device h1000", "invalid choice: 'h1000'"),
        ("--hosts 3", "num_hosts=3 does not divide the world of 8 ranks"),
        ("--world-size 0", "world_size=0"),
        ("--states-per-parameter -1", "states_per_parameter=-1"),
        ("--link-gbit 0", "a bandwidth above 0"),
        ("--link-us 5", "--link-us=5 needs --link-gbit"),
        ("--host-link-us 5", "--host-link-us=5 needs --host-link-gbit"),
        ("--memory 5", "unrecognized arguments: --memory 5"),
        ("--budget 5", "--budget and --samples-per-epoch need --price-per-hour"),
        ("--out /nowhere/plan.yaml", "--out /nowhere/plan.yaml: there is no such folder"),
        ("--config nothing.yaml", "No such file or directory: 'nothing.yaml'"),
        ("--module recipes.gpt", "Write PACKAGE:CLASS"),
        ("--module-args widht=3", "unexpected keyword argument 'widht'"),
        ("--module-args width", "'width' is no argument. Write NAME=VALUE"),
        ("--module-args width=abc", "'recipes.gpt:GPT' with {'width': 'abc'}: TypeError: "),
        ("--module-args width=-8", "'recipes.gpt:GPT' with {'width': -8}: RuntimeError: "),
        ("--module recipes.gpt:build_gpt", "The module is a Sequential. Give a LightningModule"),
    ],
)
def test_errors_of_the_command(more: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*WORDS.split(), *more.split()])
    assert message in capsys.readouterr().err


def test_a_strategy_from_a_plan() -> None:
    layout = Layout(
        MeshShape(pp=2, dp_shard=2),
        8,
        schedule="zbv",
        stages_per_rank=2,
        num_microbatches=4,
        partition=(1, 1, 2, 1),
        recomputes=True,
    )
    arguments = mesh_arguments(layout)
    pipeline, shard = arguments["pipeline"], arguments["shard"]
    assert (arguments["pp"], arguments["dp_replicate"], arguments["dp_shard"]) == (2, 1, 2)
    assert (pipeline.schedule, pipeline.num_microbatches) == ("zbv", 4)
    assert (pipeline.stages_per_rank, pipeline.partition) == (2, [1, 1, 2, 1])
    assert shard.activation_checkpointing == "full"
    found = lightning_dist.plan(
        GPT(width=32, num_heads=2), batch(), world_size=2, batch_size=4, device="a100"
    )
    strategy = MeshStrategy.from_plan(found.best)
    assert strategy.mesh_shape(2) == found.best.layout.mesh
    with pytest.raises(ValueError, match=r"\['pp'\] already"):
        MeshStrategy.from_plan(found.best, pp=2)
    with pytest.raises(ValueError, match="must multiply to the world size of 4. The nearest"):
        L.Trainer(accelerator="cpu", devices=4, strategy=MeshStrategy.from_plan(found.best))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pp": 2}, r"decides on \['pp'\]"),
        ({"replicas": 0}, "replicas=0"),
        ({"memory_gib": -1.0}, "memory_gib=-1.0"),
        ({"schedules": ["pipedream"]}, "stale weights"),
        ({"num_plans": 0}, "num_plans=0"),
        ({"states_per_parameter": -1}, "states_per_parameter=-1"),
    ],
)
def test_arguments_that_the_planner_refuses(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AutoStrategy(**arguments)


@pytest.mark.parametrize(
    ("name", "value"),
    [("efficiency", "x"), ("overlap", "x"), ("within", 3), ("between", "x"), ("recompute", "no")],
)
def test_arguments_of_a_wrong_type_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name}={value!r}"):
        lightning_dist.plan(L.LightningModule(), None, world_size=4, **{name: value})
