"""Which GPUs this process may use: what CUDA_VISIBLE_DEVICES says, else what nvidia-smi lists."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess

from zmqdist import limits

log = logging.getLogger("zmqdist.resolvers")

CUDA = "CUDA_VISIBLE_DEVICES"


def gpus() -> list[str]:
    """Their ids, as CUDA_VISIBLE_DEVICES would name them; [] on a host without any."""
    named = os.environ.get(CUDA)
    return _listed() if named is None else visible(named)


def visible(named: str) -> list[str]:
    """The ids in a text like `0,2` or `GPU-8932f937,1`. As for CUDA, what follows a bad id (-1 is one) does not count."""
    ids: list[str] = []
    for each in map(str.strip, named.split(",")):
        if not each or each.startswith("-"):
            break
        ids.append(each)
    return ids


def _listed() -> list[str]:
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    try:
        done = subprocess.run(
            [command, "--list-gpus"], capture_output=True, text=True, timeout=limits.NVIDIA_SMI_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("nvidia-smi does not work here, so no GPUs are counted (set %s to name them): %s", CUDA, error)
        return []
    lines = [line for line in done.stdout.splitlines() if line.startswith("GPU ")]  # parts of a GPU are indented
    return [str(index) for index in range(len(lines))]
