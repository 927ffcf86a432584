"""What is common to the doors of :mod:`ringattn.adapters.doors`: opened, open once, and put back."""

from __future__ import annotations

import gc
import inspect
import sys
import types
from importlib import import_module

import pytest

import ringattn
from ringattn.adapters import doors, replacing


def test_a_door_is_open_once_and_puts_back_what_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    place = types.SimpleNamespace(attend="theirs")
    module = types.ModuleType("ringattn.adapters.doors.some")
    module.door = lambda value="ours": replacing.replaced(place, "attend", value)  # type: ignore[attr-defined]
    monkeypatch.setitem(doors.DOORS, "some", "a test's")
    monkeypatch.setattr(doors, "import_module", lambda name, package: module)
    with ringattn.install("some") as opened:
        assert place.attend == "ours"
        assert "a test's" in repr(opened)
        with pytest.raises(ValueError, match="installed already"):
            ringattn.install("some")
        assert place.attend == "ours"
    assert place.attend == "theirs"
    ringattn.install("some", value="other")
    gc.collect()  # of what nobody keeps
    assert place.attend == "other"
    opened = doors._OPEN["some"]
    opened.uninstall()
    opened.uninstall()
    assert place.attend == "theirs"


def test_functions_are_replaced_wherever_they_were_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = types.ModuleType("here"), types.ModuleType("there")
    for module in (here, there):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    here.attend = there.also = attend = lambda: "theirs"  # type: ignore[attr-defined]
    with replacing.everywhere(attend, "ours"):
        assert (here.attend, there.also) == ("ours", "ours")
    assert here.attend is there.also is attend


def test_what_was_inherited_or_absent_is_so_again() -> None:
    class Base:
        attend = "theirs"

    class Derived(Base):
        pass

    for name in ("attend", "absent"):
        with replacing.replaced(Derived, name, "ours"):
            assert getattr(Derived, name) == "ours"
        assert name not in vars(Derived)


def test_unknown_doors_are_named_beside_those_that_exist() -> None:
    with pytest.raises(ValueError, match="install\\('no'\\): there is no such door; choose from"):
        ringattn.install("no")


@pytest.mark.parametrize("name", sorted(doors.DOORS))
def test_every_door_is_a_file_of_few_lines_with_documented_options(name: str) -> None:
    module = import_module(f"ringattn.adapters.doors.{name}")
    assert len(inspect.getsource(module).splitlines()) <= 120
    assert inspect.getdoc(module.door)
