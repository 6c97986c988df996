"""Find the fastest layout of a module on a machine: ``lightning_dist.plan``, as a command too.

The module runs on this process alone, or, for a device of the table, not at all.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import yaml

from lightning_dist.engine.common.names import check_choice, check_count, check_positive
from lightning_dist.engine.planning.devices import DEVICES, PCIE, find_device
from lightning_dist.engine.planning.links import Link, LinksByKind
from lightning_dist.engine.planning.search.machine import Machine
from lightning_dist.engine.planning.search.plan import Price, Ranking
from lightning_dist.engine.planning.search.search import Request, schedule_names, search
from lightning_dist.engine.sharding.deferred_init.api import deferred_init
from lightning_dist.engine.tensors.skeleton import skeleton_of
from lightning_dist.engine.tensors.tree import map_tensors
from lightning_dist.strategies.mesh_runtime.measuring.costs import (
    Measurement,
    memory_of,
    tensor_sizes_of,
)

_LATENCY_US = 20.0
_ACCELERATORS = ("auto", "cpu", "gpu")
_GLOO, _ETHERNET, _FABRIC = Link(50e-6, 2e9), Link(50e-6, 1.25e9), Link(20e-6, 50e9)


def plan(
    module: pl.LightningModule,
    batch: Any,
    *,
    world_size: int,
    num_hosts: int = 1,
    memory_gib: float | None = None,
    global_batch: int | None = None,
    batch_size: int | None = None,
    device: str | None = None,
    efficiency: float = 0.4,
    within: Link | None = None,
    between: Link | None = None,
    processors: float | None = None,
    overlap: float | None = None,
    schedules: Sequence[str] | None = None,
    recompute: bool = True,
    states_per_parameter: int = 2,
    num_plans: int = 10,
) -> Ranking:
    """Finds the fastest layouts of a module, on ranks that need not be there.

    Args:
        module: The module, as for ``trainer.fit``. Without ``device`` its ``configure_model`` is
            called, and it is as before otherwise.
        batch: A batch as ``training_step`` gets it. Its samples are the largest micro-batch that is
            measured.
        world_size: Number of all ranks.
        num_hosts: Number of hosts, each with as many ranks.
        memory_gib: GiB that a rank may use; None takes the device's memory, or on a CPU this
            host's, divided by the ranks of a host.
        global_batch: Samples of an update.
        batch_size: Samples of a loader's batch, in place of ``global_batch``.
        device: Name of a device of :data:`.devices.DEVICES`, for which operations are counted;
            None measures time on the module's device, to which the batch is moved.
        efficiency: Share of the device's speed that the model reaches. Only with ``device``.
        within: Link between ranks of a host; None takes the device's, or 2 GB/s for a CPU.
        between: Link of a host; None takes 400 Gbit/s for a device, 10 Gbit/s for a CPU.
        processors: Ranks of a host that compute at the same time; None for all.
        overlap: Share of a collective's time in which its rank computes on; None takes 0.9 for a
            device, 0 for a CPU.
        schedules: Schedules that are allowed; None allows all synchronous ones.
        recompute: Whether activations may be computed again.
        states_per_parameter: Tensors of a parameter's size that the optimizer keeps: 2 for AdamW, 1
            for momentum, 0 for plain SGD.
        num_plans: Number of plans that are wanted.

    Returns:
        The best plans; as text, a table. Give one to :meth:`.MeshStrategy.from_plan`.

    Raises:
        ValueError: An argument is out of range, no layout has these sizes, or none fits; then the
            message says by how many bytes.
    """
    if not isinstance(module, pl.LightningModule):
        raise ValueError(f"The module is a {type(module).__name__}. Give a LightningModule.")
    check_count("world_size", world_size)
    check_count("num_hosts", num_hosts)
    check_count("states_per_parameter", states_per_parameter, at_least=0)
    check_choice("device", device, (*DEVICES, None))
    check_positive("efficiency", efficiency)
    if efficiency > 1:
        raise ValueError(f"efficiency={efficiency} must be above 0 and at most 1.")
    if overlap:
        check_positive("overlap", overlap)
    check_choice("recompute", recompute, (True, False))
    for name, link in (("within", within), ("between", between)):
        if not isinstance(link, Link | None):
            raise ValueError(f"{name}={link!r} must be a Link, such as Link(20e-6, 50e9).")
    here = module.device
    is_gpu = device is not None or here.type != "cpu"
    sheet = None if device is None else DEVICES[device]
    if memory_gib is not None:
        check_positive("memory_gib", memory_gib)
        memory = memory_gib * 2**30
    elif sheet is not None:
        memory = sheet.memory_bytes
    else:
        memory = memory_of(here, max(1, world_size // num_hosts))
    machine = Machine(
        world_size,
        memory,
        num_hosts=num_hosts,
        within=LinksByKind(within or (_link_at(here) if sheet is None else sheet.link)),
        between=LinksByKind(between or (_FABRIC if is_gpu else _ETHERNET)),
        processors=processors,
        overlap=(0.9 if is_gpu else 0.0) if overlap is None else overlap,
    )
    request = Request(global_batch, batch_size, recompute=recompute, num_plans=num_plans)
    if schedules is not None:
        request = replace(request, schedules=schedule_names(schedules))
    if sheet is None:
        module.configure_model()
        own, place, speed = module.to(here), here, None
    else:
        own, place = skeleton_of(module), torch.device("meta")
        speed = efficiency * sheet.half_flops
        with deferred_init(only_shapes=True):
            own.configure_model()
    batch = map_tensors(lambda tensor: tensor.to(place), batch)
    measurement = Measurement(
        place,
        tensor_sizes=tensor_sizes_of(machine),
        states_per_parameter=states_per_parameter,
        flops_per_second=speed,
    )
    return search(measurement.costs(own, batch), machine, request)


def _link_at(device: torch.device) -> Link:
    if device.type != "cuda":
        return _GLOO
    sheet = find_device(torch.cuda.get_device_name(device))
    return PCIE if sheet is None else sheet.link


# --- the command ---------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command to a parser."""
    add = parser.add_argument
    add("--config", metavar="FILE.yaml", help="arguments by name, with _ for -; others go before")
    add("--module", metavar="PACKAGE:CLASS", help="the LightningModule")
    add(
        "--module-args", nargs="*", default=[], metavar="NAME=VALUE", help="arguments of the module"
    )
    add("--data", metavar="PACKAGE:CLASS", help="a data module, or a function that returns a batch")
    add("--data-args", nargs="*", default=[], metavar="NAME=VALUE", help="arguments of the data")
    add("--world-size", type=int, default=1, help="all ranks (default 1)")
    add("--hosts", type=int, default=1, help="hosts, each with as many ranks (default 1)")
    add("--memory-gib", type=float, help="what a rank may use; default: what the device has")
    add("--global-batch", type=int, help="samples of an update")
    add("--batch-size", type=int, help="samples of a loader's batch, in place of --global-batch")
    add("--device", choices=sorted(DEVICES), help="count operations for it; default: measure here")
    add(
        "--accelerator",
        choices=_ACCELERATORS,
        default="auto",
        help="what measures; auto is a GPU if there is one",
    )
    add("--efficiency", type=float, default=0.4, help="share of its speed that is reached")
    add("--link-gbit", type=float, help="between the ranks of a host")
    add("--link-us", type=float, help=f"latency there, in microseconds (default {_LATENCY_US:g})")
    add("--host-link-gbit", type=float, help="of a host")
    add("--host-link-us", type=float, help="latency there, with the same default")
    add("--processors", type=float, help="ranks of a host that compute at the same time")
    add("--overlap", type=float, help="share of a collective's time in which its rank computes")
    add("--schedules", nargs="+", help="that are allowed; default: all synchronous ones")
    add("--no-recompute", action="store_true", help="compute no activations again")
    add(
        "--states-per-parameter", type=int, default=2, help="2 for AdamW, 1 for momentum, 0 for SGD"
    )
    add("--top", type=int, default=10, help="plans to show")
    add("--price-per-hour", type=float, help="of the whole machine")
    add("--samples-per-epoch", type=int, help="for the price of an epoch")
    add("--budget", type=float, help="money to spend: how many steps it buys")
    add("--out", metavar="FILE.yaml", help="write the best plan, for MeshStrategy.from_plan")


