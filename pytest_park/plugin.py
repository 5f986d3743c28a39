"""The hooks by which pytest, pytest-benchmark and pytest-xdist call us; what they do stands in the modules beside it.

Loading this module must not import torch: it happens in every test run of every environment that we are installed in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pytest_park import leaks, marks, options, reporting, selection, tracebacks, workers
from pytest_park.fixtures import fake_device, headroom, park_device, transfer_benchmark

if TYPE_CHECKING:
    from collections.abc import Generator

    import torch

__all__ = ["fake_device", "headroom", "park_device", "transfer_benchmark"]


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    from pytest_park import hookspecs

    pluginmanager.add_hookspecs(hookspecs)


def pytest_addoption(parser: pytest.Parser) -> None:
    options.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    for line in marks.HELP:
        config.addinivalue_line("markers", line)
    options.load_options(config)
    workers.take_gpu_of_worker(config)


def pytest_sessionstart(session: pytest.Session) -> None:
    """A promised GPU that is missing ends the run before a test is collected."""
    if options.park_options(session.config).real_gpu:
        workers.check_worker_count(session.config, selection.find_real_gpus(session.config))


def pytest_report_header(config: pytest.Config) -> str | None:
    settings = options.park_options(config)
    return reporting.header(settings, selection.find_real_gpus(config) if settings.real_gpu else None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marks.request_fixtures(items)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """A mark that makes no sense is an error of its test: raised in the collection, xdist would lose the message."""
    try:
        marks.check(item)
        selection.skip_if_it_cannot_run(item, real_gpu=options.park_options(item.config).real_gpu)
    except pytest.UsageError as error:
        raise pytest.fail.Exception(str(error), pytrace=False) from None


@pytest.hookimpl(trylast=True, specname="pytest_runtest_setup")
def pytest_runtest_setup_is_done(item: pytest.Item) -> None:
    """After all fixtures, so that what they put on the device does not change the headroom that the mark promises."""
    marks.apply_headroom(item)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    if call.excinfo is not None:
        tracebacks.end_at_the_test()
    report = yield
    leaks.note_result(item, report)
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None]:
    """After the teardown of everything, fixtures and other plugins included."""
    yield
    leaks.check(item)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    reporting.summary(terminalreporter, config)


@pytest.hookimpl(trylast=True)
def pytest_park_device(config: pytest.Config) -> torch.device | None:
    return selection.first_real_device()


@pytest.hookimpl(tryfirst=True)
def pytest_park_machine_info(config: pytest.Config, info: dict[str, Any]) -> None:
    info.update(reporting.machine_info(config))


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    info: dict[str, Any] = {}
    config.hook.pytest_park_machine_info(config=config, info=info)
    if info:
        machine_info["park"] = info


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    return selection.find_real_gpus(config).count if config.getoption("park_real_gpu") else None


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    if options.park_options(node.config).real_gpu:
        workers.send_gpu_to_worker(node, selection.find_real_gpus(node.config))
