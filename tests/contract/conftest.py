"""pytester takes out of sys.modules what a suite in it is the first to import. Neither torch nor the registers of
checks and of the sick can be imported twice, so they are here first."""

from pytest_park.contract import testclass  # noqa: F401

from . import matrix  # noqa: F401
