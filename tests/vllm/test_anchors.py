"""Anchors on a module of ours: what is looked for, what is told, what is changed."""

import sys
import types

import pytest

from tp3.vllm.anchors import Anchor, Hook, problems, wrap
from tp3.vllm.settings import Settings


class Engine:
    limit = 1

    def load(self, model, name="a"):
        return model, name

    @classmethod
    def kind(cls, device):
        return cls.__name__, device


@pytest.fixture
def engine(monkeypatch):
    class Fresh(Engine):
        load = Engine.load
        kind = Engine.__dict__["kind"]

    module = types.ModuleType("tp3_test_engine")
    module.Engine = Fresh
    monkeypatch.setitem(sys.modules, "tp3_test_engine", module)
    return Fresh


def around(original):
    def twice(*args, **kwargs):
        return original(*args, **kwargs), "wrapped"

    return twice


@pytest.mark.parametrize(
    ("place", "takes", "told"),
    [
        ("tp3_no_such:Engine.load", (), "there is none"),
        ("tp3_test_engine:Engine.save", (), "there is none"),
        ("tp3_test_engine:Motor.load", (), "there is none"),
        ("tp3_test_engine:Engine.limit", (), "it is 1, not a function"),
        (
            "tp3_test_engine:Engine.load",
            ("model", "path"),
            "it takes .self, model, name., without path",
        ),
        ("tp3_test_engine:Engine.kind", ("index",), "it takes .cls, device., without index"),
    ],
)
def test_what_is_not_as_expected_is_one_sentence(engine, place, takes, told):
    with pytest.raises(ValueError, match=told) as error:
        Anchor(place, takes).find()
    text = str(error.value)
    assert text.startswith("tp3 does not fit vLLM ")
    assert place in text
    assert "\n" not in text


def test_wrapping_twice_wraps_once(engine):
    for place, takes in (("load", ("model",)), ("kind", ("device",))):
        for _ in range(2):
            wrap(Anchor(f"tp3_test_engine:Engine.{place}", takes), around)
    assert engine().load(1, name="b") == ((1, "b"), "wrapped")
    assert engine.kind("cpu") == (("Fresh", "cpu"), "wrapped")


def test_a_wrapped_function_is_still_found(engine):
    anchor = Anchor("tp3_test_engine:Engine.load", ("model", "name"))
    wrap(anchor, around)
    assert anchor.find() == (engine, "load")


def test_a_value_needs_no_signature(engine):
    assert Anchor("tp3_test_engine:Engine.limit").find() == (engine, "limit")


def test_all_problems_are_told_with_their_hook(engine):
    hook = Hook(
        "weights",
        "",
        (Anchor("tp3_test_engine:Engine.load", ("path",)), Anchor("tp3_test_engine:Engine.x")),
        lambda settings: None,
    )
    found = problems([hook])
    assert [text.split(":")[0] for text in found] == ["weights", "weights"]
    assert hook.wanted(Settings())
    assert not hook.wanted(Settings(pad=False))
