"""`ParkableContract`: the checks as tests of a class that a project subclasses."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import pytest
from torch import nn

from .checks.testable import expect_adoption
from .examine import judge, usable
from .host import set_aside, swift_collector
from .parkable import Parkable
from .registry import Check, all_checks, first_check
from .verdict import NotApplicable, Untestable, Verdict

#: What the fixture gives that no subclass has replaced. To raise there would be an error in each of the tests.
_NOT_SUPPLIED: Any = object()


class ParkableContract:
    """What every parkable module must do. Subclass it and supply one fixture::

        class TestMyEncoder(ParkableContract):
            @pytest.fixture
            def parkable(self, park_device):
                encoder = MyEncoder().to(park_device.device).eval()
                return Parkable(encoder, example_inputs=torch.ones(2, 8, device=park_device.device))

    Each promise is a test; ``-k c05`` or ``-k updates`` picks some. Where the first test says that the parkable
    cannot be tested, the others are skipped.
    """

    #: Promises that this implementation is known to break, and why: ``{"c36": "our components share nothing"}``. A key
    #: is the beginning of a test's name after ``test_``. These tests are expected to fail, and fail when they pass:
    #: then the promise is kept, and its line can go.
    known_broken: ClassVar[Mapping[str, str]] = {}

    #: Modules that tests of this class have had, to notice one that comes twice.
    _seen: ClassVar[weakref.WeakSet[nn.Module]]
    #: Why nothing can be tested; the first test that finds it out fails with it, the others are skipped.
    _untestable: ClassVar[str]
    #: Whether it is known in this process that things can be tested: its first test need not have been run here.
    _is_testable: ClassVar[bool]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        labels = [label for one in all_checks() for label in one.labels()]
        for start in cls.known_broken:
            if not any(label.startswith(start) for label in labels):
                raise ValueError(f"{cls.__name__}.known_broken: the name of no check begins with {start!r}")
        cls._seen = weakref.WeakSet()
        cls._untestable = ""
        cls._is_testable = False

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _swift_collector(cls) -> Iterator[None]:
        with swift_collector():
            yield

    @pytest.fixture(autouse=True)
    def _set_aside(self, _swift_collector: None) -> None:
        set_aside()

    @classmethod
    def _or_untestable(cls, one: Check, verdict: Verdict, parkable: Parkable) -> Verdict:
        """*verdict*; or that nothing can be tested, if a promise is broken and two plain layers are no good either."""
        if verdict.outcome == "broken" and not cls._is_testable and parkable.adopt is not None:

            def trial_of_adoption() -> Parkable:
                expect_adoption(parkable)
                raise NotApplicable("that was all there is to try: the module has been used")

            trial = judge(first_check(), None, trial_of_adoption)
            cls._is_testable = trial.outcome != "untestable"
            if trial.outcome == "untestable":
                verdict = trial
        if verdict.outcome == "untestable":
            cls._untestable = verdict.reason
        elif not one.promise:
            cls._is_testable = True
        return verdict

    @pytest.fixture
    def parkable(self) -> Parkable:
        """Supplied by the subclass: a `Parkable` over a new module."""
        return _NOT_SUPPLIED  # type: ignore[no-any-return]


def _test_of(one: Check) -> Callable[..., None]:
    def run(self: ParkableContract, parkable: Parkable, variant: str | None) -> None:
        if self._untestable:
            pytest.skip(f"this parkable cannot be tested: {self._untestable}")
        verdict = judge(one, variant, lambda: _given(self, parkable), repeats=self._is_testable)
        verdict = self._or_untestable(one, verdict, parkable)
        if verdict.outcome == "not applicable":
            pytest.skip(f"not applicable: {verdict.reason}")
        known = next((why for start, why in self.known_broken.items() if verdict.check.startswith(start)), None)
        if verdict.finding is not None:
            if known is None:
                pytest.fail(str(verdict.finding), pytrace=False)
            pytest.xfail(f"known to be broken: {known}")
        if known is not None and not one.variants:
            pytest.fail(f"this promise is kept: take {one.id} out of known_broken ({known})", pytrace=False)

    def test(self: ParkableContract, parkable: Parkable) -> None:
        run(self, parkable, None)

    def test_with_variants(self: ParkableContract, parkable: Parkable, variant: str) -> None:
        run(self, parkable, variant)

    function: Callable[..., None] = test_with_variants if one.variants else test
    function.__name__ = f"test_{one.id}"
    function.__qualname__ = f"{ParkableContract.__name__}.{function.__name__}"
    function.__doc__ = f"C{one.promise}: {one.title}" if one.promise else f"This is {one.title}."
    setattr(function, one.family, True)  # pytest's -k finds names of function attributes
    if one.variants:
        function = pytest.mark.parametrize("variant", list(one.variants))(function)
    return function


def _given(test: ParkableContract, parkable: object) -> Parkable:
    if parkable is _NOT_SUPPLIED:
        raise Untestable(f"{type(test).__name__} needs a fixture `parkable` that returns a Parkable")
    return usable(parkable, "the fixture parkable", test._seen)


for _check in all_checks():
    setattr(ParkableContract, f"test_{_check.id}", _test_of(_check))
