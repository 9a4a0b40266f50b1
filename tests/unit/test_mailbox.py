"""Mailbox: each message arrives once and in order although calls are lost, repeated or late."""

import pickle
import random

import pytest

from paceline.remote.mailbox import Mailbox
from tests.fault_report import Fault


class Caller:
    """The other end, over a network that loses about every third call or its reply and repeats old
    calls."""

    def __init__(self, mailbox: Mailbox, seed: int) -> None:
        self._mailbox, self._chance = mailbox, random.Random(seed)
        self._pushed = self._received = 0
        self._old: list[tuple[int, list[bytes]]] = []
        self.got: list[object] = []
        self.faults = 0

    def push(self, messages: list[object]) -> None:
        call = self._pushed, [pickle.dumps(message) for message in messages]
        while True:
            if self._old and self._chance.random() < 0.3:
                self.faults += 1
                self._mailbox.push(*self._chance.choice(self._old))
            if self._chance.random() < 0.3:
                self.faults += 1
                continue  # lost
            self._old.append(call)
            self._mailbox.push(*call)
            if self._chance.random() < 0.7:
                break  # otherwise the reply was lost
            self.faults += 1
        self._pushed += len(messages)

    def pull(self) -> None:
        first, messages = self._mailbox.pull(self._received, wait_s=0)
        if self._chance.random() < 0.3:
            self.faults += 1
            return  # the reply was lost
        for number, message in enumerate(messages, first):
            if number >= self._received:
                self._received = number + 1
                self.got.append(pickle.loads(message))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.fault("A3", "calls to a worker lost or repeated at random")
def test_messages_arrive_once_in_order_when_calls_are_lost_or_repeated(
    seed: int, fault: Fault
) -> None:
    mailbox = Mailbox()
    caller = Caller(mailbox, seed)
    taken: list[object] = []
    for number in range(0, 100, 2):
        caller.push([number, number + 1])
        while mailbox.poll(0):
            taken.append(message := mailbox.recv())
            mailbox.send(("reply", message))
        caller.pull()
    while len(caller.got) < 100:
        caller.pull()
    assert taken == list(range(100))
    assert caller.got == [("reply", number) for number in range(100)]
    assert caller.faults > 20
    fault.fired()
