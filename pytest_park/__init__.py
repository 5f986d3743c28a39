"""Test modules that park their weights, on a fake accelerator or a real GPU.

The plugin itself is :mod:`pytest_park.plugin`, found by pytest through its entry point. Nothing in this module, and
nothing that loading the plugin pulls in, imports torch: a run that does not use our fixtures does not pay for them.
"""

from pytest_park.sizes import GiB, KiB, MiB, TiB, format_bytes, parse_size

__version__ = "0.1.0"

__all__ = ["GiB", "KiB", "MiB", "TiB", "__version__", "format_bytes", "parse_size"]
