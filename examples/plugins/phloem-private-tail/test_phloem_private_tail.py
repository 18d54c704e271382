"""private-tail keeps the promises of every key scheme, and its own."""

from __future__ import annotations

from array import array
from typing import Any

from msgspec.structs import replace
from phloem_private_tail import PrivateTail

from phloem.interfaces import PluginContext
from phloem.messages import GenerateCall
from phloem.params import SamplingParams
from phloem.prefix import common_prefix
from phloem.testing import FakeService, KeySuite


class TestPrivateTail(KeySuite):
    plugin = PrivateTail

    def make(self) -> Any:
        """With a tokenizer in which the marker is token 2."""
        context = PluginContext("key", "private-tail", tokenizer=FakeService().tokenizer)
        return PrivateTail(PrivateTail.Options(marker="hi"), context)

    def shared(self, prompt: list[int], first: str | None, second: str | None) -> int:
        """How many keys two clients share."""
        scheme, tokens = self.make(), array("i", prompt)
        call = GenerateCall(call_id="x", prompt=prompt, params=SamplingParams())
        one, two = (scheme.keys(tokens, 0, replace(call, routing_key=client)) for client in (first, second))
        return common_prefix(one, two, 0, len(prompt))

    def test_the_beginning_is_shared(self) -> None:
        """Up to the first marker."""
        assert self.shared([0, 1, 2, 0, 2, 1], "a", "b") == 3
        assert self.shared([0, 1, 2, 0, 2, 1], "a", None) == 3
        assert self.shared([0, 1, 0], "a", "b") == 3

    def test_a_client_finds_its_own(self) -> None:
        """All of it."""
        assert self.shared([0, 1, 2, 0, 2, 1], "a", "a") == 6
