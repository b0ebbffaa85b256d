from __future__ import annotations

import pytest
from msgspec import inspect

from pdrt.protocol.messages import OLDEST, PEER_MESSAGES, VERSION, Message
from tests.protocol.messages_any import CLASSES

#: What each tag has meant in any version.  A line is never changed and never removed, so that a tag
#: cannot come back with another meaning; new messages are appended.
TAGS_EVER = """
 1 Hello             version oldest instance epoch digest
 2 HelloReply        version oldest instance epoch digest refusal detail layout
 3 Introduction      instance epoch control boot_id agents serial
 4 Introduced        instance serial transport detail
 5 Heartbeat         instance epoch rooms
 6 Resync            instance epoch
10 Destination       room rank slot generation instance agent_epoch pages aux_index session
11 DestinationTaken  slot generation instance
12 Expect            room rank slot generation instance sent session
13 Abort             room rank slot generation instance reason quiet session
14 AbortTaken        room rank slot generation instance quiet session
15 Landed            room rank slot generation length_bytes chunks instance
17 NewsTaken         slot generation instance
30 Opened            room rank slot generation peer
31 Ended             slot generation failed reason untouched room rank peer
32 Chunk             room slot generation index start pages last aux_index
33 WorkerUp          rank epoch offers
34 PeerUp            instance control agent same_host
35 PeerWarm          instance rank agent_epoch transport detail
36 PeerGone          instance
37 Fenced            slot generation
38 Deliver           slot generation destination
39 Declined          room rank generation reason peer
40 Recall            slot generation instance
41 Recalled          slot generation instance taken use since
"""
LOCAL_FROM = 30  # tags of messages that stay inside one process tree
EVER = {
    int(tag): (name, fields) for tag, name, *fields in map(str.split, TAGS_EVER.split("\n")[1:-1])
}


def info_of(cls: type[Message]) -> inspect.StructType:
    info = inspect.type_info(cls)
    assert isinstance(info, inspect.StructType)
    return info


def tag_of(cls: type[Message]) -> int:
    tag = info_of(cls).tag
    assert isinstance(tag, int)
    return tag


def test_tags_are_unique() -> None:
    assert len({tag_of(cls) for cls in CLASSES}) == len(CLASSES)
    assert len(EVER) == TAGS_EVER.count("\n") - 1


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_a_tag_and_its_fields_mean_what_they_always_meant(cls: type[Message]) -> None:
    name, fields = EVER[tag_of(cls)]
    now = [field.encode_name for field in info_of(cls).fields]
    assert cls.__name__ == name
    assert now[: len(fields)] == fields, "a field may only be appended"
    assert all(not field.required for field in info_of(cls).fields[len(fields) :])


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_messages_are_positional_frozen_and_say_what_they_are_for(cls: type[Message]) -> None:
    assert info_of(cls).array_like
    assert not info_of(cls).forbid_unknown_fields
    assert cls.__struct_config__.frozen
    assert cls.__doc__
    assert cls.__doc__ != Message.__doc__


def test_peers_have_the_low_tags_and_the_tree_the_high_ones() -> None:
    assert set(PEER_MESSAGES) == {cls for cls in CLASSES if tag_of(cls) < LOCAL_FROM}


def test_versions_have_an_order() -> None:
    assert 1 <= OLDEST <= VERSION
