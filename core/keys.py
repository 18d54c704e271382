"""What a request is known by in the cache: its tokens, unless a plugin of kind `key` says otherwise."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Protocol

from .errors import PluginError
from .messages import GenerateCall

if TYPE_CHECKING:
    from .request import Request


class KeyScheme(Protocol):
    """Kind `key`. What the cache compares in place of tokens, where equal tokens do not mean that state may be shared.

    For instance the placeholders of an image, which must differ with the image, or texts that only one client may find
    again. The cache, the waiting index and the events see keys and know no difference.
    """

    def keys(self, tokens: array[int], start: int, call: GenerateCall) -> array[int]:
        """One key per token of tokens[start:], as array("q"). Called at arrival, and after each step of the output.

        Key i is a function of tokens[: i + 1] and the call. Requests whose first i + 1 keys are equal share the state
        of these tokens: so the tokens must be equal, and whatever else it was computed from. Raising ends that request
        only.
        """


def rekey(request: Request, scheme: KeyScheme | None) -> None:
    """Bring `request.keys` up to its tokens. Raises what the scheme raises, or PluginError for too many or few keys."""
    if scheme is None:
        return  # keys are the tokens: the same array
    if request.keys is request.tokens:
        request.keys = array("q")
    missing = len(request.tokens) - len(request.keys)
    made = scheme.keys(request.tokens, len(request.keys), request.call)
    if len(made) != missing or made.typecode != "q":
        got = f"{len(made)} keys of type {made.typecode!r}"
        raise PluginError(f"{type(scheme).__name__}.keys() returned {got} for {missing} tokens: one each, of type 'q'")
    request.keys.extend(made)
