"""What an operator refuses on the CPU it refuses on the device, with the same type of error and the same words."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from .comparison import same_outcome
from .database import OPERATORS, parameters
from .exceptions import HOST_ARGUMENTS

pytestmark = [pytest.mark.fake_device(memory="1 GiB"), pytest.mark.usefixtures("fake_device")]


@pytest.mark.parametrize("op", parameters("error", OPERATORS, lambda op: op.error_inputs_func is not None))
def test_what_the_cpu_refuses_is_refused(op: Any) -> None:
    torch.default_generator.manual_seed(0)
    for refused in op.error_inputs("cpu"):
        sample = refused.sample_input
        expected, actual = same_outcome(
            op.op, (sample.input, *sample.args), sample.kwargs, move_all=op.name not in HOST_ARGUMENTS
        )
        if expected.error is not None and re.search(refused.error_regex, str(expected.error)):
            assert re.search(refused.error_regex, str(actual.error)), actual.error
