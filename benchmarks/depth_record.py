"""Where a record of the depth benchmarks comes from: GPU, versions, commit."""

from tilewise.bench.records import environment

__all__ = ["where"]


def where(device: str, part: str, **options) -> dict:
    """As a run of `tilewise bench` records it, without its key; the options are those of the measurement."""
    found = environment(part, "depth", device, ("torch", "triton"), options)
    return {name: found[name] for name in found if name not in ("record", "run", "set")}