def run_plan(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Runs the command, and returns the status to end with."""
    from lightning_dist.callbacks.output import print_tables  # here, for it imports all callbacks

    try:
        _read_config(options)
        price = _price_of(options)
        if options.out and not Path(options.out).absolute().parent.is_dir():
            raise ValueError(f"--out {options.out}: there is no such folder. Make it first.")
        found = _plan_of(options)
        print_tables((found.table(price), found.memory_table()))
        if options.out:
            found.best.save(options.out)
            print(f"Wrote {options.out}: MeshStrategy.from_plan({options.out!r})")
    except (ValueError, OSError, yaml.YAMLError) as error:
        parser.error(str(error))
    return 0


def _read_config(options: argparse.Namespace) -> None:
    if options.config is None:
        return
    content = yaml.safe_load(Path(options.config).read_text(encoding="utf-8"))
    if not isinstance(content, dict) or not content.keys() <= vars(options).keys():
        raise ValueError(
            f"--config {options.config} must have only these keys: {sorted(vars(options))}"
        )
    written = [word for word in options.words if word.startswith("--")]
    given = {word.removeprefix("--").partition("=")[0].replace("-", "_") for word in written}
    for name, value in content.items():
        if name not in given:
            setattr(options, name, value)
    check_choice("accelerator", options.accelerator, _ACCELERATORS)


def _price_of(options: argparse.Namespace) -> Price | None:
    if options.price_per_hour is not None:
        return Price(options.price_per_hour, options.samples_per_epoch, options.budget)
    if options.budget is not None or options.samples_per_epoch is not None:
        raise ValueError("--budget and --samples-per-epoch need --price-per-hour.")
    return None


def _plan_of(options: argparse.Namespace) -> Ranking:
    if options.module is None or options.data is None:
        raise ValueError("Give --module PACKAGE:CLASS and --data PACKAGE:CLASS, or --config.")
    module = _made(options.module, options.module_args)
    if options.device is None and _measures_on_gpu(options.accelerator):
        module = module.to("cuda")
    return plan(
        module,
        _batch_of(_made(options.data, options.data_args)),
        world_size=options.world_size,
        num_hosts=options.hosts,
        memory_gib=options.memory_gib,
        global_batch=options.global_batch,
        batch_size=options.batch_size,
        device=options.device,
        efficiency=options.efficiency,
        within=_link("link", options.link_gbit, options.link_us),
        between=_link("host-link", options.host_link_gbit, options.host_link_us),
        processors=options.processors,
        overlap=options.overlap,
        schedules=options.schedules,
        recompute=not options.no_recompute,
        states_per_parameter=options.states_per_parameter,
        num_plans=options.top,
    )


def _measures_on_gpu(accelerator: str) -> bool:
    has_gpu = torch.cuda.is_available()
    if accelerator == "gpu" and not has_gpu:
        raise ValueError("--accelerator gpu: torch sees no GPU. Use cpu, or --device for one.")
    return has_gpu and accelerator != "cpu"


def _made(name: str, given: Sequence[str] | dict[str, Any] | None) -> Any:
    """Returns what a class or a function of this name makes of arguments."""
    package, _, attribute = name.partition(":")
    arguments = _arguments(given)
    try:
        kind = getattr(import_module(package), attribute)
        signature(kind).bind(**arguments)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(
            f"{name!r} with {arguments}: {error}. Write PACKAGE:CLASS, like recipes.gpt:GPT, and"
            " its arguments as NAME=VALUE."
        ) from None
    try:
        return kind(**arguments)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"{name!r} with {arguments}: {type(error).__name__}: {error}") from error


def _arguments(given: Sequence[str] | dict[str, Any] | None) -> dict[str, Any]:
    if isinstance(given, dict):
        return given
    found = {}
    for word in given or ():
        name, is_given, value = word.partition("=")
        if not is_given:
            raise ValueError(f"{word!r} is no argument. Write NAME=VALUE, as width=64.")
        found[name] = yaml.safe_load(value)
    return found


def _batch_of(source: Any) -> Any:
    """Returns the first training batch of a data module, or what a function has returned."""
    if not isinstance(source, pl.LightningDataModule):
        return source
    source.prepare_data()
    source.setup("fit")
    return next(iter(source.train_dataloader()))


def _link(name: str, gigabits: float | None, microseconds: float | None) -> Link | None:
    if gigabits is None:
        if microseconds is not None:
            raise ValueError(f"--{name}-us={microseconds:g} needs --{name}-gbit beside it.")
        return None
    latency = _LATENCY_US if microseconds is None else microseconds
    return Link(latency * 1e-6, gigabits * 1e9 / 8)
