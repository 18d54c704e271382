"""Conformance of kind `key`: one key per token, the same in pieces, and equal only where tokens are.

class TestMine(KeySuite):
    plugin = MyScheme
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from copy import deepcopy
from itertools import combinations

from ..interfaces import KeyScheme
from ..messages import GenerateCall
from ..params import SamplingParams
from ..prefix import common_prefix
from .plugin import PluginSuite


class KeySuite(PluginSuite):
    """Replace `calls` where the scheme looks for something in particular."""

    kind = "key"

    def scheme(self) -> KeyScheme:
        """`make`, typed."""
        scheme: KeyScheme = self.make()
        return scheme

    def calls(self) -> Iterator[GenerateCall]:
        """Every token in turn, and calls that share prefixes of all lengths with all that may tell one from another."""
        rng = random.Random(1)
        trunk = [rng.randrange(32) for _ in range(40)]
        for token in range(32):
            yield GenerateCall(call_id=f"token {token}", prompt=[*trunk[:3], token], params=SamplingParams())
        for i in range(24):
            cut = rng.randrange(len(trunk) + 1)
            yield GenerateCall(
                call_id=f"{i}",
                prompt=[*trunk[:cut], *(rng.randrange(32) for _ in range(1 + rng.randrange(6)))],
                params=SamplingParams(),
                salt=rng.choice([None, "a"]),
                routing_key=rng.choice([None, "a", "b"]),
            )

    def test_one_key_per_token(self) -> None:
        """As many keys as tokens, of type "q", wherever it starts."""
        scheme = self.scheme()
        for call in self.calls():
            tokens = array("i", call.prompt)
            for start in range(len(tokens) + 1):
                keys = scheme.keys(tokens, start, call)
                assert keys.typecode == "q", f"keys are array({keys.typecode!r})"
                assert len(keys) == len(tokens) - start, f"{len(keys)} keys for {len(tokens) - start} tokens"

    def test_a_key_depends_on_what_is_before_it_only(self) -> None:
        """Keys made in pieces, as an output grows, are those made at once, as for the next turn's prompt."""
        scheme = self.scheme()
        for call in self.calls():
            tokens = array("i", call.prompt)
            whole = scheme.keys(tokens, 0, call)
            for cut in range(len(tokens) + 1):
                pieces = scheme.keys(tokens[:cut], 0, call) + scheme.keys(tokens, cut, call)
                assert pieces == whole, f"a text cut at {cut} has other keys"

    def test_equal_keys_mean_equal_tokens(self) -> None:
        """Two requests never share more keys than tokens: they would be given another text's state."""
        scheme = self.scheme()
        made = [(array("i", call.prompt), call) for call in self.calls()]
        keyed = [(tokens, scheme.keys(tokens, 0, call)) for tokens, call in made]
        for (tokens, keys), (other, others) in combinations(keyed, 2):
            most = min(len(tokens), len(other))
            alike, shared = common_prefix(tokens, other, 0, most), common_prefix(keys, others, 0, most)
            assert shared <= alike, f"{shared} keys are equal, {alike} tokens are"

    def test_changes_nothing(self) -> None:
        """Neither the tokens nor the call."""
        scheme = self.scheme()
        for call in self.calls():
            tokens, before = array("i", call.prompt), deepcopy(call)
            scheme.keys(tokens, 0, call)
            assert (tokens.tolist(), call) == (before.prompt, before)
