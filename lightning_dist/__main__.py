"""The command line.

``python -m lightning_dist merge IN OUT.ckpt`` makes one ordinary file of a sharded checkpoint,
``python -m lightning_dist export IN OUT --format safetensors`` writes its weights for others,
``python -m lightning_dist doctor`` checks hosts before a run, and
``python -m lightning_dist plan`` finds the fastest layout of a module on a machine.
"""

from __future__ import annotations

import argparse
import os
import pickle
import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_dist.doctor.command import add_arguments, run_doctor
from lightning_dist.engine.checkpoint.directory import NotSavedError, refuse_other_folder
from lightning_dist.engine.checkpoint.files import load_full, save_full
from lightning_dist.engine.checkpoint.metadata import reason_of
from lightning_dist.export import add_arguments as add_export_arguments
from lightning_dist.export import replaceable_files, run_export
from lightning_dist.planner import add_arguments as add_plan_arguments
from lightning_dist.planner import run_plan


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line: some words, or those of this process."""
    parser = argparse.ArgumentParser(prog="python -m lightning_dist")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    merge = commands.add_parser("merge", help="make one Lightning checkpoint file of a sharded one")
    merge.set_defaults(run=_write, work=_merge, replaceable=lambda _: ())
    export = commands.add_parser("export", help="write a checkpoint's weights for other programs")
    export.set_defaults(run=_write, work=run_export, replaceable=replaceable_files)
    for command in (merge, export):
        add = command.add_argument
        add("source", metavar="IN", help="a checkpoint: a file, a directory of shards, or a URL")
        add("target", metavar="OUT", help="the file to write, or the directory for hf")
        add("--unpickle", action="store_true", help="trust IN, and load any object that it holds")
        add("--force", action="store_true", help="overwrite OUT if it exists")
    add_export_arguments(export)
    doctor = commands.add_parser("doctor", help="check hosts, links and disks before a run")
    add_arguments(doctor)
    doctor.set_defaults(run=run_doctor)
    planned = commands.add_parser(
        "plan",
        help="find the fastest layout of a module on a machine",
        allow_abbrev=False,  # or a configuration would replace what is abbreviated
    )
    add_plan_arguments(planned)
    planned.set_defaults(run=run_plan, words=sys.argv[1:] if arguments is None else arguments)
    options = parser.parse_args(arguments)
    code = options.run(parser, options)
    if code:
        sys.stdout.flush()
        os._exit(code)  # a thread that hangs must not keep the process


def _write(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Runs a command that writes OUT, and prints what it says."""
    target, source = Path(options.target), Path(options.source)
    if not target.name or not options.source:
        parser.error(f"IN={options.source!r} and OUT={options.target!r}: name a file.")
    try:
        refuse_other_folder(target, options.replaceable(options))
    except NotSavedError as error:
        parser.error(str(error))
    if target.resolve() in source.resolve().parents:
        parser.error(f"{target} has {source} in it, and would be replaced. Name another file.")
    if os.path.lexists(target) and not options.force:
        parser.error(f"{options.target} exists. Name another file, or add --force to overwrite it.")
    try:
        print(f"Wrote {options.target}: {options.work(options)}.")
    except (ImportError, OSError, ValueError) as error:
        parser.error(str(error))
    except pickle.UnpicklingError as error:
        if "GLOBAL" not in str(error):
            parser.error(f"{options.source} is no checkpoint: {reason_of(error)}")
        parser.error(
            f"{options.source} holds other objects than weights (in its hyperparameters, say):"
            f" {reason_of(error)} If you trust it, add --unpickle."
        )
    return 0


def _merge(options: argparse.Namespace) -> str:
    try:
        checkpoint = load_full(options.source, weights_only=not options.unpickle)
    except (EOFError, RuntimeError) as error:
        raise ValueError(f"{options.source} is no checkpoint, or is damaged: {error}") from error
    if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
        raise ValueError(f"{options.source} is no Lightning checkpoint: it has no 'state_dict'.")
    save_full(checkpoint, options.target)
    return f"{len(checkpoint['state_dict'])} tensors of weights"


if __name__ == "__main__":
    main()
