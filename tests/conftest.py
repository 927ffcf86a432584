"""What every test shares: a quiet CPU, Triton's interpreter where there is no GPU, and the pools of ranks."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ.setdefault("RINGATTN_CUBINS", "0")  # kernels are compiled, also where prebuilt ones lie
with contextlib.suppress(OSError):
    if "AuthenticAMD" in Path("/proc/cpuinfo").read_text():
        # There rows of a product of a BLAS may have other bits next to other rows, unless it is told not to: MKL, which
        # torch uses, and OpenBLAS, which NumPy and so Triton's interpreter use. Read when they are loaded, and whatever
        # the shell says: with OPENBLAS_CORETYPE=Haswell tests of the same bits fail.
        os.environ["MKL_CBWR"] = "COMPATIBLE"
        os.environ["OPENBLAS_CORETYPE"] = "SandyBridge"

import interpreter
import pytest
import suite
import torch
from pool import Pool

if not torch.cuda.is_available():  # read when triton is first imported, which torch does not do by itself
    os.environ.setdefault("TRITON_INTERPRET", "1")
torch.set_num_threads(1)
_began = time.monotonic()
ALL_LONG = re.compile(r"^pytestmark = (pytest\.mark\.long$|\[.*pytest\.mark\.long\b)", re.MULTILINE)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="all tests, with more examples and more numbers of ranks")
    parser.addoption(
        "--stop-after", type=float, metavar="SECONDS", help="begin no test later than that: skip the others"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "long: runs with --long only")
    config.addinivalue_line("markers", "xdist_group(name): tests of one name run in one worker of pytest-xdist")
    suite.LONG = config.getoption("--long")
    with contextlib.suppress(ImportError):  # without it, scripts/test leaves out the files that need it
        from hypothesis import HealthCheck, settings

        number = 200 if suite.LONG else suite.EXAMPLES
        checks = list(HealthCheck)
        settings.register_profile(
            "ringattn", deadline=None, max_examples=number, derandomize=True, suppress_health_check=checks
        )
        settings.load_profile("ringattn")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A file whose tests are all long is not imported without --long: it may need seconds for other libraries."""
    if suite.LONG or not collection_path.name.startswith("test_") or collection_path.suffix != ".py":
        return None
    return True if ALL_LONG.search(collection_path.read_text()) else None


def pytest_report_header() -> str:
    return "all tests" if suite.LONG else "the default tests; --long runs all"


@pytest.hookimpl(wrapper=True, tryfirst=True)  # around pytest-xdist's, which gives groups a name
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    kept, left_out, skipped = [], [], set()
    for item in items:
        function, _, _ = item.nodeid.partition("[")
        if any(mark.args[0] is True for mark in item.iter_markers("skipif")):
            again = function in skipped  # of a function's hundreds of cases that need a GPU, one says so
            skipped.add(function)
        else:
            again = False
        (left_out if again or (item.get_closest_marker("long") and not suite.LONG) else kept).append(item)
    for item in kept:  # a pool lives in one worker of pytest-xdist: that of two ranks has also the tests of any number
        if "pools" in getattr(item, "fixturenames", ()) and item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group("ranks2"))
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept
    yield
    # pytest-xdist 3.8 writes _nodeid, which pytest 9.2 does not read: each worker would have each pool.
    for item in kept:
        name = getattr(item, "_nodeid", item.nodeid)
        if name != item.nodeid:
            item._id = type(item._id).parse(name)


def pytest_collection_finish() -> None:
    """Let what is done again and again be fast.

    gc.collect() looks through none of the modules and tests, which takes half a second; Triton's interpreter looks
    up what it found out before (interpreter.py).
    """
    gc.freeze()
    if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
        interpreter.quicken()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    limit = item.config.getoption("--stop-after")
    if limit is not None and time.monotonic() - _began > limit:
        pytest.skip(f"the {limit:g} s of --stop-after are over")


@pytest.fixture(scope="session")
def pools() -> Iterator[Callable[[int], Pool]]:
    """``pools(n)``: n processes with a gloo group, started at first use and kept until the session ends."""
    made: dict[int, Pool] = {}

    def get(world_size: int) -> Pool:
        return made.setdefault(world_size, Pool(world_size))

    yield get
    for pool in made.values():
        pool.close()
