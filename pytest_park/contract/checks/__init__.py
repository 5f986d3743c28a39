"""The checks, one module per family. Importing this package registers them all."""

from . import (  # noqa: F401
    accounting,
    concurrency,
    decision,
    failures,
    guard,
    idempotence,
    identity,
    readers,
    refit,
    sharing,
    structure,
    testable,
    transfers,
    updates,
    values,
)
