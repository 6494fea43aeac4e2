"""`kvcache-plugins kernels`: state of the native kernels, and building them ahead of their first use."""

from __future__ import annotations

import argparse

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
    build = actions.add_parser("build", help="build what is not built yet")
    build.add_argument("--force", action="store_true", help="even if there is an intact build")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Build if asked to, then print the state."""
    import torch

    from ..kernels import cuda_loader, loader

    if args.action == "build":
        loader.build(force=args.force)
        if torch.cuda.is_available():
            cuda_loader.build(force=args.force)
            for index in range(torch.cuda.device_count()):
                cuda_loader.check(torch.device("cuda", index))
    status = loader.status()
    sizes = [state.st_size for state in loader.cached_builds().values()]
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
    for name, value in rows.items():
        if value is not None:
            print(f"{name + ':':<17}{value}")
    return 0
