"""The GPUs that this process may use: those in CUDA_VISIBLE_DEVICES, or else those that nvidia-smi
lists."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess

from zmqdist import limits

log = logging.getLogger("zmqdist.resolvers")

CUDA = "CUDA_VISIBLE_DEVICES"


def gpus() -> list[str]:
    """Return the ids of the GPUs, as CUDA_VISIBLE_DEVICES has them. [] means that this process may
    use no GPU, or that none is known."""
    named = os.environ.get(CUDA)
    return _listed() if named is None else visible(named)


def visible(named: str) -> list[str]:
    """Return the ids in a text like `0,2` or `GPU-8932f937,1`. As in CUDA, an invalid id such as -1
    and all ids after it do not count."""
    ids: list[str] = []
    for name in map(str.strip, named.split(",")):
        if not name or name.startswith("-"):
            break
        ids.append(name)
    return ids


def _listed() -> list[str]:
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    try:
        process = subprocess.run(
            [command, "--list-gpus"],
            capture_output=True,
            text=True,
            timeout=limits.NVIDIA_SMI_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        log.warning(
            "nvidia-smi does not work here, so no GPUs are counted (set %s to name them): %s",
            CUDA,
            error,
        )
        return []
    # Lines for parts of a GPU are indented, so they do not begin with "GPU ".
    lines = [line for line in process.stdout.splitlines() if line.startswith("GPU ")]
    return [str(index) for index in range(len(lines))]
