"""Which device computes, by name."""

import torch

from reprune.errors import ConfigError


def pick_device(name: str) -> torch.device:
    """Turn `auto`, `cpu`, `cuda`, `cuda:1` or `mps` into a device that is there.

    Raises:
        ConfigError: the name is no device, or this machine does not have it.
    """
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"model.device={name}: not a device. Use auto, cpu, cuda, cuda:0, ... or mps.") from error
    missing = (device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count()) or (
        device.type == "mps" and not torch.backends.mps.is_available()
    )
    if missing or device.type not in ("cpu", "cuda", "mps"):
        raise ConfigError(f"model.device={name}: this machine has no such device. Use model.device=auto or cpu.")
    return device


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory in use so far: allocated on a CUDA device, resident for the process elsewhere."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource  # not on Windows, where this is the only line that would fail

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    import sys

    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux kilobytes
