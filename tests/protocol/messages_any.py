"""Strategies for every message, made from the types themselves: a new one is covered at once."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
from hypothesis import strategies as st
from msgspec import inspect

from pdrt.protocol.messages import AnyMessage, Message

CLASSES: tuple[type[Message], ...] = get_args(AnyMessage)


def of_type(kind: inspect.Type) -> st.SearchStrategy[Any]:
    match kind:
        case inspect.IntType(ge=low, le=high):
            assert low is not None, "an integer without bounds is a surprise later on"
            assert high is not None, "an integer without bounds is a surprise later on"
            return st.integers(low, high) | st.sampled_from([low, high])
        case inspect.StrType(max_length=most):
            assert most is not None, "a text without a bound"
            return st.text(max_size=min(most, 12))
        case inspect.BytesType():
            return st.binary(max_size=40)
        case inspect.BoolType():
            return st.booleans()
        case inspect.ListType(item_type=item, max_length=most):
            assert most is not None, "a list without a bound"
            return st.lists(of_type(item), max_size=3)
        case inspect.DictType(key_type=key, value_type=value, max_length=most):
            assert most is not None, "a dict without a bound"
            return st.dictionaries(of_text(key), of_type(value), max_size=3)
        case inspect.StructType(cls=cls):
            return of_struct(cls)
        case _:
            raise AssertionError(f"no strategy for {kind}")


def of_text(kind: inspect.Type) -> st.SearchStrategy[str]:
    assert isinstance(kind, inspect.StrType)
    return st.text(max_size=8)


def of_struct(cls: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    info = inspect.type_info(cls)
    assert isinstance(info, inspect.StructType)
    return st.builds(cls, **{field.name: of_type(field.type) for field in info.fields})


any_message: st.SearchStrategy[AnyMessage] = st.one_of([of_struct(cls) for cls in CLASSES])
