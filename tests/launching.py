"""Scripts of the repository in processes of their own: one, or several that work together, as of `torchrun`.

`torchrun` imports torch, and so does every process that it starts. These are forks of one that has imported
it, with the environment that `torchrun` gives.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import torch

from tests.kernels import fresh_process

__all__ = ["run_script"]

_SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
_START = """
import os, runpy, sys

import torch

os.environ.update({environment!r})
torch.set_num_threads(1)
sys.argv = {command!r}
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as end:
    if end.code:
        raise
"""


def run_script(script: str, *arguments: str, processes: int = 1) -> subprocess.CompletedProcess[str]:
    """Run a script of the folder `scripts`, or one given by its whole path, offline.

    Like `subprocess.run`, with what all processes print.
    """
    command = [str(_SCRIPTS / script), *arguments]
    common = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    if processes == 1:
        return fresh_process.run(_START.format(environment=common, command=command), os.environ)
    # where they meet; it finds a free port itself
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "GROUP_RANK": "0"}
    common |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    common |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    ranks = [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]
    done = fresh_process.run_together(
        [_START.format(environment=environment, command=command) for environment in ranks], os.environ
    )
    return subprocess.CompletedProcess(
        command,
        max(abs(process.returncode) for process in done),
        "".join(process.stdout for process in done),
        "".join(process.stderr for process in done),
    )
