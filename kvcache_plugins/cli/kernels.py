"""`kvcache-plugins kernels`: state of the native kernels, and building them ahead of their first use."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from ..errors import KernelUnavailableError

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the sub-command."""
    parser = subparsers.add_parser(
        "kernels",
        help="build the native kernels, or say what became of them",
        description="Native kernels are built at first use. See to it earlier, or look at what there is.",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    actions.add_parser("status", help="print the state; nothing is built")
    build = actions.add_parser("build", help="build what is not built yet, and try it on every GPU there is")
    build.add_argument("--force", action="store_true", help="even if there is an intact build")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Build if asked to, then print the state."""
    import torch

    from ..kernels import builds, cuda_loader, loader

    failures = []
    if args.action == "build":
        loader.build(force=args.force)
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        is_wanted = gpus > 0 or (torch.version.cuda is not None and "TORCH_CUDA_ARCH_LIST" in os.environ)
        if is_wanted and os.environ.get("KVCACHE_CUDA_KERNELS") != "0":
            failures = _build_for_gpus(gpus, args.force)
    status = loader.status()
    sizes = [state.st_size for state in builds.cached_builds().values()]
    rows = {
        "state": status.state,
        "library": status.path,
        "cache directory": status.cache_directory,
        "cached builds": f"{len(sizes)} ({sum(sizes) / 2**20:.1f} MiB)",
        "compiler": status.compiler or "none found",
        "instruction set": status.instruction_set,
        "reason": status.reason,
    }
    device = cuda_loader.status()
    rows |= {
        "CUDA kernels": device.state,
        "CUDA library": device.path,
        "CUDA compiler": device.compiler or "none found",
        "CUDA reason": device.reason,
    }
    if device.path is not None and torch.cuda.is_available():
        rows["CUDA trial"] = _trials(device.path)
    for name, value in rows.items():
        if value is not None:
            print(f"{name + ':':<17}{value}")
    for failure in failures:
        print(f"error: {failure}", file=sys.stderr)
    return 1 if failures else 0


def _trials(library: Path) -> str:
    """On which GPUs a build has passed its first run."""
    import torch

    from ..kernels import cuda_trial

    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return ", ".join(
        f"{device} {'passed' if cuda_trial.passed(library, device) else 'not yet'}" for device in devices
    )


def _build_for_gpus(count: int, force: bool) -> list[str]:
    """Build the CUDA kernels and try them on every GPU; return what failed."""
    import torch

    from ..kernels import cuda_loader

    failures = []
    try:
        cuda_loader.build(force=force)
    except KernelUnavailableError as error:
        return [str(error)]
    for index in range(count):
        try:
            cuda_loader.check(torch.device("cuda", index))
        except KernelUnavailableError as error:
            failures.append(str(error))
    return failures
